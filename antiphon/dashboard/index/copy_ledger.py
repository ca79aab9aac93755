"""Copy attempts from a run's ledger into its index, at first all of them, then those that may have changed."""

import itertools
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from antiphon.record import safe_files
from antiphon.record.safe_ledger import open_ledger

GROUPS = 2_000  # whose attempts are copied in one transaction
FIRST_GROUPS = 100  # in the first one, which pages wait for
MOST_TEXT = 300  # characters of a failure
COPY = """
INSERT INTO attempts (lineage, grp, sibling, try, task, prompt, epoch, status, started, step, age, score, tokens,
    prompt_tokens, begun, seconds, failure, file, origin)
SELECT a.lineage, a.grp, a.sibling, a.try, substr(p.task, 1, 200), substr(p.id, 1, 200), p.epoch, a.status, a.started,
    a.step, s.version - 1 - a.started, a.score, a.tokens, a.prompt_tokens, a.begun, a.seconds,
    substr(a.failure, 1, :text), a.file, a.origin
FROM run.attempts a JOIN run.groups g USING (lineage, grp) JOIN run.prompts p USING (prompt)
    LEFT JOIN run.steps s ON s.lineage = a.lineage AND s.step = a.step
WHERE a.lineage = :lineage AND a.grp >= :first AND a.grp < :stop
ON CONFLICT (lineage, grp, sibling, try) DO UPDATE SET status = excluded.status, step = excluded.step, age = excluded.age,
    score = excluded.score, tokens = excluded.tokens, prompt_tokens = excluded.prompt_tokens, seconds = excluded.seconds,
    failure = excluded.failure, file = excluded.file
"""


def copy_attempts(index: sqlite3.Connection, run: Path, report: Callable[[float], None] = lambda share: None) -> int:
    """Copy the attempts that are new or were not at their end the last time.

    Args:
        index: The index, open for writing.
        run: The run directory.
        report: Called with the share that is done.

    Returns:
        The number of groups whose attempts were copied.
    """
    ledger = run / "ledger.db"
    if not ledger.exists():
        return 0
    with closing(open_ledger(run, check_pages=False)):  # it has our tables alone; pages are checked by the audit
        pass
    mode = "mode=ro" if ledger.with_name("ledger.db-wal").exists() else "immutable=1"
    index.execute("ATTACH ? AS run", (f"{ledger.absolute().as_uri()}?{mode}",))
    try:
        with safe_files.convert_read_errors(ledger):
            copied = _copy(index, report)
            if copied:
                _count_facets(index)
            return copied
    finally:
        index.rollback()
        index.execute("DETACH run")


def _copy(index: sqlite3.Connection, report: Callable[[float], None]) -> int:
    ranges = []
    for lineage, last in index.execute("SELECT lineage, max(grp) FROM run.groups GROUP BY lineage").fetchall():
        first = _read_mark(index, lineage)
        if first <= last:
            ranges.append((lineage, first, last + 1))
    total, done = sum(stop - first for _, first, stop in ranges), 0
    for lineage, first, stop in ranges:  # in the order of time, as row numbers are
        mark: int | None = None  # first group that has not ended
        edges = [first, *range(min(first + FIRST_GROUPS, stop), stop, GROUPS), stop]
        for begin, end in itertools.pairwise(edges):
            index.execute(COPY, {"lineage": lineage, "first": begin, "stop": end, "text": MOST_TEXT})
            mark = _find_open(index, lineage, begin, end) if mark is None else mark
            key, value = f"mark {lineage}", str(end if mark is None else mark)
            index.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
            index.commit()
            done += end - begin
            report(done / total)
    return total


def _read_mark(index: sqlite3.Connection, lineage: int) -> int:
    """Return the first group of a lineage that must be copied again: it is new, or had not ended the last time."""
    row = index.execute("SELECT value FROM meta WHERE key = ?", (f"mark {lineage}",)).fetchone()
    if row is not None:
        return int(row[0])
    (first,) = index.execute("SELECT min(grp) FROM run.groups WHERE lineage = ?", (lineage,)).fetchone()
    return int(first)


def _find_open(index: sqlite3.Connection, lineage: int, begin: int, end: int) -> int | None:
    """Return the first group of a range that has not ended, or whose attempts have not."""
    where = "lineage = ? AND grp >= ? AND grp < ?"
    queries = (
        f"SELECT min(grp) FROM run.groups WHERE {where} AND outcome IS NULL",
        f"SELECT min(grp) FROM attempts WHERE status IN ('running', 'finished') AND {where}",
    )
    found = [index.execute(query, (lineage, begin, end)).fetchone()[0] for query in queries]
    return min((each for each in found if each is not None), default=None)


def _count_facets(index: sqlite3.Connection) -> None:
    """Keep what pages need of all attempts: their number of each status and task, and the seconds of the longest."""
    facets = {
        column: dict(index.execute(f"SELECT {column}, count(*) FROM attempts GROUP BY 1 ORDER BY 2 DESC LIMIT 200"))
        for column in ("status", "task")
    }
    (longest,) = index.execute("SELECT max(seconds) FROM attempts").fetchone()
    values = {"facets": json.dumps(facets), "longest": str(longest or 0.0)}
    index.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())
    index.commit()

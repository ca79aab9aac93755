"""Checks of the audit that are queries on the ledger: each query finds rows that must not exist.

The temporary table `path` has the lineages that the newest one descends from, with the range of their steps that survived;
`trained` has the attempts that surviving steps trained on.
"""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import ceil, floor
from typing import Any

from antiphon.record import schema

EXAMPLES = 5  # shown of one kind of violation
ATTEMPT = "a.lineage || ':' || a.grp || '.' || a.sibling || '.' || a.try"


def mark_surviving(db: sqlite3.Connection) -> None:
    """Create the temporary tables `path` and `trained`."""
    rows = {row[0]: row for row in db.execute("SELECT lineage, parent, cut, version FROM lineages")}
    db.execute("CREATE TEMP TABLE path (lineage INTEGER PRIMARY KEY, after INTEGER, until INTEGER)")
    lineage, until = max(rows, default=None), 1 << 60
    while lineage is not None and lineage in rows:
        _, parent, cut, _ = rows.pop(lineage)
        db.execute("INSERT INTO path VALUES (?, ?, ?)", (lineage, cut, until))
        lineage, until = parent, cut
    db.execute(
        "CREATE TEMP TABLE trained AS SELECT a.*, p.prompt, coalesce(a.origin, a.lineage || ':' || a.grp || '.' ||"
        " a.sibling || '.' || a.try) AS made FROM attempts a JOIN groups p USING (lineage, grp)"
        " JOIN path USING (lineage) WHERE a.status = 'trained' AND a.step > after AND a.step <= until"
    )


def report_rows(db: sqlite3.Connection, what: str, query: str, *values: Any) -> Iterator[str]:
    """Yield one violation with examples if the query returns any row."""
    rows = db.execute(query, values).fetchall()
    if rows:
        examples = ", ".join("/".join(map(str, row)) for row in rows[:EXAMPLES])
        yield f"{what}: {len(rows)} ({examples}{', …' if len(rows) > EXAMPLES else ''})"


def check_lineages(db: sqlite3.Connection) -> Iterator[str]:
    """Check that every lineage continues from a step of its parent, and that undone steps are marked."""
    yield from report_rows(
        db,
        "lineages without a parent that has their cut",
        "SELECT c.lineage FROM lineages c LEFT JOIN lineages p ON p.lineage = c.parent WHERE c.lineage > 0"
        " AND (p.lineage IS NULL OR p.lineage >= c.lineage OR c.cut < p.cut)",
    )
    yield from report_rows(
        db,
        "first lineages that begin at a checkpoint which no other run is named for, or the reverse",
        "SELECT l.lineage, cut, version FROM lineages l LEFT JOIN events e ON e.lineage = l.lineage AND e.kind = 'branch'"
        " WHERE parent IS NULL AND (cut, version) IS NOT (ifnull(detail ->> '$.step', 0), ifnull(detail ->> '$.version', 0))",
    )
    yield from report_rows(
        db,
        "steps marked undone that stand, or the reverse",
        "SELECT s.lineage, s.step FROM steps s LEFT JOIN path USING (lineage)"
        " WHERE undone != (after IS NULL OR step <= after OR step > until)",
    )


def check_statuses(db: sqlite3.Connection) -> Iterator[str]:
    """Check that every attempt has a known status that fits its lineage, its group and its score."""
    known = schema.TERMINAL + schema.LIVE
    yield from report_rows(
        db, "attempts in no known state", f"SELECT {ATTEMPT} FROM attempts a WHERE status NOT IN {known}"
    )
    yield from report_rows(
        db,
        "attempts alive in a lineage that has ended",
        f"SELECT {ATTEMPT} FROM attempts a WHERE status IN {schema.LIVE}"
        " AND (lineage < (SELECT max(lineage) FROM lineages) OR lineage IN (SELECT lineage FROM events WHERE kind = 'end'))",
    )
    yield from report_rows(
        db,
        "attempts alive in a group that has ended",
        f"SELECT {ATTEMPT} FROM attempts a JOIN groups g USING (lineage, grp)"
        " LEFT JOIN steps s ON s.lineage = g.lineage AND s.step = g.step"
        f" WHERE status IN {schema.LIVE} AND (outcome != 'complete' OR s.version IS NOT NULL)",
    )
    yield from report_rows(
        db,
        "attempts of no group",
        f"SELECT {ATTEMPT} FROM attempts a LEFT JOIN groups g USING (lineage, grp) WHERE g.prompt IS NULL",
    )
    yield from report_rows(
        db,
        "attempts trained on without a score, or after a failure",
        f"SELECT {ATTEMPT} FROM attempts a WHERE status = 'trained' AND (score IS NULL OR failure IS NOT NULL)",
    )


def check_balance(db: sqlite3.Connection, balance: dict[int, dict[str, int]]) -> Iterator[str]:
    """Check the scheduler's own counts against the rows."""
    counted: dict[int, dict[str, int]] = {}
    for lineage, status, count in db.execute("SELECT * FROM balance"):
        counted.setdefault(lineage, {})[status] = count
    for lineage in sorted(balance.keys() | counted.keys()):
        rows, stated = balance.get(lineage, {}), dict(counted.get(lineage, {}))
        dispatched = stated.pop("dispatched", 0)
        if dispatched != sum(rows.values()):
            yield f"lineage {lineage}: {dispatched} attempts were dispatched, and {sum(rows.values())} are in the ledger"
        for status in schema.TERMINAL:
            ended, recorded = stated.get(status, 0), rows.get(status, 0)
            if ended != recorded:
                yield f"lineage {lineage}: {ended} attempts ended {status}; in the ledger, {recorded}"


def check_steps(db: sqlite3.Connection, rollout: dict[str, Any]) -> Iterator[str]:
    """Check that surviving steps follow one another, each trained on whole groups."""
    groups, siblings = rollout["groups_per_step"], rollout["group_size"]
    yield from report_rows(
        db,
        "surviving steps that do not follow one another, or not with the next version",
        "SELECT step, version FROM (SELECT step, version, lag(step) OVER w AS before, lag(version) OVER w AS older"
        " FROM steps WHERE NOT undone WINDOW w AS (ORDER BY step))"
        " WHERE step != coalesce(before, (SELECT cut FROM lineages WHERE parent IS NULL), 0) + 1"
        " OR version != older + 1",
    )
    yield from report_rows(
        db,
        "attempts trained on in a step that was not done, or that did not take their group",
        f"SELECT {ATTEMPT} FROM attempts a LEFT JOIN steps s USING (lineage, step) JOIN groups g USING (lineage, grp)"
        " WHERE status = 'trained' AND (s.version IS NULL OR g.step IS NOT a.step)",
    )
    yield from report_rows(
        db,
        f"surviving steps that did not train on {groups} groups of {siblings}",
        "SELECT s.lineage, s.step, count(DISTINCT t.grp), count(t.grp) FROM steps s"
        " LEFT JOIN trained t USING (lineage, step) WHERE NOT undone AND s.version IS NOT NULL GROUP BY 1, 2"
        " HAVING count(DISTINCT t.grp) != ? OR count(t.grp) != ?",
        groups,
        groups * siblings,
    )


def check_repeats(db: sqlite3.Connection) -> Iterator[str]:
    """Check that no trajectory, and in one epoch no prompt, was trained on twice."""
    yield from report_rows(
        db, "trajectories trained on twice", "SELECT made, count(*) FROM trained GROUP BY made HAVING count(*) > 1"
    )
    yield from report_rows(
        db,
        "prompts trained on twice in one epoch",
        "SELECT task, id, epoch FROM (SELECT prompt FROM trained GROUP BY prompt, lineage, grp)"
        " JOIN prompts USING (prompt) GROUP BY prompt HAVING count(*) > 1",
    )


def check_resumes(db: sqlite3.Connection, rollout: dict[str, Any], curricula: Sequence[str]) -> Iterator[str]:
    """Check that lost prompts were drawn again, and that reusable trajectories were not sampled again.

    Prompts are numbered in the order of their draw, so a prompt before the newest one of the newest lineage must be in that
    lineage, or be deferred to a long round. Tasks with a curriculum draw others after a resume, when their attempts have other
    scores.
    """
    yield from report_rows(
        db,
        "prompts that a crash or a rollback took back, and that were not offered again",
        "SELECT task, id, epoch FROM groups g JOIN prompts USING (prompt) LEFT JOIN steps s USING (lineage, step)"
        " WHERE (g.outcome = 'lost' OR s.undone) AND g.lineage < (SELECT max(lineage) FROM lineages)"
        " AND task NOT IN (SELECT value FROM json_each(?))"
        " AND g.prompt < (SELECT max(prompt) FROM groups WHERE lineage = (SELECT max(lineage) FROM lineages))"
        " AND NOT EXISTS (SELECT 1 FROM lineages l, json_each(l.state, '$.scheduler.deferred') d"
        " WHERE l.lineage > g.lineage AND d.value ->> 0 = task AND d.value ->> 1 = prompts.id)"
        " AND NOT EXISTS (SELECT 1 FROM groups later JOIN path USING (lineage)"
        " WHERE later.prompt = g.prompt AND later.lineage > g.lineage)",
        json.dumps(curricula),
    )
    if not (rollout["deterministic"] or rollout["sampler"]):
        yield from report_rows(
            db,
            "trajectories that were finished and fresh after a resume, and made again",
            f"SELECT {ATTEMPT} FROM attempts a JOIN groups g USING (lineage, grp) JOIN lineages l ON l.parent = a.lineage"
            " WHERE a.status = 'lost' AND a.file IS NOT NULL AND a.score IS NOT NULL AND a.newest <= l.version"
            " AND EXISTS (SELECT 1 FROM groups n JOIN attempts b USING (lineage, grp) WHERE n.lineage = l.lineage"
            " AND n.prompt = g.prompt AND n.version + EXISTS (SELECT 1 FROM steps s WHERE s.lineage = n.lineage"
            " AND s.taken <= b.begun AND ifnull(s.published, b.begun) >= b.begun) - a.started <= ?"  # at the next step
            " AND b.sibling = a.sibling AND b.origin IS NULL)",
            floor(Fraction(str(rollout["async_ratio"]))),  # with a fraction only some groups may be a version older
        )


def check_freshness(db: sqlite3.Connection, rollout: dict[str, Any]) -> Iterator[str]:
    """Check that no group was older than the asynchronous ratio allows when its step began."""
    ratio = Fraction(str(rollout["async_ratio"]))
    greatest = ceil(ratio)
    ages = (
        "SELECT t.lineage, t.step, t.grp, max(s.version - 1 - t.started) AS age FROM trained t"
        " JOIN steps s USING (lineage, step) GROUP BY 1, 2, 3"
    )
    yield from report_rows(
        db, f"groups trained on that were older than {greatest}", f"SELECT * FROM ({ages}) WHERE age > ?", greatest
    )
    if ratio % 1:
        allowed = ceil((ratio % 1) * rollout["groups_per_step"])
        yield from report_rows(
            db,
            f"steps with more than {allowed} groups of age {greatest}",
            f"SELECT lineage, step, count(*) FROM ({ages}) WHERE age = ? GROUP BY 1, 2 HAVING count(*) > ?",
            greatest,
            allowed,
        )


def check_engine_versions(db: sqlite3.Connection) -> Iterator[str]:
    """Check that attempts were sampled by versions that engines got, none older than the one they started at."""
    yield from report_rows(
        db,
        "attempts trained on with a version that no engine got, or older than their start",
        "SELECT lineage, step, grp, started, newest FROM trained WHERE newest < started"
        " OR EXISTS (SELECT started UNION SELECT newest"
        " EXCEPT SELECT version FROM versions EXCEPT SELECT version FROM lineages)",
    )


def check_evaluations(db: sqlite3.Connection) -> Iterator[str]:
    """Check that evaluations measured the versions that they are said to have measured.

    One evaluation runs at a time. It may begin again after a resume, with a version that is newer than that of its step.
    """
    evaluations = (
        "WITH told AS (SELECT number, lineage, kind, detail ->> '$.step' AS step, detail ->> '$.version' AS version,"
        " detail ->> '$.first' AS first, detail ->> '$.last' AS last, detail ->> '$.accuracy' AS accuracy"
        " FROM events WHERE kind IN ('evaluate', 'evaluated')),"
        " known AS (SELECT lineage, version FROM versions UNION SELECT lineage, version FROM lineages),"
        " e AS (SELECT *, lag(kind) OVER w AS before, lag(step) OVER w AS began, lag(version) OVER w AS newest FROM told"
        " WINDOW w AS (PARTITION BY lineage ORDER BY number)) "
    )
    yield from report_rows(
        db,
        "evaluations of a version that was not published, or that is older than its step",
        f"{evaluations} SELECT e.lineage, e.step, e.version FROM e LEFT JOIN steps s USING (lineage, step)"
        " WHERE kind = 'evaluate' AND ((e.lineage, e.version) NOT IN known OR e.version < s.version)",
    )
    yield from report_rows(
        db,
        "evaluations that ended and had not begun",
        f"{evaluations} SELECT lineage, step FROM e"
        " WHERE kind = 'evaluated' AND (before IS NOT 'evaluate' OR step IS NOT began)",
    )
    yield from report_rows(
        db,
        "evaluations with tokens of versions older than theirs, or not published",
        f"{evaluations} SELECT lineage, step, first, last FROM e"
        " WHERE kind = 'evaluated' AND (first < newest OR last < first OR (lineage, last) NOT IN known)",
    )
    yield from report_rows(
        db,
        "evaluations whose accuracy is no share",
        f"{evaluations} SELECT lineage, step, accuracy FROM e WHERE accuracy NOT BETWEEN 0 AND 1",
    )

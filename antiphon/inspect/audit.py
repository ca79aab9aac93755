"""Whether a run keeps its promises, from its directory alone. Shares nothing with what wrote it but the schema.

Each check is a query that finds what must not be. *Surviving* is what the newest lineage stands on: of its ancestors, the
steps up to each cut.
"""

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from antiphon.core.errors import RecordError
from antiphon.record import reading, schema

SHOWN = 5  # examples of one kind of violation
MOST_RATIO = 1_000_000  # that a configuration could mean


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found."""

    balance: dict[int, dict[str, int]]  # of each lineage: attempts by status
    violations: list[str]


def audit(directory: Path) -> Audit:
    """Check a run. `RecordError` if there is no ledger that can be read."""
    with closing(schema.open_ledger(directory)) as db, reading.convert_read_errors(directory / "ledger.db"):
        balance: dict[int, dict[str, int]] = {}
        for lineage, status, count in db.execute("SELECT lineage, status, count(*) FROM attempts GROUP BY 1, 2"):
            balance.setdefault(lineage, {})[status] = count
        _note_surviving(db)
        rollout = _rollout(directory)
        checks = (
            _lineages(db),
            _ends(db),
            _balances(db, balance),
            _steps(db, rollout),
            _once(db),
            _resumes(db, rollout),
            _freshness(db, rollout),
            _trajectories(db, directory),
            _checkpoints(db, directory),
        )
        return Audit(balance, [violation for check in checks for violation in check])


def _rollout(directory: Path) -> dict[str, Any]:
    """Return what the configuration says of rollouts, with numbers where the checks compute with them."""
    with reading.convert_read_errors(directory / "config.yaml"):
        rollout: dict[str, Any] = dict(reading.read_config(directory)["rollout"])
        for key in ("groups_per_step", "group_size", "async_ratio"):
            if not isinstance(rollout[key], int | float) or not 0 <= rollout[key] <= MOST_RATIO:
                raise RecordError(f"{directory / 'config.yaml'}: rollout.{key}: {rollout[key]!r:.80} is no such number")
        return rollout | {key: bool(rollout[key]) for key in ("deterministic", "sampler")}


def _note_surviving(db: sqlite3.Connection) -> None:
    """Make the temporary table `path`: lineages that the newest one stands on, and which of their steps."""
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


def _found(db: sqlite3.Connection, what: str, query: str, *values: Any) -> Iterator[str]:
    """One violation, with examples, if the query finds any row."""
    rows = db.execute(query, values).fetchall()
    if rows:
        examples = ", ".join("/".join(map(str, row)) for row in rows[:SHOWN])
        yield f"{what}: {len(rows)} ({examples}{', …' if len(rows) > SHOWN else ''})"


_ATTEMPT = "a.lineage || ':' || a.grp || '.' || a.sibling || '.' || a.try"


def _lineages(db: sqlite3.Connection) -> Iterator[str]:
    yield from _found(
        db,
        "lineages without a parent that has their cut",
        "SELECT c.lineage FROM lineages c LEFT JOIN lineages p ON p.lineage = c.parent WHERE c.lineage > 0"
        " AND (p.lineage IS NULL OR p.lineage >= c.lineage OR c.cut < p.cut)",
    )
    yield from _found(
        db,
        "steps marked undone that stand, or the reverse",
        "SELECT s.lineage, s.step FROM steps s LEFT JOIN path USING (lineage)"
        " WHERE undone != (after IS NULL OR step <= after OR step > until)",
    )


def _ends(db: sqlite3.Connection) -> Iterator[str]:
    known = schema.TERMINAL + schema.LIVE
    yield from _found(
        db, "attempts in no known state", f"SELECT {_ATTEMPT} FROM attempts a WHERE status NOT IN {known}"
    )
    yield from _found(
        db,
        "attempts alive in a lineage that has ended",
        f"SELECT {_ATTEMPT} FROM attempts a WHERE status IN {schema.LIVE}"
        " AND lineage < (SELECT max(lineage) FROM lineages)",
    )
    yield from _found(
        db,
        "attempts alive in a group that has ended",
        f"SELECT {_ATTEMPT} FROM attempts a JOIN groups g USING (lineage, grp)"
        " LEFT JOIN steps s ON s.lineage = g.lineage AND s.step = g.step"
        f" WHERE status IN {schema.LIVE} AND (outcome != 'complete' OR s.version IS NOT NULL)",
    )
    yield from _found(
        db,
        "attempts of no group",
        f"SELECT {_ATTEMPT} FROM attempts a LEFT JOIN groups g USING (lineage, grp) WHERE g.prompt IS NULL",
    )
    yield from _found(
        db,
        "attempts trained on without a score, or after a failure",
        f"SELECT {_ATTEMPT} FROM attempts a WHERE status = 'trained' AND (score IS NULL OR failure IS NOT NULL)",
    )


def _balances(db: sqlite3.Connection, balance: dict[int, dict[str, int]]) -> Iterator[str]:
    """The scheduler's own counts against the rows."""
    counted: dict[int, dict[str, int]] = {}
    for lineage, status, count in db.execute("SELECT * FROM balance"):
        counted.setdefault(lineage, {})[status] = count
    for lineage in sorted(balance.keys() | counted.keys()):
        rows, said = balance.get(lineage, {}), dict(counted.get(lineage, {}))
        dispatched = said.pop("dispatched", 0)
        if dispatched != sum(rows.values()):
            yield f"lineage {lineage}: {dispatched} attempts were dispatched, and {sum(rows.values())} are in the ledger"
        for status in schema.TERMINAL:
            if rows.get(status, 0) != said.get(status, 0):
                yield f"lineage {lineage}: {said.get(status, 0)} attempts ended {status}; in the ledger, {rows.get(status, 0)}"


def _steps(db: sqlite3.Connection, rollout: dict[str, Any]) -> Iterator[str]:
    groups, siblings = rollout["groups_per_step"], rollout["group_size"]
    yield from _found(
        db,
        "surviving steps that do not follow one another, or not with the next version",
        "SELECT step, version FROM (SELECT step, version, lag(step) OVER w AS before, lag(version) OVER w AS older"
        " FROM steps WHERE NOT undone WINDOW w AS (ORDER BY step)) WHERE step != coalesce(before, 0) + 1"
        " OR version != older + 1",
    )
    yield from _found(
        db,
        "attempts trained on in a step that was not done, or that did not take their group",
        f"SELECT {_ATTEMPT} FROM attempts a LEFT JOIN steps s USING (lineage, step) JOIN groups g USING (lineage, grp)"
        " WHERE status = 'trained' AND (s.version IS NULL OR g.step IS NOT a.step)",
    )
    yield from _found(
        db,
        f"surviving steps that did not train on {groups} groups of {siblings}",
        "SELECT s.lineage, s.step, count(DISTINCT t.grp), count(t.grp) FROM steps s"
        " LEFT JOIN trained t USING (lineage, step) WHERE NOT undone AND s.version IS NOT NULL GROUP BY 1, 2"
        " HAVING count(DISTINCT t.grp) != ? OR count(t.grp) != ?",
        groups,
        groups * siblings,
    )


def _once(db: sqlite3.Connection) -> Iterator[str]:
    yield from _found(
        db, "trajectories trained on twice", "SELECT made, count(*) FROM trained GROUP BY made HAVING count(*) > 1"
    )
    yield from _found(
        db,
        "prompts trained on twice in one epoch",
        "SELECT task, id, epoch FROM (SELECT prompt FROM trained GROUP BY prompt, lineage, grp)"
        " JOIN prompts USING (prompt) GROUP BY prompt HAVING count(*) > 1",
    )


def _resumes(db: sqlite3.Connection, rollout: dict[str, Any]) -> Iterator[str]:
    """Prompts have numbers in the order in which they are drawn, so what the newest lineage has gone past must be in it, or
    wait in it for a long round."""
    yield from _found(
        db,
        "prompts that a crash or a rollback took back, and that were not offered again",
        "SELECT task, id, epoch FROM groups g JOIN prompts USING (prompt) LEFT JOIN steps s USING (lineage, step)"
        " WHERE (g.outcome = 'lost' OR s.undone)"
        " AND g.prompt < (SELECT max(prompt) FROM groups WHERE lineage = (SELECT max(lineage) FROM lineages))"
        " AND NOT EXISTS (SELECT 1 FROM lineages l, json_each(l.state, '$.scheduler.deferred') d"
        " WHERE l.lineage > g.lineage AND d.value ->> 0 = task AND d.value ->> 1 = prompts.id)"
        " AND NOT EXISTS (SELECT 1 FROM groups later JOIN path USING (lineage)"
        " WHERE later.prompt = g.prompt AND later.lineage > g.lineage)",
    )
    if not (rollout["deterministic"] or rollout["sampler"]):
        yield from _found(
            db,
            "trajectories that were finished and fresh after a resume, and made again",
            f"SELECT {_ATTEMPT} FROM attempts a JOIN groups g USING (lineage, grp) JOIN lineages l ON l.parent = a.lineage"
            " WHERE a.status = 'lost' AND a.file IS NOT NULL AND a.score IS NOT NULL AND a.newest <= l.version"
            " AND EXISTS (SELECT 1 FROM groups n JOIN attempts b USING (lineage, grp) WHERE n.lineage = l.lineage"
            " AND n.prompt = g.prompt AND n.version + EXISTS (SELECT 1 FROM steps s WHERE s.lineage = n.lineage"
            " AND s.taken <= b.begun AND ifnull(s.published, b.begun) >= b.begun) - a.started <= ?"  # at the next step
            " AND b.sibling = a.sibling AND b.origin IS NULL)",
            floor(Fraction(str(rollout["async_ratio"]))),  # with a fraction only some groups may be a version older
        )


def _freshness(db: sqlite3.Connection, rollout: dict[str, Any]) -> Iterator[str]:
    ratio = Fraction(str(rollout["async_ratio"]))
    greatest = ceil(ratio)
    ages = (
        "SELECT t.lineage, t.step, t.grp, max(s.version - 1 - t.started) AS age FROM trained t"
        " JOIN steps s USING (lineage, step) GROUP BY 1, 2, 3"
    )
    yield from _found(
        db, f"groups trained on that were older than {greatest}", f"SELECT * FROM ({ages}) WHERE age > ?", greatest
    )
    if ratio % 1:
        allowed = ceil((ratio % 1) * rollout["groups_per_step"])
        yield from _found(
            db,
            f"steps with more than {allowed} groups of age {greatest}",
            f"SELECT lineage, step, count(*) FROM ({ages}) WHERE age = ? GROUP BY 1, 2 HAVING count(*) > ?",
            greatest,
            allowed,
        )


_COLUMNS = pa.schema(
    [
        *((name, pa.int64()) for name in ("lineage", "grp", "sibling", "try")),
        ("score", pa.float64()),
        ("loss_mask", pa.list_(pa.bool_())),
    ]
)


def _trajectories(db: sqlite3.Connection, run: Path) -> Iterator[str]:
    """What was trained on lies in a file, with the score that the ledger has."""
    wanted: dict[str, dict[str, tuple[float, int]]] = {}
    for made, file, score, tokens in db.execute("SELECT made, file, score, tokens FROM trained"):
        wanted.setdefault(file or "no file", {})[made] = (score, tokens)
    missing, different = Counter[str](), []
    for file, attempts in sorted(wanted.items()):
        found: dict[str, tuple[float, int]] = {}
        try:
            table = reading.read_table(reading.resolve_file(run, f"rollouts/{file}"), _COLUMNS)
            with reading.convert_read_errors(f"rollouts/{file}"):
                rows = zip(table.drop_columns(["loss_mask"]).to_pylist(), _sampled(table), strict=True)
                for row, sampled in rows:
                    name = f"{row['lineage']}:{row['grp']}.{row['sibling']}.{row['try']}"
                    found[name] = (row["score"], found.get(name, (0, 0))[1] + sampled)
        except RecordError as error:
            yield f"rollouts/{file} cannot be read, with {len(attempts)} trajectories that were trained on: {error}"
            continue
        missing[file] = len(attempts.keys() - found.keys())
        different += [name for name in attempts.keys() & found.keys() if attempts[name] != found[name]]
    for file, count in missing.items():
        if count:
            yield f"rollouts/{file} lacks {count} trajectories that were trained on"
    if different:
        yield f"trajectories with another score or length than the ledger has: {len(different)} ({different[:SHOWN]})"


def _sampled(table: pa.Table) -> list[int]:
    """Return how many tokens of each row were sampled."""
    masks = table.column("loss_mask").combine_chunks()
    flags = masks.flatten()
    if masks.null_count or flags.null_count:
        raise ValueError("a mask lacks values")
    before = np.concatenate([[0], np.cumsum(flags.to_numpy(zero_copy_only=False))])
    offsets = masks.offsets.to_numpy()
    counts: list[int] = np.diff(before[offsets - offsets[:1]]).tolist()
    return counts


def _checkpoints(db: sqlite3.Connection, run: Path) -> Iterator[str]:
    checkpoints = reading.resolve_path(run, "checkpoints")
    for directory in sorted(checkpoints.glob("step_??????")):
        try:
            reading.resolve_path(run, f"checkpoints/{directory.name}")
            manifest = reading.read_json(directory, "MANIFEST.json")
            with reading.convert_read_errors(f"{directory.name}/MANIFEST.json"):
                files = {
                    name: (int(written["bytes"]), written["digest"]) for name, written in manifest["files"].items()
                }
            for name, written in files.items():
                if _written(reading.resolve_file(directory, name), written[0]) != written:
                    yield f"checkpoints/{directory.name}/{name} is not as it was written"
        except RecordError as error:
            yield f"checkpoints/{directory.name} is not whole: {error}"
    (newest,) = db.execute("SELECT max(name) FROM checkpoints JOIN path USING (lineage) WHERE step <= until").fetchone()
    if newest and not any(directory.name >= newest for directory in checkpoints.glob("step_??????")):
        yield f"checkpoints/{newest} is in the ledger, and neither it nor a later one is there"


def _written(file: Path, size: int) -> tuple[int, str | None]:
    """Return the size of a file, and its digest if it is the expected one."""
    if (found := file.stat().st_size) != size:
        return found, None
    with file.open("rb") as content:
        return found, hashlib.file_digest(content, "blake2b").hexdigest()

"""Questions to a run directory: where a sample came from and what became of it, and where two runs part."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from antiphon.core.errors import RecordError
from antiphon.core.types import AttemptId, Segment, Trajectory
from antiphon.record import reading, schema, trajectories


def why(run: Path, name: str) -> Iterator[tuple[str, str]]:
    """What is known of an attempt, `[lineage:]group.sibling.try`, or of one of its tokens, `…@position` in its first segment;
    without a lineage, of the newest that has it. `RecordError` if there is none."""
    attempt, _, position = name.partition("@")
    lineage, _, numbers = attempt.rpartition(":")
    try:
        identity, place = AttemptId(*map(int, numbers.split("."))), int(position or 0)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{name!r} names no attempt: it is written [lineage:]group.sibling.try[@token]") from error
    with closing(_opened(run)) as db, reading.convert_read_errors(run / "ledger.db"):
        row = db.execute(
            "SELECT a.*, g.version AS admitted, g.outcome, task, id, epoch FROM attempts a JOIN groups g"
            " USING (lineage, grp) JOIN prompts USING (prompt) WHERE grp = ? AND sibling = ? AND try = ?"
            " AND lineage = coalesce(?, lineage) ORDER BY lineage DESC LIMIT 1",
            (*identity, lineage or None),
        ).fetchone()
        if row is None:
            raise RecordError(f"{run}: there is no attempt {attempt}")
        yield "attempt", f"{row['lineage']}:{identity}"
        yield "prompt", f"{row['id']}, task {row['task']}, epoch {row['epoch']}"
        yield "group", f"{row['grp']}, admitted at version {row['admitted']}, {row['outcome'] or 'alive'}"
        yield "became", _fate(db, row)
        if row["origin"]:
            yield "taken over from", f"{row['origin']}, of an earlier life of the run"
        if row["failure"]:
            yield "failure", row["failure"]
    if row["file"] is None:
        return
    with reading.convert_read_errors(run / "ledger.db"):
        made_by = AttemptId(*map(int, row["origin"].partition(":")[2].split("."))) if row["origin"] else identity
    found = trajectories.read(reading.resolve_file(run, f"rollouts/{row['file']}"))
    if made_by not in found:
        raise RecordError(f"rollouts/{row['file']} has no attempt {made_by}")
    yield "trajectory", f"rollouts/{row['file']}"
    with reading.convert_read_errors(f"rollouts/{row['file']}"):
        yield from _trajectory(found[made_by])
        if position:
            yield from _token(found[made_by].segments[0], place)


def _opened(run: Path) -> sqlite3.Connection:
    db = schema.open_ledger(run)
    db.row_factory = sqlite3.Row
    return db


def _fate(db: sqlite3.Connection, row: sqlite3.Row) -> str:
    if row["status"] != "trained":
        return str(row["status"])
    where = (row["lineage"], row["step"])
    step = db.execute("SELECT version, undone FROM steps WHERE lineage = ? AND step = ?", where).fetchone()
    undone = ", which a later life of the run undid" if step["undone"] else ""
    age = step["version"] - 1 - row["started"]
    return f"trained at step {row['step']}{undone}, {age} versions old, which made version {step['version']}"


def _trajectory(trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    meta = trajectory.meta
    yield "started at version", str(meta.started.n)
    parts = "".join(f", {name} {value:g}" for name, value in meta.score.parts.items())
    yield "score", f"{meta.score.status} {meta.score.value}{parts} {meta.score.detail}".strip()
    yield "seconds", f"{meta.timing.finished - meta.timing.queued:.3f}, with its grading"
    for number, segment in enumerate(trajectory.segments):
        for index, turn in enumerate(segment.turns):
            sampled = turn.stop - turn.start
            yield (
                f"segment {number}, turn {index}",
                f"tokens {turn.start}–{turn.stop} ({sampled} sampled by {_runs(segment, turn.start, turn.stop)}) on engine"
                f" {', '.join(map(str, turn.engines)) or 'unknown'}; ended by {turn.finish}; reward {turn.reward};"
                f" temperature {turn.sampling.temperature:g}, seed {turn.sampling.seed};"
                f" waited {turn.timing.started - turn.timing.queued:.3f} s,"
                f" took {turn.timing.finished - turn.timing.started:.3f} s",
            )


def _runs(segment: Segment, start: int, stop: int) -> str:
    """Which versions sampled a span, in order."""
    versions = [(int(version), len(list(same))) for version, same in groupby(segment.versions[start:stop].tolist())]
    return ", ".join(f"version {version}: {count}" for version, count in versions)


def _token(segment: Segment, position: int) -> Iterator[tuple[str, str]]:
    if not 0 <= position < len(segment.tokens):
        raise RecordError(f"there is no token {position}: the segment has {len(segment.tokens)}")
    token = int(segment.tokens[position])
    if not segment.loss_mask[position]:
        yield f"token {position}", f"{token}, given and not sampled"
        return
    turn = next(index for index, turn in enumerate(segment.turns) if turn.start <= position < turn.stop)
    mixed = any(bool(segment.streams[spec][position]) for spec in segment.streams if spec.name == "mixed_cache")
    yield (
        f"token {position}",
        f"{token}, sampled in turn {turn} by version {int(segment.versions[position])}, log-prob"
        f" {float(segment.logprobs[position]):.6f}{', from a cache that no single version made' if mixed else ''}",
    )


# --- two runs ----------------------------------------------------------------------------------------------------------


def diff(one: Path, other: Path) -> str | None:
    """The first thing in which two runs differ, looked for in this order: configuration, code, and step by step the prompts,
    attempts, tokens, scores and batches of what was trained on; None if there is nothing."""
    with (
        closing(_opened(one)) as left,
        closing(_opened(other)) as right,
        reading.convert_read_errors(f"{one} or {other}"),
    ):
        return _config(one, other) or _code(left, right) or _steps((one, left), (other, right))


def _config(one: Path, other: Path) -> str | None:
    left, right = (dict(_values(_without_names(run))) for run in (one, other))
    changed = [key for key in sorted(left.keys() | right.keys()) if left.get(key) != right.get(key)]
    sides = [(sign, key, side[key]) for key in changed for sign, side in (("-", left), ("+", right)) if key in side]
    shown = " | ".join(f"{sign} {key}: {value:.200}" for sign, key, value in sides[:4])
    return f"configuration: {shown}" if sides else None


def _without_names(run: Path) -> Any:
    config = reading.read_config(run)
    return {key: value for key, value in config.items() if key not in ("name", "record", "checkpoint")}


def _values(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value of nested mappings and lists as JSON, with its dotted key."""
    inner = dict(enumerate(tree)) if isinstance(tree, list) else tree
    if not isinstance(inner, dict) or not inner:
        yield key, json.dumps(tree, default=str)
        return
    for name, value in inner.items():
        yield from _values(value, f"{key}.{name}" if key else str(name))


def _code(left: sqlite3.Connection, right: sqlite3.Connection) -> str | None:
    codes = [
        db.execute("SELECT code FROM lineages ORDER BY lineage DESC LIMIT 1").fetchone()[0] for db in (left, right)
    ]
    return None if codes[0] == codes[1] else f"code: {codes[0]} and {codes[1]}"


_TRAINED = (
    "SELECT s.step, s.batch, s.version, id, epoch, a.grp, sibling, started, digest, score FROM steps s JOIN attempts a"
    " ON a.lineage = s.lineage AND a.step = s.step AND a.status = 'trained' JOIN groups g"
    " ON g.lineage = a.lineage AND g.grp = a.grp JOIN prompts USING (prompt) WHERE NOT undone"
    " ORDER BY s.step, id, epoch, sibling"
)


def _steps(one: tuple[Path, sqlite3.Connection], other: tuple[Path, sqlite3.Connection]) -> str | None:
    rows = zip_longest(one[1].execute(_TRAINED), other[1].execute(_TRAINED))
    for left, right in rows:
        if left is None or right is None:
            shorter, longer = (one, right) if left is None else (other, left)
            return f"step {longer['step']}: {shorter[0]} has no more"
        where = f"step {left['step']}"
        if (left["step"], left["id"], left["epoch"], left["sibling"]) != (
            right["step"],
            right["id"],
            right["epoch"],
            right["sibling"],
        ):
            return f"{where}: data: {_sample(left)} and {_sample(right)} of step {right['step']}"
        for what in ("started", "digest", "score", "batch"):
            if left[what] != right[what]:
                said = {"digest": "its tokens or log-probs", "started": "the version it started at"}.get(what, what)
                return f"{where}: {_sample(left)}: {said}: {left[what]} and {right[what]}"
    versions = "SELECT version, digest FROM steps JOIN versions USING (lineage, version) WHERE NOT undone ORDER BY step"
    for left, right in zip(one[1].execute(versions), other[1].execute(versions), strict=False):
        if tuple(left) != tuple(right):
            return f"version {left['version']}: its weights"
    return None


def _sample(row: sqlite3.Row) -> str:
    return json.dumps(f"{row['id']}, epoch {row['epoch']}, sibling {row['sibling']}")

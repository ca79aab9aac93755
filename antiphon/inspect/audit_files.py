"""Checks of the audit that read files: recorded trajectories and checkpoints."""

import hashlib
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from antiphon.core.errors import RecordError
from antiphon.inspect.audit_ledger import EXAMPLES
from antiphon.record import safe_files

_COLUMNS = pa.schema(
    [
        *((name, pa.int64()) for name in ("lineage", "grp", "sibling", "try")),
        ("score", pa.float64()),
        ("loss_mask", pa.list_(pa.bool_())),
    ]
)
_ROW = pa.schema([(name, pa.int64()) for name in ("lineage", "step", "grp", "sibling", "try")])


def check_trajectories(db: sqlite3.Connection, run: Path) -> Iterator[str]:
    """Check that what was trained on is in a file, with the score and the length that the ledger has."""
    wanted: dict[str, dict[str, tuple[float, int]]] = {}
    for made, file, score, tokens in db.execute("SELECT made, file, score, tokens FROM trained"):
        wanted.setdefault(file or "no file", {})[made] = (score, tokens)
    missing, different = Counter[str](), []
    for file, attempts in sorted(wanted.items()):
        found: dict[str, tuple[float, int]] = {}
        try:
            table = safe_files.read_table(safe_files.resolve_file(run, f"rollouts/{file}"), _COLUMNS)
            with safe_files.convert_read_errors(run / f"rollouts/{file}"):
                rows = zip(table.drop_columns(["loss_mask"]).to_pylist(), _count_sampled(table), strict=True)
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
        yield f"trajectories with another score or length than the ledger has: {len(different)} ({different[:EXAMPLES]})"


def _count_sampled(table: pa.Table) -> list[int]:
    """Return the number of sampled tokens of each row."""
    masks = table.column("loss_mask").combine_chunks()
    flags = masks.flatten()
    if masks.null_count or flags.null_count:
        raise ValueError("a mask lacks values")
    before = np.concatenate([[0], np.cumsum(flags.to_numpy(zero_copy_only=False))])
    offsets = masks.offsets.to_numpy()
    counts: list[int] = np.diff(before[offsets - offsets[:1]]).tolist()
    return counts


def check_token_stats(db: sqlite3.Connection, run: Path) -> Iterator[str]:
    """Check that recorded numbers of tokens can be read, and are of attempts that their step trained on."""
    folder = safe_files.resolve_path(run, "token_stats")
    for path in sorted(folder.glob("*.parquet")):
        try:
            table = safe_files.read_table(safe_files.resolve_file(run, f"token_stats/{path.name}"), _ROW)
            with safe_files.convert_read_errors(path):
                rows = {tuple(row.values()) for row in table.to_pylist()}
        except RecordError as error:
            yield f"token_stats/{path.name} cannot be read: {error}"
            continue
        steps = sorted({row[:2] for row in rows})
        if [f"{lineage}-{step:06d}.parquet" for lineage, step in steps] != [path.name]:
            yield f"token_stats/{path.name} has numbers of other steps: {steps[:EXAMPLES]}"
            continue
        ((lineage, step),) = steps
        # A process that dies in a step leaves a file of it, and attempts that no step trained on.
        query = (
            "SELECT lineage, ?2, grp, sibling, try FROM attempts a WHERE lineage = ?1 AND (step = ?2 OR NOT EXISTS"
            " (SELECT 1 FROM steps s WHERE s.lineage = ?1 AND s.step = ?2 AND s.version IS NOT NULL))"
        )
        if wrong := rows - set(db.execute(query, (lineage, step))):
            yield f"token_stats/{path.name} has {len(wrong)} attempts that step {step} did not train on"


def check_checkpoints(db: sqlite3.Connection, run: Path) -> Iterator[str]:
    """Check that all checkpoints are as they were written, and that the newest one of the ledger is there."""
    checkpoints = safe_files.resolve_path(run, "checkpoints")
    for directory in sorted(checkpoints.glob("step_??????")):
        try:
            safe_files.resolve_path(run, f"checkpoints/{directory.name}")
            manifest = safe_files.read_json(directory, "MANIFEST.json")
            with safe_files.convert_read_errors(directory / "MANIFEST.json"):
                files = {
                    name: (int(written["bytes"]), written["digest"]) for name, written in manifest["files"].items()
                }
            for name, written in files.items():
                if _describe_file(safe_files.resolve_file(directory, name), written[0]) != written:
                    yield f"checkpoints/{directory.name}/{name} is not as it was written"
        except (RecordError, OSError) as error:
            if os.path.lexists(directory):  # else the run has pruned it meanwhile
                yield f"checkpoints/{directory.name} is not whole: {error}"
    (newest,) = db.execute("SELECT max(name) FROM checkpoints JOIN path USING (lineage) WHERE step <= until").fetchone()
    if newest and not any(directory.name >= newest for directory in checkpoints.glob("step_??????")):
        yield f"checkpoints/{newest} is in the ledger, and neither it nor a later one is there"


def _describe_file(file: Path, size: int) -> tuple[int, str | None]:
    """Return the size of a file, and its digest if the size is the expected one."""
    if (found := file.stat().st_size) != size:
        return found, None
    with file.open("rb") as content:
        return found, hashlib.file_digest(content, "blake2b").hexdigest()

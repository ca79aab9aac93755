"""Numbers of each token that a step trained on, as `record.token_stats` asks for: one Parquet file a step, one row a segment.

    pandas.read_parquet("runs/tiny_arithmetic/token_stats")

A file is named `<lineage>-<step>.parquet`, so that a step that a resume undid keeps its own. `lineage`, `grp`, `sibling`,
`try` and `segment` name the row of the segment in `rollouts/`; each other column is a list of 16-bit floats, one a token. A
file has the columns that its run asked for.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from antiphon.core.errors import RecordError
from antiphon.core.failpoints import hit
from antiphon.core.types import AttemptId
from antiphon.record import safe_files
from antiphon.record.run_dir import atomic_write

VERSION = 1
FOLDER = "token_stats"
GROUP_TOKENS = 1 << 16  # of a row group, about: a reader of one segment decodes its row group alone
KEYS = ("lineage", "step", "grp", "sibling", "try", "segment")
STATS: Mapping[str, str] = {
    "entropy": "entropy of the policy before the step where the token was sampled, in nats",
    "advantage": "advantage that the step gave the token",
    "log_ratio": "log-prob of the token under the policy before the step minus the log-prob with which it was sampled",
    "waad": "windowed average attention distance of the token, see algorithm.rhythm",
    "fai": "future attention influence of the token, see algorithm.rhythm",
}
"""The columns, [L] each; NaN on tokens that the policy did not sample."""

_VERSION_KEY = b"antiphon.token_stats"
_LARGEST = float(np.finfo(np.float16).max)

Stat = npt.NDArray[np.float32]


class SegmentStats(NamedTuple):
    """The numbers of one segment of an attempt: its place among the attempt's segments, and an array [L] by name."""

    attempt: AttemptId
    segment: int
    values: Mapping[str, Stat]


def write(run: Path, lineage: int, step: int, rows: Sequence[SegmentStats]) -> None:
    """Write the numbers of a step, which has rows; the file is durable or not there."""
    names = list(rows[0].values)
    keys = [(lineage, step, *row.attempt, row.segment) for row in rows]
    columns = [pa.array(column, pa.int64()) for column in zip(*keys, strict=True)]
    columns += [_to_lists([row.values[name] for row in rows]) for name in names]
    table = pa.Table.from_arrays(columns, names=[*KEYS, *names])
    table = table.replace_schema_metadata({_VERSION_KEY: str(VERSION)})
    tokens = sum(len(row.values[names[0]]) for row in rows)
    (run / FOLDER).mkdir(exist_ok=True)
    with atomic_write(run / file_name(lineage, step)) as file:
        size = max(GROUP_TOKENS * len(rows) // max(tokens, 1), 1)
        pq.write_table(
            table, file, row_group_size=size, compression="zstd", use_dictionary=False, write_statistics=False
        )
        hit("token_stats.write")
    hit("token_stats.written")


def file_name(lineage: int, step: int) -> str:
    """Return the path of a step's file in its run."""
    return f"{FOLDER}/{lineage}-{step:06d}.parquet"


def read_segment(run: Path, lineage: int, step: int, attempt: AttemptId, segment: int) -> dict[str, Stat]:
    """Return the numbers of one segment that a step trained on, by name; empty if they were not recorded.

    Raises:
        RecordError: The file is damaged, or a newer version of Antiphon wrote it.
    """
    name = file_name(lineage, step)
    if not (run / name).exists():
        return {}
    path = safe_files.resolve_file(run, name)
    stats = _read_names(path)
    wanted = (*attempt, segment)
    keys = safe_files.read_table(path, pa.schema([(key, pa.int64()) for key in KEYS[2:]]))
    with safe_files.convert_read_errors(path):
        found = zip(*(column.to_pylist() for column in keys.columns), strict=True)
        place = next((place for place, numbers in enumerate(found) if numbers == wanted), None)
    if place is None:
        return {}
    row = safe_files.read_rows(path, pa.schema([(stat, pa.list_(pa.float16())) for stat in stats]), place, 1)
    with safe_files.convert_read_errors(path):
        return {
            stat: row.column(stat).combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.float32)
            for stat in stats
        }


def _read_names(path: Path) -> list[str]:
    """Return the numbers that a file has, after a check of its version."""
    with safe_files.convert_read_errors(path):
        schema = pq.read_schema(path)
        version = int((schema.metadata or {})[_VERSION_KEY])
        if not 1 <= version <= VERSION:
            raise RecordError(
                f"{path} has version {version}, and this Antiphon reads versions up to {VERSION}: a newer one wrote it",
                path=path,
            )
        return [name for name in STATS if name in schema.names]


def _to_lists(arrays: Sequence[Stat]) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    # A number beyond the range of 16 bits is written as the largest one, not as infinity.
    values = np.clip(np.concatenate(arrays), -_LARGEST, _LARGEST).astype(np.float16)
    return pa.ListArray.from_arrays(offsets, pa.array(values))

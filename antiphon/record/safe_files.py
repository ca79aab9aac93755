"""Read files of a run directory that somebody else may have made, or that is damaged.

All commands that only read a run use this module. Files must be regular ones inside of the directory, and their size,
nesting and expansion are bounded. A file that cannot be read raises one `RecordError` that names it. Nothing that a file names
is imported, resolved or run.
"""

import copy
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.core.config import read_yaml
from antiphon.core.errors import AntiphonError, RecordError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MOST_JSON = 256 << 20  # bytes of one file; the state of a checkpoint holds the trajectories of its buffer
PARQUET_FLOOR, PARQUET_RATIO = (
    128 << 20,
    100,
)  # bytes that a Parquet file may expand to: constant plus multiple of its size
MOST_BATCH = 64 << 20  # bytes of rows that are decoded at once
WEIGHT_INDEX = "*.index.json"


@contextmanager
def convert_read_errors(source: object) -> Iterator[None]:
    """Turn every error of reading `source` into one `RecordError` that names it.

    Damaged or hostile content makes readers raise all kinds of errors: of SQLite, Arrow, JSON, and of our own types.
    """
    try:
        yield
    except AntiphonError:
        raise
    except Exception as error:  # named boundary: a file may hold anything
        reason = " ".join(str(error).split())[:200] or "no reason given"
        message = f"{source} is damaged and cannot be read: {type(error).__name__}: {reason}"
        raise RecordError(message, path=str(source)) from error


def resolve_path(directory: Path, name: str) -> Path:
    """Return the path of `name` in a directory; raise `RecordError` if it leads out of the directory."""
    path = directory / name
    with convert_read_errors(path):
        if os.path.basename(name) == name != ".." and "\0" not in name and not path.is_symlink():
            return path  # in the directory itself, as most are; to resolve paths takes longer
        if os.path.isabs(name) or ".." in Path(name).parts or not path.resolve().is_relative_to(directory.resolve()):
            raise RecordError(f"{path} leads out of {directory}; it is not read", path=path)
    return path


def resolve_file(directory: Path, name: str) -> Path:
    """Return the path of a regular file in a directory; raise `RecordError` if there is no such file."""
    path = resolve_path(directory, name)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else f"not to be read: {error.strerror}"
        raise RecordError(f"{path} is {reason}", path=path) from error
    if not stat.S_ISREG(mode):
        raise RecordError(f"{path} is no regular file; it is not read", path=path)
    return path


def read_json(directory: Path, name: str, most: int = MOST_JSON) -> Any:
    """Return the JSON value in a file of a directory; raise `RecordError` if it is missing or larger than `most` bytes."""
    path = resolve_file(directory, name)
    if (size := path.stat().st_size) > most:
        raise RecordError(f"{path} has {size:,} bytes; at most {most:,} are read", path=path)
    with convert_read_errors(path):
        return json.loads(path.read_bytes())


def read_config(run: Path) -> dict[str, Any]:
    """Return the configuration of a run as plain values."""
    path = resolve_file(run, "config.yaml")
    stat = path.stat()
    return copy.deepcopy(_parse_config(path, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)))


@lru_cache(maxsize=64)
def _parse_config(path: Path, version: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(path)
    return found


def read_metrics(run: Path, lineage: int, step: int) -> dict[str, Any]:
    """Return the line of `metrics.jsonl` about a step of a lineage; empty if there is none."""
    if not (run / "metrics.jsonl").exists():
        return {}
    found: dict[str, Any] = {}
    is_step = re.compile(rb'"step"\s*:\s*%d\b' % step)  # to parse all lines of a long run takes its time
    with convert_read_errors(f"{run.name}/metrics.jsonl"), resolve_file(run, "metrics.jsonl").open("rb") as file:
        while line := file.readline(MOST_JSON):
            if not is_step.search(line):
                continue
            values = json.loads(line)
            if (values.get("lineage", 0), values.get("step")) == (lineage, step):
                found = values
    return found


def check_model_files(directory: Path, *, confined: bool = True) -> None:
    """Raise `RecordError` unless a model directory holds regular files only; if `confined`, files inside of it.

    Libraries that load a model also open files beside its weights, and the files that an index of weights names.
    """
    for path in directory.iterdir():
        if confined and not path.is_dir():
            resolve_file(directory, path.name)
        elif path.exists() and not path.is_dir() and not path.is_file():
            raise RecordError(f"{path} is no regular file; it is not read", path=path)
    for index in directory.glob(WEIGHT_INDEX) if confined else ():
        with convert_read_errors(index):
            names = {str(name) for name in read_json(directory, index.name)["weight_map"].values()}
        for name in names:
            resolve_file(directory, name)


def read_table(path: Path, schema: "pa.Schema") -> "pa.Table":
    """Return columns of a Parquet file; raise `RecordError` as `iterate_batches` does."""
    import pyarrow as pa

    batches = list(iterate_batches(path, schema))
    with convert_read_errors(path):
        return pa.Table.from_batches(batches, None if batches else schema).select(schema.names).cast(schema)


def iterate_batches(path: Path, schema: "pa.Schema") -> "Iterator[pa.RecordBatch]":
    """Yield columns of a Parquet file in bounded parts.

    Raises:
        RecordError: The file is damaged, lacks a column of `schema`, or expands to more than its size makes plausible.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    resolve_file(path.parent, path.name)
    size = path.stat().st_size
    most = PARQUET_FLOOR + PARQUET_RATIO * size
    with convert_read_errors(path), pq.ParquetFile(path) as file:
        _check_columns(path, file, schema)
        rows, decoded = _batch_rows(path, file, most), 0
        for batch in file.iter_batches(batch_size=rows, columns=schema.names, use_threads=False):
            lists = [column for column in batch.columns if pa.types.is_list(column.type)]
            decoded += batch.nbytes + sum(
                len(column.flatten()) for column in lists
            )  # a flag takes a bit here and a byte later
            if decoded > most:
                raise RecordError(f"{path} holds more than {most:,} bytes in {size:,}; it is not read", path=path)
            yield batch


def read_rows(path: Path, schema: "pa.Schema", first: int, count: int) -> "pa.Table":
    """Return a few rows of a Parquet file, decoded in bounded parts; only the row groups that hold them are read.

    Raises:
        RecordError: The file is damaged, lacks a column of `schema`, or expands to more than its size makes plausible.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    resolve_file(path.parent, path.name)
    most = PARQUET_FLOOR + PARQUET_RATIO * path.stat().st_size
    with convert_read_errors(path), pq.ParquetFile(path) as file:
        _check_columns(path, file, schema)
        size, start, found = _batch_rows(path, file, most), 0, []
        for number in range(file.metadata.num_row_groups):
            stop = start + file.metadata.row_group(number).num_rows
            if start < first + count and stop > first:
                place = start
                for batch in file.iter_batches(size, row_groups=[number], columns=schema.names, use_threads=False):
                    begin = max(first - place, 0)
                    length = first + count - place - begin
                    if length > 0 and begin < batch.num_rows:
                        found.append(batch.slice(begin, length))
                    place += batch.num_rows
                    if place >= first + count:
                        break
            start = stop
        return pa.Table.from_batches(found, None if found else schema).select(schema.names).cast(schema)


def _check_columns(path: Path, file: "pq.ParquetFile", schema: "pa.Schema") -> None:
    missing = [name for name in schema.names if name not in file.schema_arrow.names]
    if missing:
        raise RecordError(f"{path} has no column {missing[0]!r}", path=path)


def _batch_rows(path: Path, file: "pq.ParquetFile", most: int) -> int:
    """Return how many rows may be decoded at once; raise `RecordError` if the file states more than `most` bytes."""
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    stated = sum(max(chunk.total_uncompressed_size, chunk.num_values // 8) for chunk in chunks)
    if stated > most or file.metadata.num_rows > most // 8:
        message = f"{path} states {stated:,} bytes in {path.stat().st_size:,}; it is not read"
        raise RecordError(message, path=path)
    largest = max((max(chunk.total_uncompressed_size, 1) for chunk in chunks), default=1)
    return max(1, min(1024, MOST_BATCH // largest))

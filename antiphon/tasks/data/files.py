"""Reading and writing data sets as rows: JSONL and Parquet, by the ending of the file's name."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from antiphon.core.errors import ConfigError, DataError
from antiphon.record.run_dir import atomic_write
from antiphon.tasks import sources
from antiphon.tasks.sources import Row

READERS = {".jsonl": sources.jsonl, ".parquet": sources.parquet}


def check_file_name(path: Path) -> None:
    """Raise `ConfigError` unless a file's name says that it is JSONL or Parquet."""
    if path.suffix not in READERS:
        raise ConfigError(f"{str(path)!r} must end in {' or '.join(READERS)}", value=str(path), valid=READERS)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; `DataError` if it has none."""
    check_file_name(path)
    rows = list(READERS[path.suffix]("train", str(path)))
    if not rows:
        raise DataError(f"{path} has no rows", path=path)
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a file, all of them or none."""
    check_file_name(path)
    with atomic_write(path) as file:
        if path.suffix == ".jsonl":
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        else:
            pq.write_table(pa.Table.from_pylist(list(rows)), file)


def question_of(row: Row, column: str, place: str) -> str:
    """Return the question of a row: the text of its messages that are not the model's.

    Args:
        row: The row.
        column: Column with the question: a string, or a list of chat messages.
        place: Where the row is, for errors.
    """
    value = row.get(column)
    if isinstance(value, str):
        return value
    if isinstance(value, Iterable):
        texts = [str(message.get("content")) for message in value if message.get("role") in ("system", "user")]
        return "\n".join(texts)
    known = ", ".join(map(str, row)) or "none"
    raise DataError(f"{place}: column {column!r} has no question; the row has {known}", path=place, column=column)


def questions_of(path: Path, rows: Sequence[Row], column: str) -> list[str]:
    """Return the question of each row."""
    return [question_of(row, column, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]

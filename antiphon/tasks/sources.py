"""The built-in prompt sources: functions of a split that yield rows.

A source, built in or the user's own, is called as `source(split, **options)`; `path` is among the options when it is set. Its
libraries are imported when it is called.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from csv import DictReader
from csv import Error as CsvError
from itertools import islice
from pathlib import Path
from typing import Any

from antiphon.core.errors import ConfigError, DataError
from antiphon.core.fingerprint import digest_parts
from antiphon.core.modelscope import download, modelscope_id
from antiphon.core.optional_packages import import_optional
from antiphon.tasks.splits import check_split, split_of

Row = dict[str, Any]


def _files(path: str, split: str, suffix: str) -> list[Path]:
    """Return `path` itself, or the files of the split in a directory: `train.parquet`, `train-00000-of-00002.parquet`.

    After the split a name goes on with a number: `train_old.parquet` does not belong to it.
    """
    if not path:
        raise ConfigError("is missing: it names the file, or a directory that holds one for each split", key="path")
    place = Path(path)
    found = [place]
    if place.is_dir():
        name = re.compile(rf"{re.escape(split)}([-_.]\d.*)?{re.escape(suffix)}")
        found = sorted(file for file in place.iterdir() if name.fullmatch(file.name))
    elif place.is_file() and split != "train" and not _is_word_of(split, place.name):  # the default is no choice
        message = (
            f"{split!r} is no part of a single file: {path} would be read whole; name a directory, or leave it out"
        )
        raise ConfigError(message, key="split", value=split)
    if not found or not found[0].exists():
        wanted = place / f"{split}{suffix}" if place.is_dir() else place
        raise DataError(f"there is no file {wanted}", path=wanted)
    return found


def _is_word_of(split: str, name: str) -> bool:
    """Return True for `test` in `my_test.jsonl`, but not in `latest.jsonl`."""
    return re.search(rf"(?<![^\W_]){re.escape(split)}(?![^\W_])", name) is not None


DIGESTED_ROWS_OF_A_STREAM = 1000


class Rows:
    """A prompt source over rows in memory: an iterable of mappings, or a mapping from split to one."""

    def __init__(self, rows: Iterable[Row] | Mapping[str, Iterable[Row]]) -> None:
        self._rows = rows

    def __call__(self, split: str) -> Iterator[Row]:
        """Yield the rows of a split; without splits, all rows are those of any split."""
        rows = self._rows
        if isinstance(rows, Mapping):
            if split not in rows:
                raise DataError(f"there is no split {split!r}; there are {', '.join(map(repr, rows))}")
            rows = rows[split]
        yield from rows

    def digest(self) -> str:
        """Return 12 hexadecimal digits of all rows; of a stream, which may have no end, those of its first rows."""
        splits = self._rows if isinstance(self._rows, Mapping) else {"": self._rows}
        return digest_parts(
            json.dumps([split, row], default=str)
            for split, rows in splits.items()
            for row in islice(rows, None if isinstance(rows, Sized) else DIGESTED_ROWS_OF_A_STREAM)
        )


def jsonl(split: str, path: str = "") -> Iterator[Row]:
    """Yield one JSON object a line; `DataError` names the first line that is none."""
    for file in _files(path, split, ".jsonl"):
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    reason = getattr(error, "msg", "not UTF-8")
                    message = f"{file}, line {number}: not valid JSON ({reason})"
                    raise DataError(message, path=f"{file}:{number}") from None
                if not isinstance(row, dict):
                    message = f"{file}, line {number}: holds {type(row).__name__}, expected an object"
                    raise DataError(message, path=f"{file}:{number}")
                yield row


def parquet(split: str, path: str = "") -> Iterator[Row]:
    """Yield the rows of Parquet files."""
    import pyarrow
    import pyarrow.parquet

    for file in _files(path, split, ".parquet"):
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                for batch in table.iter_batches():
                    yield from batch.to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{file} is not a Parquet file: {error}", path=file) from None


def arrow(split: str, path: str = "") -> Iterator[Row]:
    """Yield the rows of Arrow files, in the format of files or of streams, which `datasets` writes."""
    import pyarrow
    import pyarrow.ipc

    for file in _files(path, split, ".arrow"):
        try:
            with pyarrow.memory_map(str(file)) as source:
                try:
                    opened = pyarrow.ipc.open_file(source)
                    batches = map(opened.get_batch, range(opened.num_record_batches))
                except pyarrow.ArrowInvalid:
                    source.seek(0)
                    batches = iter(pyarrow.ipc.open_stream(source))
                for batch in batches:
                    yield from batch.to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{file} is not an Arrow file: {error}", path=file) from None


def csv(split: str, path: str = "", delimiter: str = ",") -> Iterator[Row]:
    """Yield the rows of CSV files, whose first line names the columns; all values are texts, as they stand there."""
    for file in _files(path, split, ".csv"):
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = DictReader(lines, delimiter=delimiter, strict=True)
            try:
                for row in reader:
                    if None in row or None in row.values():
                        columns = ", ".join(reader.fieldnames or ())
                        message = f"{file}, line {reader.line_num}: has not one value for each of the columns {columns}"
                        raise DataError(message, path=f"{file}:{reader.line_num}")
                    yield row
            except (CsvError, UnicodeDecodeError) as error:
                begins = reader.line_num + 1  # the row that could not be read
                raise DataError(f"{file}, line {begins}: not valid CSV ({error})", path=f"{file}:{begins}") from None


def text(split: str, path: str = "") -> Iterator[Row]:
    """Yield each line that is not empty as a prompt."""
    for file in _files(path, split, ".txt"):
        try:
            with file.open(encoding="utf-8") as lines:
                for line in lines:
                    if line.strip():
                        yield {"prompt": line.rstrip("\r\n")}
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is no text in UTF-8: {error}", path=file) from None


def huggingface(split: str, path: str = "", **options: Any) -> Iterator[Row]:
    """Yield the rows of a dataset by its Hugging Face id or local path; `options` go to `datasets.load_dataset`."""
    import datasets

    if not path:
        raise ConfigError("is missing: it names the dataset, by its id or its local path", key="path")
    try:
        rows = datasets.load_dataset(path, split=split, **options)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"dataset {path!r}, split {split!r}: {_first_line(error)}", path=path) from error
    yield from rows


def modelscope(split: str, path: str = "", **options: Any) -> Iterator[Row]:
    """Yield the rows of a dataset of ModelScope, OWNER/NAME; `options` go to `datasets.load_dataset`."""
    if not modelscope_id(f"modelscope:{path}"):
        message = f"{path!r} is not the name of a dataset of ModelScope, OWNER/NAME"
        raise ConfigError(message, key="path", value=path)
    yield from huggingface(split, str(download(path, "dataset")), **options)


def reasoning_gym(split: str, path: str = "", size: int = 1000, seed: int = 0, **config: Any) -> Iterator[Row]:
    """Yield `size` different problems of one split of the procedural dataset `path`.

    A hash of a problem's text decides its split; `config` goes to the dataset. A row has what the dataset's grader needs.
    """
    gym = import_optional("reasoning_gym", "the prompt source 'reasoning_gym'", "reasoning-gym")
    check_split(split)
    most = 100 * (size + 10)  # enough for a tenth of the problems many times over, unless the dataset has too few
    try:
        dataset = gym.create_dataset(path, seed=seed, size=most, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(f"reasoning_gym dataset {path!r} with {config}: {_first_line(error)}", path=path) from error
    seen: set[str] = set()
    for entry in (dataset[index] for index in range(most)):
        question = entry["question"]
        if question in seen or split_of(question) != split:
            continue
        seen.add(question)
        yield {"prompt": question, **entry, "dataset": {"name": path, **config}}
        if len(seen) == size:
            return
    raise DataError(
        f"reasoning_gym dataset {path!r}: {size} different {split} problems were asked for, only {len(seen)} found",
        path=path,
    )


def numbered(split: str, size: int, start: int = 0) -> Iterator[Row]:
    """Yield `size` prompts without text, for environments that have problems of their own; `index` counts from `start`."""
    for index in range(start, start + size):
        yield {"id": f"{split}-{index}", "prompt": "", "index": index}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

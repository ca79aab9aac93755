"""The directory of a run, and atomic writes.

runs/<name>/config.yaml      the resolved configuration
            metrics.jsonl    one line a step; `sft_step` counts those of supervised fine-tuning
            live.json        who does what and waits for whom, while it runs
            summary.json     results of the run
            judges.json      what judges behind an address were asked, and what that cost
            ledger.db        the fate of every prompt, attempt and step
            rollouts/        trajectories, in Parquet; their images, each once, in _images/
            token_stats/     numbers of each token that was trained on, if asked for
            samples.jsonl    tables of sample rollouts, if there are trackers
            profile/         traces of the steps that are profiled, if asked for
            events.jsonl     trace.json     events of the control plane and a trace of them, if asked for
            checkpoints/     logs/
            tensorboard/     wandb/ …    the folder of each tracker
            model/           the model that the run began with, or that an offline command trained
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from antiphon.core.errors import ConfigError, RecordError
from antiphon.core.failpoints import hit

FULL_OR_READ_ONLY = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM})

TAIL = 1 << 16  # bytes that are read at once, from the end of a file that may be large


def is_folder_name(name: str) -> bool:
    """Return True if `name` can be the name of a run's directory: printable, not empty, not hidden, and no path."""
    return bool(name) and name == Path(name).name and not name.startswith(".") and name.isprintable()


class RunDirectory:
    """The files of a run. A run writes nothing outside of its directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, root: str | Path, name: str, *, is_replacing: bool = False) -> "RunDirectory":
        """Create `<root>/<name>`; raise `ConfigError` if it holds files, unless they are a run that `RunStart` replaces."""
        path = Path(root) / name
        if (
            not is_replacing
            and path.exists()
            and (not path.is_dir() or any(not each.is_dir() for each in path.rglob("*")))
        ):
            message = "exists already: give the run another name (name=...), or --overwrite it"
            raise ConfigError(message, path=str(path))
        run = cls(path)
        run.logs.mkdir(parents=True, exist_ok=True)
        run.checkpoints.mkdir(exist_ok=True)
        return run

    @property
    def config(self) -> Path:
        """File of the resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """File with one JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def live(self) -> Path:
        """File with the state of a run that goes on."""
        return self.path / "live.json"

    @property
    def samples(self) -> Path:
        """File with one table of sample rollouts a line, if there are trackers."""
        return self.path / "samples.jsonl"

    @property
    def judges(self) -> Path:
        """File with the requests to judges behind an address, and their cost."""
        return self.path / "judges.json"

    @property
    def summary(self) -> Path:
        """File of the run's results."""
        return self.path / "summary.json"

    @property
    def events(self) -> Path:
        """File with one JSON object an event, if asked for."""
        return self.path / "events.jsonl"

    @property
    def trace(self) -> Path:
        """File with the events as a trace for ui.perfetto.dev."""
        return self.path / "trace.json"

    @property
    def checkpoints(self) -> Path:
        """Folder with one directory a checkpoint."""
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        """Folder of the trajectories."""
        return self.path / "rollouts"

    @property
    def profile(self) -> Path:
        """Folder of the profiles of steps."""
        return self.path / "profile"

    @property
    def logs(self) -> Path:
        """Folder of what workers print."""
        return self.path / "logs"

    @property
    def built_model(self) -> Path:
        """Folder of a model that the run was begun with and that was not a directory; whole, if there is a checkpoint."""
        return self.path / "model"

    @classmethod
    def resume(cls, root: str | Path, name: str) -> "RunDirectory":
        """Return the directory of a run that is to continue; raise `ConfigError` if there is none."""
        run = cls(Path(root) / name)
        if not run.config.is_file():
            raise ConfigError("there is no run to resume (no config.yaml)", path=str(run.path))
        return run

    def write_config(self, text: str) -> None:
        """Write the resolved configuration."""
        with atomic_write(self.config) as file:
            file.write(text.encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace the summary."""
        write_json(self.summary, summary)


class RunLineage(NamedTuple):
    """The run directory and the lineage that is being recorded in it."""

    directory: RunDirectory
    lineage: int


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically. Numbers that are not finite become null, since JSON cannot express them."""
    with atomic_write(path) as file:
        file.write(json.dumps(replace_nonfinite(value), indent=2, allow_nan=False).encode() + b"\n")


def replace_nonfinite(value: Any) -> Any:
    """Return `value` with None in place of floats that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return value


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends, once it is complete and on disk.

    If the block raises, or the process dies in it, `path` keeps its content.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        hit("sync", draft)
        draft.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            draft.unlink()
        raise
    fsync(path.parent)


@contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Raise `RecordError` in place of an `OSError` of a full or read-only disk; `path` is the run's directory."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_OR_READ_ONLY:
            raise make_write_error(path, error) from error
        raise


def make_write_error(path: Path, error: Exception) -> RecordError:
    """Return the error for a file of a run that cannot be written."""
    return RecordError(
        f"{path} cannot be written ({error}). What was committed before is safe: make room or give write permission, then "
        "continue with --resume; a command without --resume starts anew with --overwrite",
        path=path,
    )


def fsync(path: Path) -> None:
    """Force a file to disk, or a directory, which holds the names of its files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    hit("sync", path)


def remove_partial_line(path: Path) -> None:
    """Remove an incomplete last line that a killed process left, so that the next line does not continue it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            begin = max(end - TAIL, 0)
            file.seek(begin)
            if (newline := file.read(end - begin).rfind(b"\n")) >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size:
            file.truncate(end)


def link_or_copy(file: Path, place: Path) -> None:
    """Make `place` a hard link to a file, or a copy where that is impossible, as on another file system."""
    try:
        place.hardlink_to(file)
    except FileNotFoundError:  # removed meanwhile
        raise
    except OSError:
        shutil.copy2(file, place)

"""Checkpoints that are complete or not there.

    checkpoints/step_000120/    Hugging Face weights and tokenizer, loadable as they are; with several ranks, a file each
                training_state/0.pt     optimiser, schedule, random generator; with several ranks, a part each
                critics/0/          the same of each critic
                state.json          state of the run: cursor, live groups, ledger
                MANIFEST.json       every file with its size and digest; written last

A checkpoint is written beside its place, forced to disk, listed with digests, and renamed into place. What is in place was
complete once; `verify_checkpoint` checks that it still is.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from antiphon.core.errors import RecordError
from antiphon.core.failpoints import hit
from antiphon.record import safe_files
from antiphon.record.run_dir import fsync, make_write_error, write_json

MANIFEST = "MANIFEST.json"
STATE = "state.json"
CRITICS = "critics"
TRAINING_STATE = "training_state"  # a folder with a part for each rank of the learner


class NoCheckpointError(RecordError):
    """No checkpoint of a run is complete."""


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint directory."""
    return f"step_{step:06d}"


def staging_dir(directory: Path) -> Path:
    """Create the empty directory in which a checkpoint is written, until `publish_checkpoint` renames it to `directory`."""
    aside = directory.with_name(directory.name + ".partial")
    with convert_save_errors(aside):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    return aside


def publish_checkpoint(aside: Path, directory: Path, state: Mapping[str, Any]) -> None:
    """Complete a checkpoint and rename it into place.

    Args:
        aside: Its staging directory, with the files that the learner wrote.
        directory: Its place.
        state: State of the run, written to `state.json`.

    Raises:
        RecordError: It cannot be written, or a file that a rank of the learner wrote is not there.
    """
    for index in sorted(aside.rglob("*.index.json")):
        for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values())):
            if not (index.parent / name).is_file():
                raise RecordError(
                    f"{directory.name}: {name} is written, and not here: the machines of all learner ranks must see the "
                    "run's directory",
                    path=index.parent / name,
                )
    with convert_save_errors(aside):
        write_json(aside / STATE, state)
        hit("checkpoint.write")
        listed = {}
        for file in sorted(file for file in aside.rglob("*") if file.is_file()):
            fsync(file)
            listed[file.relative_to(aside).as_posix()] = {"bytes": file.stat().st_size, "digest": _digest(file)}
        write_json(aside / MANIFEST, {"digest": _digest_of(listed), "files": listed})
        for folder in (*(path for path in aside.rglob("*") if path.is_dir()), aside):
            fsync(folder)
        hit("checkpoint.publish")
        aside.rename(directory)
        fsync(directory.parent)
        hit("checkpoint.published")


@contextmanager
def convert_save_errors(place: Path) -> Iterator[None]:
    """Raise `RecordError` in place of errors of the block that writes into `place`, and remove what it wrote."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch's writer raises the last
        shutil.rmtree(place, ignore_errors=True)
        raise make_write_error(place, error) from error


def verify_checkpoint(directory: Path) -> None:
    """Raise `RecordError` that names the file, unless all files of the manifest are as they were written."""
    for name, (size, digest) in list_files(directory).items():
        file = safe_files.resolve_file(directory, name)
        if file.stat().st_size != size:
            raise RecordError(f"{file} has {file.stat().st_size} bytes instead of {size}", path=file)
        if _digest(file) != digest:
            raise RecordError(f"{file} is not as it was written", path=file)


def list_files(directory: Path) -> dict[str, tuple[int, str]]:
    """Return size and digest of each file in a checkpoint's manifest; raise `RecordError` if the manifest is damaged."""
    path, manifest = directory / MANIFEST, safe_files.read_json(directory, MANIFEST)
    with safe_files.convert_read_errors(path):
        if manifest["digest"] != _digest_of(manifest["files"]):
            raise RecordError(f"{path} is not as it was written", path=path)
        return {name: (written["bytes"], written["digest"]) for name, written in manifest["files"].items()}


def check_model(directory: Path) -> None:
    """Raise `RecordError` if loading a model would open something other than files; in a checkpoint, other than its own."""
    if directory.is_dir():
        safe_files.check_model_files(directory, confined=(directory / MANIFEST).exists())


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return all checkpoints, the newest last; each was complete once."""
    return sorted(checkpoints.glob("step_??????"))


def newest_checkpoint(checkpoints: Path, report: Callable[[str], None]) -> Path:
    """Return the newest complete checkpoint; `report` receives a line for each damaged one that is skipped.

    Raises:
        NoCheckpointError: No checkpoint is complete: a run never silently starts anew.
    """
    for directory in reversed(list_checkpoints(checkpoints)):
        try:
            verify_checkpoint(directory)
        except (RecordError, OSError) as error:
            report(f"checkpoint skipped: {error}")
            continue
        return directory
    raise NoCheckpointError(
        f"{checkpoints}: no checkpoint is whole, so there is nothing to resume; --overwrite starts anew",
        path=checkpoints,
    )


def set_aside_newer(directory: Path) -> None:
    """Rename the checkpoints after `directory`, which are damaged, so that they can be looked at."""
    for later in list_checkpoints(directory.parent):
        if later.name > directory.name:
            torn = later.with_name(later.name + ".torn")
            shutil.rmtree(torn, ignore_errors=True)
            later.rename(torn)


def read_state(directory: Path) -> dict[str, Any]:
    """Return the state that `publish_checkpoint` was given."""
    state: dict[str, Any] = safe_files.read_json(directory, STATE)
    return state


def prune_checkpoints(checkpoints: Path, keep_last: int, keep_every: int) -> None:
    """Remove old checkpoints and what crashes left.

    Checkpoints are renamed before they are removed, so that a crash in between leaves none that is incomplete. No staging
    directory may be in use.

    Args:
        checkpoints: Folder of the checkpoints.
        keep_last: Number of newest checkpoints to keep.
        keep_every: Also keep those whose step it divides; 0: none.
    """
    for old in list_checkpoints(checkpoints)[:-keep_last]:
        step = int(old.name.removeprefix("step_"))
        if not (keep_every and step % keep_every == 0):
            old.rename(old.with_name(old.name + ".pruned"))
    fsync(checkpoints)
    hit("checkpoint.prune")
    for gone in (*checkpoints.glob("*.pruned"), *checkpoints.glob("*.partial")):
        shutil.rmtree(gone)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


def _digest_of(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode()).hexdigest()

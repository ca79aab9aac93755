"""Checkpoints that are whole or not there.

    checkpoints/step_000120/    Hugging Face weights and tokenizer, loadable as they are; of several ranks, a file each
                training_state/0.pt     optimiser, schedule, random generator; of several ranks, a part each
                critics/0/          the same of each critic
                state.json          where the run was: cursor, live groups, ledger
                MANIFEST.json       every file with its size and digest; written last

All is written beside its place, forced to disk, listed with digests, and renamed into place. What lies in place was whole
once; `verify` says whether it still is.
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
from antiphon.record import reading
from antiphon.record.run_dir import fsync, make_write_error, write_json

MANIFEST = "MANIFEST.json"
STATE = "state.json"
CRITICS = "critics"
TRAINING_STATE = "training_state"  # a folder: of each rank that learns, a part


def checkpoint_name(step: int) -> str:
    """The directory of a step's checkpoint."""
    return f"step_{step:06d}"


def staging_dir(directory: Path) -> Path:
    """The empty directory in which the checkpoint `directory` is written, until `publish` puts it in place."""
    aside = directory.with_name(directory.name + ".partial")
    with convert_save_errors(aside):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    return aside


def publish_checkpoint(aside: Path, directory: Path, state: Mapping[str, Any]) -> None:
    """Make a checkpoint of what was written into its draft, and of `state`. `RecordError` if the disk takes it not, or what a
    rank of the learner wrote is not there."""
    for index in sorted(aside.rglob("*.index.json")):
        for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values())):
            if not (index.parent / name).is_file():
                raise RecordError(
                    f"{directory.name}: {name} is written, and not here: the run's directory must be one that the machines of "
                    "all learner ranks see"
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
    """`RecordError` if what is written into `place` meanwhile is not taken; what is there by then is removed."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch's writer raises the last
        shutil.rmtree(place, ignore_errors=True)
        raise make_write_error(place, error) from error


def verify_checkpoint(directory: Path) -> None:
    """`RecordError` that names the file, unless all that the manifest lists is there as it was written."""
    for name, (size, digest) in _listed(directory).items():
        file = reading.resolve_file(directory, name)
        if file.stat().st_size != size:
            raise RecordError(f"{directory.name}/{name} has {file.stat().st_size} bytes instead of {size}")
        if _digest(file) != digest:
            raise RecordError(f"{directory.name}/{name} is not as it was written")


def _listed(directory: Path) -> dict[str, tuple[int, str]]:
    """Return the size and the digest of each file that the manifest of a checkpoint lists; `RecordError` if it is torn."""
    manifest = reading.read_json(directory, MANIFEST)
    with reading.convert_read_errors(f"{directory.name}/{MANIFEST}"):
        if manifest["digest"] != _digest_of(manifest["files"]):
            raise RecordError(f"{directory.name}/{MANIFEST} is not as it was written")
        return {name: (written["bytes"], written["digest"]) for name, written in manifest["files"].items()}


def check_model(directory: Path) -> None:
    """Raise `RecordError` if those who load a model directory would open what is no file; of a checkpoint, or outside of it."""
    if directory.is_dir():
        reading.check_model_files(directory, confined=(directory / MANIFEST).exists())


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """All checkpoints, the newest last; each was whole once."""
    return sorted(checkpoints.glob("step_??????"))


def newest_checkpoint(checkpoints: Path, tell: Callable[[str], None]) -> Path:
    """The newest checkpoint that is whole; `tell` hears of those that are passed over. `RecordError` if there is none: a run
    never silently begins again."""
    for directory in reversed(list_checkpoints(checkpoints)):
        try:
            verify_checkpoint(directory)
        except RecordError as error:
            tell(f"checkpoint passed over: {error}")
            continue
        return directory
    raise RecordError(f"{checkpoints}: no checkpoint is whole, so there is nothing to resume; --overwrite starts anew")


def export(checkpoints: Path, target: Path, tell: Callable[[str], None] = print) -> Path:
    """Copy the newest whole checkpoint, without what only a resume reads, to `target`; returns where it was. `tell` hears of
    those that are passed over."""
    if target.exists():
        raise RecordError(f"{target} exists already; give another place")
    source = newest_checkpoint(reading.resolve_path(checkpoints.parent, checkpoints.name), tell)
    for name in _listed(source):  # and nothing else that may lie there
        if Path(name).parts[0] not in (STATE, TRAINING_STATE, CRITICS):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(reading.resolve_file(source, name), target / name)
    return source


def set_aside_newer(directory: Path) -> None:
    """Take the checkpoints after `directory` out of the way: they are torn, and kept to be looked at."""
    for later in list_checkpoints(directory.parent):
        if later.name > directory.name:
            torn = later.with_name(later.name + ".torn")
            shutil.rmtree(torn, ignore_errors=True)
            later.rename(torn)


def read_state(directory: Path) -> dict[str, Any]:
    """What `save` was given as state."""
    state: dict[str, Any] = reading.read_json(directory, STATE)
    return state


def prune_checkpoints(checkpoints: Path, keep_last: int, keep_every: int) -> None:
    """Remove all but the last so many, and those of steps that `keep_every` divides, if it is not 0. The names go first, so
    that a crash halfway leaves none that stands for a part. What crashes left is removed, drafts among it: none is open now."""
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

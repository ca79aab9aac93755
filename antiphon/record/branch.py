"""Begin a run at a checkpoint of another run.

The new run's directory receives the checkpoint, and its ledger a lineage 0 without attempts that ends where the checkpoint was
cut. An event `branch` of this lineage names the other run. A resume goes on from there, as it does from any checkpoint.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from antiphon.core.errors import ConfigError, RecordError
from antiphon.record import safe_files
from antiphon.record.checkpoint import (
    MANIFEST,
    checkpoint_name,
    list_checkpoints,
    list_files,
    publish_checkpoint,
    read_state,
    staging_dir,
    verify_checkpoint,
)
from antiphon.record.reader import BranchPoint
from antiphon.record.resume import code_version, require_resumable
from antiphon.record.run_dir import RunDirectory, link_or_copy
from antiphon.record.store import LedgerStore, PendingRows


def find_checkpoint(run: Path, step: int) -> tuple[BranchPoint, dict[str, Any]]:
    """Return the checkpoint of a step of a run as a branch point, and the state of the run that was saved with it.

    Its files are compared with their digests when they are copied.

    Raises:
        ConfigError: The step has no checkpoint; the error lists the steps that have one.
        RecordError: It is a checkpoint of supervised fine-tuning alone.
    """
    directory = _checkpoint(run, step)
    try:
        digest, state = _manifest_digest(directory), read_state(directory)
    except RecordError as error:
        raise _no_checkpoint(run, step, error) from error
    require_resumable(directory, state)
    point = BranchPoint(
        run=str(run.resolve()), lineage=state["lineage"], step=step, version=state["version"], digest=digest
    )
    return point, state


def begin_branch(point: BranchPoint, state: Mapping[str, Any], target: RunDirectory) -> None:
    """Lay out a new run that begins at a branch point; its checkpoint comes into place last.

    Files are hard links to those of the other run where the file system has them, so that they stay when it removes its own.

    Args:
        point: The branch point.
        state: State of the run that the checkpoint is to have.
        target: The new run's directory, without ledger or checkpoints.

    Raises:
        ConfigError: The checkpoint is damaged, or was removed meanwhile.
    """
    source, name, cut = Path(point.run), checkpoint_name(point.step), (point.step, point.version)
    with closing(LedgerStore(target.path)) as store:
        rows = [
            ("INSERT INTO lineages VALUES (0, NULL, ?, ?, ?, NULL)", (*cut, code_version())),
            ("INSERT INTO checkpoints VALUES (0, ?, ?, ?)", (*cut, name)),
            (
                "INSERT INTO events (lineage, second, kind, detail) VALUES (0, 0.0, 'branch', ?)",
                (json.dumps(asdict(point)),),
            ),
        ]
        store.write(0, PendingRows(statements=rows))
    checkpoint, model = _checkpoint(source, point.step), safe_files.resolve_path(source, "model")
    staging = staging_dir(target.checkpoints / name)
    try:
        _link_files(
            model, [str(file.relative_to(model)) for file in model.rglob("*") if file.is_file()], target.built_model
        )
        _link_files(checkpoint, [*list_files(checkpoint), MANIFEST], staging)
        verify_checkpoint(staging)
        if _manifest_digest(staging) != point.digest:
            raise RecordError(f"{checkpoint} was replaced meanwhile", path=checkpoint)
    except (RecordError, FileNotFoundError) as error:
        raise _no_checkpoint(source, point.step, error) from error
    (staging / MANIFEST).unlink()  # with another state, its digest is another one
    publish_checkpoint(staging, target.checkpoints / name, {**state, "lineage": 0})


def _checkpoint(run: Path, step: int) -> Path:
    return safe_files.resolve_path(run, f"checkpoints/{checkpoint_name(step)}")


def _manifest_digest(checkpoint: Path) -> str:
    list_files(checkpoint)  # raises if the manifest is damaged
    return str(safe_files.read_json(checkpoint, MANIFEST)["digest"])


def _link_files(source: Path, names: Iterable[str], target: Path) -> None:
    """Put files of a directory into another, without a second copy where that is possible."""
    for name in names:
        file, place = safe_files.resolve_file(source, name).resolve(), target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(file, place)


def _no_checkpoint(run: Path, step: int, reason: object) -> ConfigError:
    """Return the error for a step without a whole checkpoint, with the steps that have one."""
    steps = [int(each.name.removeprefix("step_")) for each in list_checkpoints(run / "checkpoints") if _is_whole(each)]
    listed = [str(each) for each in steps]
    message = (
        f"step {step} of {run} has no whole checkpoint ({reason}); steps that have one: {', '.join(listed) or 'none'}"
    )
    return ConfigError(message, key="at", value=step, valid=listed)


def _is_whole(checkpoint: Path) -> bool:
    try:
        verify_checkpoint(checkpoint)
    except (RecordError, OSError):
        return False
    return True

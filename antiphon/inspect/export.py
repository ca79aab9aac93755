"""Copy the model of a run's newest complete checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path

from antiphon.core.errors import RecordError
from antiphon.record import safe_files
from antiphon.record.checkpoint import CRITICS, STATE, TRAINING_STATE, list_files, newest_checkpoint


def export(checkpoints: Path, target: Path, report: Callable[[str], None] = print) -> Path:
    """Copy the newest complete checkpoint, without what only a resume reads.

    Args:
        checkpoints: Folder of the run's checkpoints.
        target: Directory to create.
        report: Receives a line for each damaged checkpoint that is skipped.

    Returns:
        The checkpoint that was copied.

    Raises:
        RecordError: `target` exists, or no checkpoint is complete.
    """
    if target.exists():
        raise RecordError(f"{target} exists already; give another place", path=target)
    source = newest_checkpoint(safe_files.resolve_path(checkpoints.parent, checkpoints.name), report)
    for name in list_files(source):  # and no other file that may lie there
        if Path(name).parts[0] not in (STATE, TRAINING_STATE, CRITICS):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(safe_files.resolve_file(source, name), target / name)
    return source

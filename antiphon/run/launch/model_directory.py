"""The directory that a model is loaded from: given, written by a user's function, or downloaded."""

import asyncio
from pathlib import Path

from antiphon.cluster.base import Cluster
from antiphon.core.errors import DataError
from antiphon.core.objects import stays_here
from antiphon.core.registry import import_path
from antiphon.core.workers import Worker
from antiphon.run.model_files import check_weights


class ModelBuilder(Worker):
    """Runs the user's function that writes a model, so that its imports stay out of the controller."""

    def build(self, path: str, target: Path, seed: int) -> None:
        """Call package.module:function with (target, seed)."""
        import_path(path, "model")(target, seed)


async def model_directory(cluster: Cluster, path: str, target: Path, seed: int, *, weights: bool = True) -> Path:
    """Return a local directory with the model at `path`.

    Args:
        cluster: Runs a function that writes the model.
        path: A directory, a Hugging Face id, or package.module:function.
        target: Directory that such a function writes to.
        seed: Second argument of such a function.
        weights: False if the configuration of the model is enough; weights are then not downloaded.

    Raises:
        DataError: There is no such model, or it lacks the weights that are needed.
    """
    found = Path(path)
    if stays_here(path):
        await asyncio.to_thread(import_path(path, "model"), target, seed)
        found = target
    elif ":" in path and not found.is_dir():
        builder = cluster.spawn("model", f"{__name__}:{ModelBuilder.__name__}")
        await builder.call("build", path, target, seed)
        await builder.close()
        found = target
    elif not found.is_dir():
        found = _download(path, weights)
    if weights:
        check_weights(found)
    return found


def _download(path: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=None if weights else ["*.json", "*.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"model {path!r} is no local directory, and cannot be downloaded: {type(error).__name__}", path=path
        ) from error

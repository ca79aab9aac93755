"""The directory that a model is loaded from: given, written by a user's function, or downloaded."""

import asyncio
import shutil
from pathlib import Path

from antiphon.cluster.base import Cluster
from antiphon.core.errors import DataError
from antiphon.core.modelscope import download, modelscope_id
from antiphon.core.objects import stays_here
from antiphon.core.registry import import_path
from antiphon.core.types import Message
from antiphon.core.workers import Worker
from antiphon.learning.config import LearnerConfig
from antiphon.record.run_dir import link_or_copy
from antiphon.run.model_files import check_model_path, check_weights
from antiphon.tasks.rendering import Renderer

# Beginning of the names of its files. Transformers takes such a file before the setting of the tokenizer.
CHAT_TEMPLATE = "chat_template"
WITHOUT_WEIGHTS = ["*.json", "*.jinja"]  # names of the files of a model whose weights are not needed


class ModelBuilder(Worker):
    """Runs the user's function that writes a model, so that its imports stay out of the controller."""

    def build(self, path: str, target: Path, seed: int) -> None:
        """Call package.module:function with (target, seed)."""
        import_path(path, "model")(target, seed)

    def round_base(self, path: str, target: Path) -> None:
        """Write the model that adapters are added to with `learner.lora.quantize`; the directory is whole, or not there."""
        from antiphon.learning.model.quantized_base import round_base_to_nf4

        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        round_base_to_nf4(path, partial)
        shutil.rmtree(target, ignore_errors=True)  # which may be where the model was
        partial.rename(target)


async def round_base(cluster: Cluster, model: Path, target: Path, learner: LearnerConfig) -> Path:
    """Return the directory of the model that all parts of a run begin with: with `learner.lora.quantize` a rounded copy.

    Engines and checkpoints then have the weights that the learner's adapters are added to.
    """
    if learner.lora is None or learner.lora.quantize == "none":
        return model
    builder = cluster.spawn("model", f"{__name__}:{ModelBuilder.__name__}")
    await builder.call("round_base", str(model), target)
    await builder.close()
    return target


async def model_directory(
    cluster: Cluster, path: str, target: Path, seed: int, *, weights: bool = True, chat_template: str = ""
) -> Path:
    """Return a local directory with the model at `path`.

    Args:
        cluster: Runs a function that writes the model.
        path: A directory, a Hugging Face id, modelscope:OWNER/NAME, or package.module:function.
        target: Directory that such a function writes to, and the one of a model with another chat template.
        seed: Second argument of such a function.
        weights: False if the configuration of the model is enough; weights are then not downloaded.
        chat_template: A file with a chat template to use instead of the model's.

    Raises:
        DataError: There is no such model, it lacks the weights that are needed, or the chat template cannot be used.
    """
    found = Path(path)
    if name := modelscope_id(path):
        found = await asyncio.to_thread(download, name, "model", None if weights else WITHOUT_WEIGHTS)
    elif stays_here(path):
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
    return _replace_chat_template(found, chat_template, target) if chat_template else found


def _replace_chat_template(model: Path, file: str, target: Path) -> Path:
    """Return `target` as a directory with the files of `model` and the chat template in `file`.

    A directory that is made for this is whole, or not there at all.
    """
    try:
        template = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"model.chat_template: {file} cannot be read: {error}", path=file) from error
    place = model
    if model != target:
        place = target.with_name(f"{target.name}.partial")
        for directory in (place, target):
            shutil.rmtree(directory, ignore_errors=True)
        place.mkdir(parents=True)
        for each in model.iterdir():
            if each.is_file() and not each.name.startswith(CHAT_TEMPLATE):
                link_or_copy(each.resolve(), place / each.name)
    (place / f"{CHAT_TEMPLATE}.jinja").write_text(template, encoding="utf-8")
    try:
        Renderer(place).encode_prompt([Message("user", "Hello")])
    except DataError as error:
        raise DataError(f"model.chat_template: {file}: {error}", path=file) from error
    return place.rename(target)


def _download(path: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    check_model_path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=None if weights else WITHOUT_WEIGHTS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"model {path!r} is no local directory, and cannot be downloaded: {type(error).__name__}", path=path
        ) from error

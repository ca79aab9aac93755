"""Models as Hugging Face files: each rank writes one file, and the first rank an index of all."""

import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from antiphon.core.vision import reads_images
from antiphon.learning.model import lora
from antiphon.record.run_dir import write_json
from antiphon.weights.manifest import NamedTensors

State = dict[str, torch.Tensor]
T = TypeVar("T")

BESIDE = (
    *("token", "vocab", "merges", "sentencepiece", "spiece", "special_tokens", "added_tokens"),
    *("chat_template", "generation_config"),
    *("processor_config", "preprocessor_config", "video_preprocessor_config"),
)


def block_name(name: str) -> str:
    """Return the block that a parameter and its adapters belong to, such as the attention of a layer.

    Tensors that files fuse are in one block.
    """
    return lora.base_name(name).rpartition(".")[0].rpartition(".")[0]


def assign_blocks(named: NamedTensors, ranks: int) -> dict[str, int]:
    """Return the rank that keeps each block, so that all ranks keep about as many bytes."""
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in named:
        sizes[block_name(name)] += tensor.shape.numel() * tensor.dtype.itemsize
    kept, found = [0] * ranks, {}
    for block in sorted(sizes, key=lambda block: -sizes[block]):
        found[block] = kept.index(min(kept))
        kept[found[block]] += sizes[block]
    return found


def shard_file(rank: int, ranks: int) -> str:
    """Return the name of the file that a rank writes."""
    return SAFE_WEIGHTS_NAME if ranks == 1 else f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def to_file_format(model: PreTrainedModel, weights: State) -> State:
    """Return weights under the names and in the shapes that they have in files."""
    found: State = revert_weight_conversion(model, weights)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def rename_as_in_files(model: PreTrainedModel, named: dict[str, T]) -> dict[str, T]:
    """Return what belongs to weights under the names that these have in files, which differ in vision-language models."""
    if not reads_images(model.config):
        return named
    empty = torch.empty(0, device="meta")
    return {next(iter(revert_weight_conversion(model, {name: empty}))): value for name, value in named.items()}


def write_weights(model: PreTrainedModel, weights: State, file: Path) -> None:
    """Write what one rank keeps, if that is anything."""
    if weights:
        save_file(to_file_format(model, weights), file, metadata={"format": "pt"})


def file_sizes(model: PreTrainedModel, outlines: State) -> dict[str, int]:
    """Return the bytes of each tensor that `write_weights` writes, from outlines on the device `meta`."""
    return {name: tensor.nbytes for name, tensor in to_file_format(model, outlines).items()}


def write_index(sizes: Sequence[dict[str, int]], place: Path) -> None:
    """Write which of the ranks' files holds which weights, given the `file_sizes` of each rank.

    A single file needs no index: it is found by its name.
    """
    if len(sizes) == 1:
        return
    files = [shard_file(rank, len(sizes)) for rank in range(len(sizes))]
    where = {name: file for file, own in zip(files, sizes, strict=True) for name in own}
    total = {"total_size": sum(sum(own.values()) for own in sizes)}
    write_json(place / SAFE_WEIGHTS_INDEX_NAME, {"metadata": total, "weight_map": where})


def write_config(model: PreTrainedModel, kind: type[PreTrainedModel], place: Path) -> None:
    """Write what else `from_pretrained` needs of a model, which is of this kind once it is loaded."""
    model.config.architectures = [kind.__name__]
    model.config.save_pretrained(place)
    if model.can_generate():
        model.generation_config.save_pretrained(place)


def copy_tokenizer(model: str, place: Path) -> None:
    """Copy what a model's directory has beside weights and their configuration: tokenizer, chat template, how to generate."""
    for file in Path(model).glob("*"):
        if file.is_file() and file.name.startswith(BESIDE):
            shutil.copy2(file, place / file.name)

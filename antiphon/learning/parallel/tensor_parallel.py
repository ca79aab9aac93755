"""Tensor parallelism by the model's own plan: which layers are cut how, and the collectives around them.

Also the check whether the layers of a model can be divided on a mesh.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from antiphon.core.decoder_checks import has_ropes_by_layer_type
from antiphon.core.errors import UnsupportedError
from antiphon.learning.mesh import copy_to_group, gather_from_group, reduce_from_group, split_to_group
from antiphon.learning.mesh_config import MeshConfig
from antiphon.learning.model.logprobs import Vocabulary

# Names of transformers. What ranks compute of a layer that is cut by columns they gather, if its output is not alike throughout
# (fused projections), and split again before the next layer, which is cut by rows.
COLUMNS, GATHERED = "colwise", "colwise_gather_output"
ROWS, SPLIT = "rowwise", "rowwise_split_input"
PARTIAL = "replicated_with_grad_allreduce"
EXPERTS = "moe_tp_experts"  # every rank has them whole: they are divided by `expert`


def check_division(model: PreTrainedModel, mesh: MeshConfig, at: str = "learner.mesh") -> None:
    """Check that the layers of a model, which may be without memory, can be divided on a mesh.

    Args:
        model: The model.
        mesh: The mesh.
        at: Key of the mesh in the configuration, for messages.

    Raises:
        UnsupportedError: They cannot.
    """
    kind, styles = type(model).__name__, set[str]()
    if mesh.pipeline > 1:
        _check_stages(model, at)
    for name, module, style in planned_layers(model) if mesh.tensor > 1 else ():
        if style not in (COLUMNS, GATHERED, ROWS, SPLIT, PARTIAL, EXPERTS):
            raise UnsupportedError(f"{at}.tensor: {name} of {kind} cannot be cut ({style})", key=f"{at}.tensor")
        if style in (ROWS, SPLIT) and getattr(module, "base_layer", module).bias is not None:
            message = f"{at}.tensor: {name} of {kind} has a bias, which cannot be cut by rows"
            raise UnsupportedError(message, key=f"{at}.tensor")
        styles.add(style)
    if mesh.tensor > 1 and not styles & {COLUMNS, GATHERED}:
        raise UnsupportedError(f"{at}.tensor: there is no plan of how to cut a {kind}", key=f"{at}.tensor")
    if mesh.expert > 1 and not find_expert_layers(model):
        raise UnsupportedError(f"{at}.expert: {kind} has no layers of experts to divide", key=f"{at}.expert")


def _check_stages(model: PreTrainedModel, at: str) -> None:
    """Raise `UnsupportedError` if a later stage would compute its layers differently from the whole model."""
    config, kind, key = model.config.get_text_config(), type(model).__name__, f"{at}.pipeline"
    if has_ropes_by_layer_type(
        config
    ):  # the model looks the type up by a layer's place in the list, which a stage shortens
        raise UnsupportedError(
            f"{key}: {kind} has layers of several types with rotary embeddings of their own", key=key
        )
    if getattr(config, "embedding_multiplier", None) not in (None, 1):
        raise UnsupportedError(f"{key}: {kind} would multiply embeddings (embedding_multiplier) at each stage", key=key)


def planned_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any, str]]:
    """The parts of a model that its own plan of tensor parallelism names, and how each is to be cut."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    for name, module in model.base_model.named_modules():
        if style := plan.get(re.sub(r"\.\d+\.", ".*.", name)):
            yield name, module, style


def find_expert_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """By name, the layers that have the weights of all their experts in one tensor each."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
        and isinstance(getattr(module, "num_experts", None), int)
    }


def copy_input_hook(group: Any) -> Callable[..., Any]:
    """Return a hook on a block's input: all ranks have it, each computes a part."""

    def enter(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (copy_to_group(args[0], group), *args[1:]), options
        return args, options | {"hidden_states": copy_to_group(options["hidden_states"], group)}

    return enter


def reduce_output_hook(group: Any) -> Callable[..., Any]:
    """Return a hook on a block's output: the sum of all parts."""

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return (
            (reduce_from_group(output[0], group), *output[1:])
            if isinstance(output, tuple)
            else reduce_from_group(output, group)
        )

    return leave


def gather_output_hook(group: Any) -> Callable[..., Any]:
    """Return a hook on a layer's output: the columns [..., n] of all ranks, which all compute the same with them."""

    def leave(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return gather_from_group(output.movedim(-1, 0), group).movedim(0, -1)

    return leave


def split_input_hook(group: Any) -> Callable[..., Any]:
    """Return a hook on a layer's input, which all ranks have: this rank's columns of it."""

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return split_to_group(args[0].movedim(-1, 0), group).movedim(0, -1), *args[1:]

    return enter


def vocabulary_embedding(embedding: nn.Embedding, vocabulary: Vocabulary) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of an embedding of which each rank has some rows: its own, which may scale them, and trains no padding."""
    look_up, count, pad = embedding.forward, len(embedding.weight), embedding.padding_idx
    if pad is not None:
        embedding.padding_idx = pad - vocabulary.start if 0 <= pad - vocabulary.start < count else None

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        rows, there = vocabulary.rows(tokens, count)
        return reduce_from_group(look_up(rows) * there[..., None], vocabulary.group)

    return embed

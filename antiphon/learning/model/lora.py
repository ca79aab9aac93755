"""Low-rank adapters: W + scale · B A in place of W, where only A and B are trained.

Source: Hu et al. 2022, "LoRA". The layers are peft's. There is no dropout: engines would sample from another model.
"""

import importlib
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.core.optional_packages import how_to_install
from antiphon.core.vision import decoder_of
from antiphon.learning.config import LoraConfig
from antiphon.weights.adapters import merge_adapter

T = TypeVar("T")

# On a machine without a GPU it warns, whoever imports it, that a faster kernel would need one more package.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

NAME = "default"  # peft's, of the only adapter there is
PREFIX, FILE = "base_model.model.", "adapter_model.safetensors"  # peft's, of what it saves


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze the model and add adapters to the linear layers of its decoder.

    All of them get one, or those that `config.targets` names. B is zero, so outputs do not change yet.

    Raises:
        ConfigError: The model has none of these layers.
    """
    body = {id(module) for module in decoder_of(model).modules()}
    linear = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and id(module) in body
    ]
    found = [name for name in linear if not config.targets or name.rpartition(".")[2] in config.targets]
    if not found:
        valid = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"{type(model).__name__} has no linear layers called {', '.join(config.targets)}: valid are {', '.join(valid)}",
            key="learner.lora.targets",
            value=config.targets,
            valid=valid,
        )
    model.requires_grad_(False)
    with _on_cpu([parameter for parameter in model.parameters() if parameter.is_meta]):
        _import_peft().inject_adapter_in_model(_settings(config, found), model, adapter_name=NAME)


def hold_base_in_bfloat16(model: PreTrainedModel) -> None:
    """Hold the frozen weights of linear layers in bfloat16, where that changes none of them: in half of the memory.

    Under autocast matrix products round them to bfloat16 anyway, so all results stay the same. An embedding stays as it is, and
    so does a head that is tied to it: what an embedding yields is not rounded.
    """
    for _, module in frozen_linears(model):
        rounded = module.weight.detach().to(torch.bfloat16)
        if bool((rounded == module.weight).all()):
            module.weight.data = rounded


def frozen_linears(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Yield the linear layers whose weights are not trained, without those that share theirs with an embedding."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, module in model.named_modules():
        if (
            isinstance(module, torch.nn.Linear)
            and not module.weight.requires_grad
            and id(module.weight) not in embeddings
        ):
            yield name, module


@contextmanager
def _on_cpu(empty: list[torch.nn.Parameter]) -> Iterator[None]:
    """Make parameters on the device `meta` look as if they were on the CPU.

    New adapters are created on the device of their layer, and must begin with real numbers.
    """
    seeming = [torch.nn.Parameter(torch.zeros(()).expand(p.shape), requires_grad=False) for p in empty]
    for parameter, other in zip(empty, seeming, strict=True):
        torch.utils.swap_tensors(parameter, other)
    try:
        yield
    finally:
        for parameter, other in zip(empty, seeming, strict=True):
            torch.utils.swap_tensors(parameter, other)


def adapter_pairs(named: Iterable[tuple[str, T]]) -> dict[str, tuple[T, T]]:
    """Return A [rank, in] and B [out, rank] of each adapted weight, by its name without adapters."""
    parts = {name: tensor for name, tensor in named if f".{NAME}." in name}
    stems = [stem for name in parts if (stem := name.removesuffix(f".lora_A.{NAME}.weight")) != name]
    return {
        f"{stem}.weight": (parts[f"{stem}.lora_A.{NAME}.weight"], parts[f"{stem}.lora_B.{NAME}.weight"])
        for stem in stems
    }


def merge_adapters(state: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Return the weights of an adapted model's state dict with adapters merged, under their names without adapters."""
    found = {}
    adapters = adapter_pairs(state.items())
    for name, tensor in state.items():
        if f".{NAME}." not in name:
            weight = base_name(name)
            found[weight] = merge_adapter(tensor, *adapters[weight], scale) if weight in adapters else tensor
    return found


@contextmanager
def adapters_disabled(model: PreTrainedModel) -> Iterator[None]:
    """Run the block with all adapters disabled."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_adapters(state: dict[str, torch.Tensor], config: LoraConfig, place: Path) -> None:
    """Write the adapters of a state dict into a new directory, as peft reads them."""
    place.mkdir(parents=True)
    own = {PREFIX + name.replace(f".{NAME}.", "."): tensor for name, tensor in state.items() if f".{NAME}." in name}
    save_file(own, place / FILE)
    _settings(config, [name.removesuffix(".weight") for name in adapter_pairs(state.items())]).save_pretrained(place)


def load_adapters(place: Path) -> dict[str, torch.Tensor]:
    """Return the adapters that `save_adapters` wrote, by the names of an adapted model's parameters."""
    state = load_file(place / FILE)
    return {
        re.sub(r"\.(lora_[AB])\.", rf".\1.{NAME}.", name.removeprefix(PREFIX)): tensor for name, tensor in state.items()
    }


def base_name(name: str) -> str:
    """Return the name, without adapters, of the weight that a parameter is or is added to."""
    return re.sub(rf"\.(base_layer|lora_[AB]\.{NAME})\.", ".", name)


def _settings(config: LoraConfig, targets: list[str]) -> Any:
    return _import_peft().LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets)


def _import_peft() -> ModuleType:
    try:
        return importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"learner.lora needs peft: {how_to_install('peft')}", key="learner.lora") from error

"""Low-rank adapters: W + scale · B A in place of W, where only A and B are trained.

Source: Hu et al. 2022, "LoRA". The layers are peft's.
"""

import importlib
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import filterfalse
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
from antiphon.learning.model.dropout import add_dropout
from antiphon.weights.adapters import merge_adapter

T = TypeVar("T")

# On a machine without a GPU it warns, whoever imports it, that a faster kernel would need one more package.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

NAME = "default"  # peft's, of the only adapter there is
PREFIX, FILE = "base_model.model.", "adapter_model.safetensors"  # peft's, of what it saves


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze the model but for `config.modules_to_save`, and add adapters to the linear layers of its decoder.

    All of them get one, or those that `config.targets` names; none that are trained whole, or were frozen before. B is zero, so
    outputs do not change yet.

    Raises:
        ConfigError: The model has none of these layers or modules.
    """
    saved = {id(parameter): parameter for parameter in _find_saved(model, config) if parameter.requires_grad}
    body = {id(module) for module in decoder_of(model).modules()}
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and id(module) in body
        if module.weight.requires_grad and id(module.weight) not in saved
    ]
    found = [name for name in linear if not config.targets or name.rpartition(".")[2] in config.targets]
    if not found:
        valid = sorted({name.rpartition(".")[2] for name in linear})
        called = f" called {', '.join(config.targets)}" if config.targets else ""
        raise ConfigError(
            f"{type(model).__name__} has no linear layers{called} that can get an adapter: valid are {', '.join(valid)}",
            key="learner.lora.targets",
            value=config.targets,
            valid=valid,
        )
    model.requires_grad_(False)
    with _on_cpu([parameter for parameter in model.parameters() if parameter.is_meta]):
        _import_peft().inject_adapter_in_model(_settings(config, found), model, adapter_name=NAME)
    for parameter in saved.values():
        parameter.requires_grad_(True)
    if config.dropout:
        add_dropout(model, config.dropout, NAME)


def _find_saved(model: PreTrainedModel, config: LoraConfig) -> list[torch.nn.Parameter]:
    """Return the parameters of `modules_to_save`; raise `ConfigError` if one of these has none."""
    named = [*model.named_parameters(remove_duplicate=False)]
    for number, module in enumerate(config.modules_to_save):
        if not any(LoraConfig(modules_to_save=(module,)).saves(name) for name, _ in named):
            valid = sorted({name.split(".")[-2] for name, _ in named})
            raise ConfigError(
                f"{type(model).__name__} has no module with parameters called {module}: valid are {', '.join(valid)}",
                key=f"learner.lora.modules_to_save.{number}",
                value=module,
                valid=valid,
            )
    return [parameter for name, parameter in named if config.saves(name)]


def tied_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return all names of each parameter, by the first of them: more than one if it is tied."""
    found = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)].append(name)
    return {names[0]: names for names in found.values()}


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
    parts = {name: tensor for name, tensor in named if is_adapter(name)}
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
        if not is_adapter(name):
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


def save_adapters(
    state: dict[str, torch.Tensor], names: Mapping[str, Sequence[str]], config: LoraConfig, place: Path
) -> None:
    """Write what is trained into a new directory, as peft reads it: adapters, and parameters of `modules_to_save`.

    Args:
        state: Trained parameters by name.
        names: All names of each parameter, as from `tied_names`.
        config: Settings of the adapters.
        place: The directory.
    """
    place.mkdir(parents=True)
    saved = [*filterfalse(is_adapter, state)]
    own = {name.replace(f".{NAME}.", "."): tensor for name, tensor in state.items()}
    own |= {other: state[name].clone() for name in saved for other in names[name][1:]}  # where peft looks for it, too
    save_file({PREFIX + name: tensor for name, tensor in own.items()}, place / FILE)
    settings = _settings(config, [name.removesuffix(".weight") for name in adapter_pairs(state.items())])
    settings.modules_to_save = sorted({name.rpartition(".")[0] for name in saved}) or None
    settings.ensure_weight_tying = any(len(names[name]) > 1 for name in saved)  # else peft would untie them
    settings.save_pretrained(place)


def load_adapters(place: Path) -> dict[str, torch.Tensor]:
    """Return what `save_adapters` wrote, by the names of an adapted model's parameters."""
    state = load_file(place / FILE)
    return {
        re.sub(r"\.(lora_[AB])\.", rf".\1.{NAME}.", name.removeprefix(PREFIX)): tensor for name, tensor in state.items()
    }


def is_adapter(name: str) -> bool:
    """Return True if a parameter of an adapted model is part of an adapter."""
    return f".{NAME}." in name


def base_name(name: str) -> str:
    """Return the name, without adapters, of the weight that a parameter is or is added to."""
    return re.sub(rf"\.(base_layer|lora_[AB]\.{NAME})\.", ".", name)


def _settings(config: LoraConfig, targets: list[str]) -> Any:
    return _import_peft().LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=targets
    )


def _import_peft() -> ModuleType:
    try:
        return importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"learner.lora needs peft: {how_to_install('peft')}", key="learner.lora") from error

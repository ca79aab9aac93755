"""Hugging Face decoder models: loading, and the one place that knows their parts."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from antiphon.errors import DataError, UnsupportedError


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def load_model(
    path: str,
    *,
    attention: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    kind: Any = AutoModelForCausalLM,
    **options: Any,
) -> PreTrainedModel:
    """A model of `kind`, a causal language model by default, from a directory or Hugging Face id; `options` are of its
    configuration. `DataError` when there is none."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise DataError(f"model {path!r}: the directory has no config.json, so it is not a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(path, **options)
        model = kind.from_pretrained(path, config=config, dtype=dtype, attn_implementation=attention)
    except ValueError as error:
        raise UnsupportedError(f"model {path!r} cannot be a {kind.__name__}: {str(error).splitlines()[0]}") from error
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"model {path!r} cannot be loaded: {reason}") from error
    model.to(device)
    loaded: PreTrainedModel = model
    return loaded


def saved_weights(directory: Path, kind: type[PreTrainedModel]) -> dict[str, torch.Tensor]:
    """What `save_pretrained` has written of a model of this kind, by the names of its parameters and buffers: in the files they
    may have others. `DataError` if that is not all of it."""
    try:
        model, found = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    except (RuntimeError, ValueError, OSError) as error:
        raise DataError(f"{directory} is not a checkpoint of this model: {str(error).splitlines()[0]}") from error
    if strange := sorted({*found["missing_keys"], *found["unexpected_keys"]}):
        raise DataError(f"{directory} is not a checkpoint of this model: {strange[:3]}")
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | dict(model.named_buffers())


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """The language model head [V, H]; `UnsupportedError` for heads that do more than one matrix product."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise UnsupportedError(f"{type(model).__name__}: the language model head is not one matrix without a bias")
    for knob in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(model.config, knob, None) not in (None, 1, 1.0):
            raise UnsupportedError(f"{type(model).__name__}: {knob} is not supported")
    weight: torch.Tensor = head.weight
    return weight


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The layers of a decoder, from the first to the last."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise UnsupportedError(f"{type(model).__name__} has no list of layers called layers, as other decoders have")
    return layers

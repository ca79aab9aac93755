"""Prepares a transformers model for the engine, or says why it cannot run."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from antiphon.core.errors import UnsupportedError
from antiphon.engines.config import NATIVE_DTYPES, EngineKind
from antiphon.engines.native.attention import ATTENTION_NAME
from antiphon.engines.native.linear import speed_up_linears


def prepare_model(model: PreTrainedModel | Path | str, config: EngineKind) -> Any:
    """Return the model on the configured device and dtype, with our attention; load it if a directory is named.

    A model that is passed is taken over: its weights, dtype, device and attention are the engine's from then on.

    Raises:
        UnsupportedError: The engine cannot run the model.
    """
    device, dtype = resolve_device(config), resolve_dtype(config)
    # It plans anew for each length of a sequence: on an H100 256 sequences did not get 256 tokens each in 30 s.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not isinstance(model, PreTrainedModel):
        try:
            model = AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype, trust_remote_code=False)
        except ValueError as error:  # such as of a model that only code beside its weights could load
            reason = " ".join(str(error).split())[:300]
            raise UnsupportedError(f"model {str(model)!r} cannot be loaded: {reason}") from error
    _require_supported(model)
    prepared: Any = model.to(device=device, dtype=dtype).eval()
    prepared.set_attn_implementation(ATTENTION_NAME)
    speed_up_linears(prepared)
    return prepared


def resolve_device(config: EngineKind) -> torch.device:
    """Return the device that `engine.device` names: with `auto` the first GPU that this process sees, or else the CPU.

    Raises:
        UnsupportedError: It is no name of a device.
    """
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(config.device)
    except RuntimeError as error:
        raise UnsupportedError(
            f"engine.device: {config.device!r} is none; valid are auto, cpu, cuda, cuda:1"
        ) from error


def resolve_dtype(config: EngineKind) -> torch.dtype:
    """Return the dtype that `engine.dtype` names; raise `UnsupportedError` if it is none of `NATIVE_DTYPES`."""
    if config.dtype not in NATIVE_DTYPES:
        raise UnsupportedError(f"engine.dtype: there is no {config.dtype!r}; valid are {', '.join(NATIVE_DTYPES)}")
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def max_sequence_length(model: Any, configured: int) -> int:
    """Return the most tokens of a sequence: `configured`, or if that is 0, the limit of the model."""
    limit: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if configured or limit is not None:
        return configured or int(limit)
    raise UnsupportedError(f"{type(model).__name__} has no length limit of its own; set max_length")


def eos_ids(model: Any) -> list[int]:
    """Return the end tokens of a model, from the `generation_config.json` of its directory, or else its `config.json`."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [int(ends)] if isinstance(ends, int) else [int(end) for end in ends]


def _require_supported(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise UnsupportedError(f"{name} does not let its attention function be replaced, which the native engine does")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or config.is_encoder_decoder:
        raise UnsupportedError(
            f"the native engine runs decoders with plain attention; {name} has {sorted(kinds) or 'an encoder'}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise UnsupportedError(
            f"{name} scales its rotary embedding by the longest sequence of a batch (rope_type {rope['rope_type']!r}): "
            "a token would depend on its neighbours in the batch"
        )

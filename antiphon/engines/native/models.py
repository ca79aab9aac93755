"""Prepares a transformers model for the engine, or says why it cannot run."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from antiphon.core.decoder_checks import require_separable_sequences
from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.core.vision import attention_names, model_class_of
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
            model = model_class_of(str(model)).from_pretrained(str(model), dtype=dtype, trust_remote_code=False)
        except ValueError as error:  # such as of a model that only code beside its weights could load
            reason = " ".join(str(error).split())[:300]
            raise UnsupportedError(f"model {str(model)!r} cannot be loaded: {reason}") from error
    _require_supported(model)
    prepared: Any = model.to(device=device, dtype=dtype).eval()
    prepared.set_attn_implementation(attention_names(prepared.config, ATTENTION_NAME))
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


def longest_plain_sequence(model: Any, configured: int) -> int:
    """Return the most tokens of a sequence that the native engine computes as the model does.

    That is `max_sequence_length`, or less if a layer looks back less far: the engine has no sliding windows.

    Raises:
        ConfigError: The model has no embeddings of so many positions.
    """
    config, longest = model.config.get_text_config(), max_sequence_length(model, configured)
    positions: Any = getattr(config, "max_position_embeddings", None)
    learned = positions is not None and not getattr(config, "rope_parameters", None)
    if learned and longest > positions:
        message = f"{longest} is more than the {positions} positions that {type(model).__name__} has embeddings of"
        raise ConfigError(message, key="engine.max_length", value=longest)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    return min(longest, window) if window and (kinds is None or "sliding_attention" in kinds) else longest


def eos_ids(model: Any) -> list[int]:
    """Return the end tokens of a model, from the `generation_config.json` of its directory, or else its `config.json`."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [int(ends)] if isinstance(ends, int) else [int(end) for end in ends]


def _require_supported(model: PreTrainedModel) -> None:
    require_separable_sequences(model)
    config = model.config.get_text_config()
    if (value := getattr(config, "v_head_dim", None)) is None:
        return
    rotated = getattr(config, "qk_rope_head_dim", None)  # keys of this kind have a part with positions and one without
    key = getattr(config, "head_dim", value) if rotated is None else rotated + config.qk_nope_head_dim
    if key != value:
        raise UnsupportedError(
            f"the native engine keeps values of the size of their keys: {type(model).__name__} has keys of {key} and values "
            f"of {value} numbers a head"
        )

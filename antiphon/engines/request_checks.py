"""Checks of requests before an engine runs them."""

import math
from collections.abc import Collection

import numpy as np

from antiphon.core.errors import RequestError, UnsupportedError
from antiphon.core.types import GenerateRequest, Sampling
from antiphon.core.types.completions import require_places

MIN_SERVED_TEMPERATURE = 0.01  # vLLM raises lower temperatures to this, and says so in its log only
MAX_VLLM_TEMPERATURE = 2.0  # above which vLLM raises
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}  # values that change nothing
MIN_TEMPERATURE = 1e-20  # float32 logits divided by much less than this are infinite


def validate_request(
    request: GenerateRequest, max_length: int, vocabulary: int, *, decodes: bool, reads_images: bool = False
) -> None:
    """Raise `RequestError` for a request that no engine can run.

    Args:
        request: The request.
        max_length: Most tokens of a sequence, prompt included.
        vocabulary: Number of tokens that the model knows.
        decodes: True if the engine has a tokenizer, which stop strings need.
        reads_images: True if the engine has a vision-language model.
    """
    tokens, sampling = request.tokens, request.sampling
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(f"request {request.id!r}: its tokens are not a one-dimensional array of integers")
    prompt = len(tokens)
    if prompt < 1 or not isinstance(sampling.max_tokens, int) or sampling.max_tokens < 1:
        raise RequestError(f"request {request.id!r} has {prompt} prompt tokens and asks for {sampling.max_tokens}")
    if prompt + sampling.max_tokens > max_length:
        raise RequestError(
            f"request {request.id!r} has {prompt} prompt tokens and asks for up to {sampling.max_tokens} more, "
            f"{prompt + sampling.max_tokens} in all; the engine holds {max_length} a sequence"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise RequestError(f"request {request.id!r} has tokens outside the vocabulary of {vocabulary}")
    if request.attachments and not reads_images:
        raise RequestError(f"request {request.id!r} has attachments; the engine reads text only")
    try:
        require_places(f"request {request.id!r}", prompt, request.attachments)
    except ValueError as error:
        raise RequestError(str(error)) from error
    if sampling.stop and not decodes:
        raise RequestError(f"request {request.id!r} has stop strings, but the engine was given no tokenizer")
    for name in _invalid_settings(sampling):
        raise RequestError(f"request {request.id!r}: {name} {getattr(sampling, name)!r} is not possible")


def check_sampling_supported(
    sampling: Sampling,
    engine: str,
    min_temperature: float = 0.0,
    max_temperature: float = math.inf,
    *,
    penalties: Collection[str] = (),
    sampled: int = 0,
) -> None:
    """Raise `UnsupportedError` for sampling that an engine without truncated sampling would do differently from what was asked.

    Args:
        sampling: Parameters of a request.
        engine: Name of the engine, for the error.
        min_temperature: Lowest temperature above 0 that the engine supports.
        max_temperature: Highest temperature that it supports.
        penalties: The penalties that it has, from `PENALTIES`.
        sampled: Number of tokens of the prompt that another engine has sampled. Penalties of the completion must count them,
            and the engine would not.
    """
    if sampling.truncated:
        raise UnsupportedError(f"{engine} samples from the whole vocabulary only: no top_p, top_k or min_p")
    if sampling.num_beams > 1:
        raise UnsupportedError(f"{engine} has no beam search (num_beams): engines of kind native have")
    for name, neutral in PENALTIES.items():
        if getattr(sampling, name) != neutral and name not in penalties:
            raise UnsupportedError(f"{engine} has no {name}: engines of kind native have")
    if sampling.counts_output and sampled:
        raise UnsupportedError(
            f"{engine} cannot continue what another engine has sampled with presence_penalty or frequency_penalty: it would "
            "not count those tokens"
        )
    if 0 < sampling.temperature < min_temperature:
        raise UnsupportedError(
            f"{engine} supports no temperature between 0 and {min_temperature:g}; asked for {sampling.temperature:g}"
        )
    if sampling.temperature > max_temperature:
        raise UnsupportedError(
            f"{engine} supports no temperature above {max_temperature:g}; asked for {sampling.temperature:g}"
        )


def _invalid_settings(sampling: Sampling) -> list[str]:
    """Return the names of the settings that no token can be sampled with."""
    try:
        " ".join(sampling.stop).encode()
        text = True
    except (TypeError, UnicodeEncodeError):
        text = False
    valid = {
        "temperature": _is_number(sampling.temperature)
        and (sampling.temperature == 0 or MIN_TEMPERATURE <= sampling.temperature < math.inf),
        "top_p": _is_number(sampling.top_p) and 0 < sampling.top_p <= 1,
        "top_k": isinstance(sampling.top_k, int) and 0 <= sampling.top_k < 1 << 63,
        "min_p": _is_number(sampling.min_p) and 0 <= sampling.min_p <= 1,
        "seed": isinstance(sampling.seed, int),
        "repetition_penalty": _is_number(sampling.repetition_penalty) and 0 < sampling.repetition_penalty < math.inf,
        "presence_penalty": _is_number(sampling.presence_penalty) and -2 <= sampling.presence_penalty <= 2,
        "frequency_penalty": _is_number(sampling.frequency_penalty) and -2 <= sampling.frequency_penalty <= 2,
        "num_beams": isinstance(sampling.num_beams, int) and sampling.num_beams >= 1,
        "stop": text,
    }
    return [name for name, good in valid.items() if not good]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)

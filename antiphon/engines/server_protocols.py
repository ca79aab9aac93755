"""What servers differ in: how they are asked for tokens and say them, and how they are given weights.

Each is called by the flavour that `engine.options` names. None of them keeps anything but where the server is.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from antiphon.core.errors import UnsupportedError
from antiphon.core.rng import derive
from antiphon.core.types import GenerateRequest

Call = Callable[..., Awaitable[Any]]  # of a method, a path and a body; returns what the server answers

# Else a server takes what the model's generation_config.json says.
UNCHANGED = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class Piece(NamedTuple):
    """Of a completion, as it comes."""

    tokens: list[int]
    logprobs: list[float]
    finish: str | None  # stop, length, or what ended it otherwise


class OpenAI:
    """OpenAI's completions, with vLLM's `return_token_ids`. It keeps the weights it has."""

    path = "/v1/completions"

    def __init__(self, url: str) -> None:
        self._url = url

    def body(self, model: str, request: GenerateRequest, sampled: list[int], epoch: str) -> dict[str, Any]:
        """What asks for the rest of a request. A prefix cache may have what was computed in the same epoch."""
        sampling, tokens = request.sampling, [*request.tokens.tolist(), *sampled]
        return {
            "model": model,
            "prompt": tokens,
            "max_tokens": sampling.max_tokens - len(sampled),
            "temperature": sampling.temperature,
            # Draws are counted from here, not from the prompt: with the seed alone those that were made would be repeated.
            "seed": derive(sampling.seed, len(tokens)),
            "stop_token_ids": list(sampling.stop_tokens),
            "stream": True,
            "logprobs": 0,  # of the sampled token, and no others
            "return_token_ids": True,
            "cache_salt": epoch,
            **UNCHANGED,
        }

    def read(self, told: dict[str, Any], seen: int) -> Piece | None:
        """What is new in a piece of a stream, of which so many tokens were `seen`; None if nothing is. `UnsupportedError` if
        not every token comes with its id. Log-probs that do not come are NaN."""
        if not told["choices"]:
            return None
        choice = told["choices"][0]
        tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if tokens is None:
            raise UnsupportedError(
                f"{self._url} does not tell the id of every token, and nothing is tokenised again here: it must know "
                "`return_token_ids`, as vLLM does"
            )
        if logprobs is None or len(tokens) != len(logprobs) or None in logprobs:
            logprobs = [math.nan] * len(tokens)
        return Piece(tokens, logprobs, choice["finish_reason"])

    def require_logprobs(self, logprobs: Sequence[float]) -> None:
        """`UnsupportedError` unless every token came with its log-prob."""
        if not all(map(math.isfinite, logprobs)):
            raise UnsupportedError(f"{self._url} does not tell the log-prob of every token")

    async def likeliest(self, call: Call, body: dict[str, Any], temperature: float) -> list[float]:
        """The log-probs of the five likeliest tokens, by what a server answers at once."""
        told = await call("POST", self.path, body | {"temperature": temperature, "logprobs": 5, "stream": False})
        if (piece := self.read(told, 0)) is not None:
            self.require_logprobs(piece.logprobs)
        return sorted(told["choices"][0]["logprobs"]["top_logprobs"][0].values())[-5:]

    async def require_reloadable(self, call: Call, model: Any) -> None:
        """`UnsupportedError` if the server does not take weights, or does not take those of a model of this configuration."""
        raise UnsupportedError(f"{self._url}: a server of flavour 'openai' cannot be given weights")

    async def give(self, call: Call, folder: str, epoch: str) -> None:
        """Have it load the checkpoint in a folder, and call that by the name of the epoch. Nothing runs there now."""
        raise NotImplementedError

    async def epoch(self, call: Call) -> str:
        """What its weights are called."""
        raise NotImplementedError


class VLLM(OpenAI):
    """vLLM in its development mode."""

    async def require_reloadable(self, call: Call, model: Any) -> None:
        """See `OpenAI.require_reloadable`."""
        try:
            info = await call("GET", "/server_info?config_format=json")
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{error}; to be given weights, vLLM must be started with VLLM_SERVER_DEV_MODE=1"
            ) from error
        odd = ["a head that is tied to the embedding"] * model.tie_word_embeddings
        odd += ["experts"] * hasattr(model, "num_experts_per_tok")
        if odd and info["vllm_config"]["device_config"]["device"] == "cpu":
            raise UnsupportedError(
                f"{self._url} runs on a CPU, where vLLM's reloading does not know how to pack {' and '.join(odd)}: use "
                "engine.kind=vllm, which does"
            )

    async def give(self, call: Call, folder: str, epoch: str) -> None:
        """See `OpenAI.give`."""
        await call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        await call("POST", "/update_weight_version", {"new_version": epoch})

    async def epoch(self, call: Call) -> str:
        """See `OpenAI.epoch`."""
        return str((await call("GET", "/weight_info"))["weight_version"])


class SGLang(OpenAI):
    """SGLang's own way of asking. Its streams tell what is new, or with each piece all there is."""

    path = "/generate"

    def body(self, model: str, request: GenerateRequest, sampled: list[int], epoch: str) -> dict[str, Any]:
        """See `OpenAI.body`. It empties its cache when it is given weights."""
        said = super().body(model, request, sampled, epoch)
        sampling = {
            "temperature": said["temperature"],
            "max_new_tokens": said["max_tokens"],
            "stop_token_ids": said["stop_token_ids"],
            "sampling_seed": said["seed"] % 2**31,
        }
        return {
            "input_ids": said["prompt"],
            "sampling_params": sampling | UNCHANGED,
            "return_logprob": True,
            "stream": True,
        }

    def read(self, told: dict[str, Any], seen: int) -> Piece | None:
        """See `OpenAI.read`."""
        about = told["meta_info"]
        pairs, ended = about.get("output_token_logprobs"), about.get("finish_reason")
        if pairs is None:
            raise UnsupportedError(f"{self._url} does not tell the log-prob of every token")
        if len(pairs) == about["completion_tokens"]:
            pairs = pairs[seen:]
        logprobs = [math.nan if logprob is None else logprob for logprob, *_ in pairs]
        return Piece([pair[1] for pair in pairs], logprobs, ended and ended["type"])

    async def likeliest(self, call: Call, body: dict[str, Any], temperature: float) -> list[float]:
        """See `OpenAI.likeliest`."""
        sampling = body["sampling_params"] | {"temperature": temperature}
        asked = body | {"sampling_params": sampling, "top_logprobs_num": 5, "stream": False}
        told = await call("POST", self.path, asked)
        if (piece := self.read(told, 0)) is not None:
            self.require_logprobs(piece.logprobs)
        return sorted(each[0] for each in told["meta_info"]["output_top_logprobs"][0])

    async def require_reloadable(self, call: Call, model: Any) -> None:
        """See `OpenAI.require_reloadable`: every one is."""
        await self.epoch(call)

    async def give(self, call: Call, folder: str, epoch: str) -> None:
        """See `OpenAI.give`."""
        await call("POST", "/update_weights_from_disk", {"model_path": folder, "weight_version": epoch})

    async def epoch(self, call: Call) -> str:
        """See `OpenAI.epoch`."""
        return str((await call("GET", "/get_model_info"))["weight_version"])


DIALECTS: dict[str, type[OpenAI]] = {"openai": OpenAI, "vllm": VLLM, "sglang": SGLang}

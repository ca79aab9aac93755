"""The protocols of servers: how tokens are requested and reported, and how weights are pushed.

`engine.options.flavour` names the protocol: a name in `SERVER_PROTOCOLS`, or `package.module:attribute` for a class of your
own, which extends one of these. A protocol keeps no state but the address of the server.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.core.registry import Registry
from antiphon.core.rng import derive
from antiphon.core.types import GenerateRequest
from antiphon.core.user_errors import name_user_errors
from antiphon.engines.request_checks import PENALTIES

Call = Callable[..., Awaitable[Any]]
"""Sends an HTTP method, a path and a body as JSON; returns the decoded answer. `UnsupportedError` if the server refuses (status
4xx), `WorkerDiedError` if it fails (5xx) or is gone."""

# Without these a server takes the values of the model's generation_config.json.
NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
TOP_LOGPROBS = 5


class StreamChunk(NamedTuple):
    """New tokens of a completion."""

    tokens: list[int]
    logprobs: list[float]
    finish: str | None  # None, stop or length; any other word means that the server is lost


class OpenAIProtocol:
    """OpenAI's completions, with vLLM's `return_token_ids`. Such a server keeps the weights it has."""

    path = "/v1/completions"
    loads_weights = False  # True if `push_weights` works, so that a run can train through such servers
    penalties = frozenset({"presence_penalty", "frequency_penalty"})  # those that the server is known to have

    def __init__(self, url: str) -> None:
        self.url = url

    def request_body(self, model: str, request: GenerateRequest, sampled: list[int], weights_id: str) -> dict[str, Any]:
        """Return the body that asks for the rest of a request.

        Args:
            model: The model's name on the server.
            request: The request.
            sampled: Tokens sampled so far.
            weights_id: Identifies the weights. It is to be the salt of the server's prefix cache, so that only weights of the
                same id reuse an entry; if the server has no salt, `push_weights` must empty the cache.
        """
        sampling, tokens = request.sampling, [*request.tokens.tolist(), *sampled]
        return {
            "model": model,
            "prompt": tokens,
            "max_tokens": sampling.max_tokens - len(sampled),
            "temperature": sampling.temperature,
            # Servers count draws from the end of the prompt: with the same seed, draws that were made would be repeated.
            "seed": derive(sampling.seed, len(tokens)),
            "stop_token_ids": list(sampling.stop_tokens),
            "stream": True,
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            "cache_salt": weights_id,
            **NEUTRAL_SAMPLING,
            **{name: getattr(sampling, name) for name in sorted(self.penalties)},
        }

    def parse_chunk(self, answer: dict[str, Any], seen: int) -> StreamChunk | None:
        """Return the new tokens in a piece of a stream; None if there are none.

        Args:
            answer: The decoded piece.
            seen: Tokens of the stream that came before.

        Returns:
            The tokens, an end token included; missing log-probs are NaN.

        Raises:
            UnsupportedError: If not every token comes with its id.
        """
        if not answer["choices"]:
            return None
        choice = answer["choices"][0]
        tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if tokens is None:
            raise UnsupportedError(
                f"{self.url} does not return the id of every token, and text is never tokenised again here: it must "
                "support `return_token_ids`, as vLLM does"
            )
        if logprobs is None or len(tokens) != len(logprobs) or None in logprobs:
            logprobs = [math.nan] * len(tokens)
        return StreamChunk(tokens, logprobs, choice["finish_reason"])

    def check_logprobs(self, logprobs: Sequence[float]) -> None:
        """Raise `UnsupportedError` unless every token came with its log-prob."""
        if not all(map(math.isfinite, logprobs)):
            raise UnsupportedError(f"{self.url} does not return the log-prob of every token")

    async def top_logprobs(self, call: Call, body: dict[str, Any], temperature: float) -> list[float]:
        """Return the five highest log-probs of the first token at a temperature; `body` is what `request_body` returned."""
        changes = {"temperature": temperature, "logprobs": TOP_LOGPROBS, "stream": False}
        answer = await call("POST", self.path, body | changes)
        if (chunk := self.parse_chunk(answer, 0)) is not None:
            self.check_logprobs(chunk.logprobs)
        return sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values())[-TOP_LOGPROBS:]

    async def check_reloadable(self, call: Call, model_config: Any) -> None:
        """Raise `UnsupportedError` if the server cannot load weights, or not those of a model with this transformers config."""
        raise UnsupportedError(f"{self.url}: a server of this flavour cannot be given weights")

    async def push_weights(self, call: Call, folder: str, weights_id: str) -> None:
        """Have the server load the checkpoint in a folder, and remember its id for `weights_id`.

        The folder has `config.json` and safetensors; it is removed when this returns, so this waits until the weights are in
        use. No request runs there meanwhile. Raise `WorkerDiedError` if the server reports that it failed: as after a refusal
        or an error of `call`, it is given up and tried again later. An error that is no `AntiphonError` ends the run.
        """
        raise NotImplementedError

    async def weights_id(self, call: Call) -> str:
        """Return the id of the weights that the server holds; by it a health check finds a server with other weights."""
        raise NotImplementedError


class VLLMProtocol(OpenAIProtocol):
    """vLLM in its development mode."""

    loads_weights = True
    penalties = frozenset(PENALTIES)

    @override
    async def check_reloadable(self, call: Call, model_config: Any) -> None:
        try:
            info = await call("GET", "/server_info?config_format=json")
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{error}; to be given weights, vLLM must be started with VLLM_SERVER_DEV_MODE=1"
            ) from error
        odd = ["a head that is tied to the embedding"] * model_config.tie_word_embeddings
        odd += ["experts"] * hasattr(model_config, "num_experts_per_tok")
        if odd and info["vllm_config"]["device_config"]["device"] == "cpu":
            raise UnsupportedError(
                f"{self.url} runs on a CPU, where vLLM's reloading does not pack {' and '.join(odd)}: use "
                "engine.kind=vllm, which does"
            )

    @override
    async def push_weights(self, call: Call, folder: str, weights_id: str) -> None:
        await call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        await call("POST", "/update_weight_version", {"new_version": weights_id})

    @override
    async def weights_id(self, call: Call) -> str:
        return str((await call("GET", "/weight_info"))["weight_version"])


class SGLangProtocol(OpenAIProtocol):
    """SGLang's own protocol. Each piece of its streams has the new tokens, or all of them so far."""

    path = "/generate"
    loads_weights = True
    penalties = frozenset()  # no test has shown which tokens it counts

    @override
    def request_body(self, model: str, request: GenerateRequest, sampled: list[int], weights_id: str) -> dict[str, Any]:
        # Without a cache salt: SGLang empties its cache as it loads weights.
        openai = super().request_body(model, request, sampled, weights_id)
        sampling = {
            "temperature": openai["temperature"],
            "max_new_tokens": openai["max_tokens"],
            "stop_token_ids": openai["stop_token_ids"],
            "sampling_seed": openai["seed"] % 2**31,
        }
        return {
            "input_ids": openai["prompt"],
            "sampling_params": sampling | NEUTRAL_SAMPLING,
            "return_logprob": True,
            "stream": True,
        }

    @override
    def parse_chunk(self, answer: dict[str, Any], seen: int) -> StreamChunk | None:
        info = answer["meta_info"]
        pairs, ended = info.get("output_token_logprobs"), info.get("finish_reason")
        if pairs is None:
            raise UnsupportedError(f"{self.url} does not return the log-prob of every token")
        if len(pairs) == info["completion_tokens"]:
            pairs = pairs[seen:]
        logprobs = [math.nan if logprob is None else logprob for logprob, *_ in pairs]
        return StreamChunk([pair[1] for pair in pairs], logprobs, ended and ended["type"])

    @override
    async def top_logprobs(self, call: Call, body: dict[str, Any], temperature: float) -> list[float]:
        sampling = body["sampling_params"] | {"temperature": temperature}
        changes = {"sampling_params": sampling, "top_logprobs_num": TOP_LOGPROBS, "stream": False}
        answer = await call("POST", self.path, body | changes)
        if (chunk := self.parse_chunk(answer, 0)) is not None:
            self.check_logprobs(chunk.logprobs)
        return sorted(each[0] for each in answer["meta_info"]["output_top_logprobs"][0])

    @override
    async def check_reloadable(self, call: Call, model_config: Any) -> None:
        await self.weights_id(call)  # any SGLang server that answers can load weights

    @override
    async def push_weights(self, call: Call, folder: str, weights_id: str) -> None:
        await call("POST", "/update_weights_from_disk", {"model_path": folder, "weight_version": weights_id})

    @override
    async def weights_id(self, call: Call) -> str:
        return str((await call("GET", "/get_model_info"))["weight_version"])


_METHODS = [
    "request_body",
    "parse_chunk",
    "check_logprobs",
    "top_logprobs",
    "check_reloadable",
    "push_weights",
    "weights_id",
]

SERVER_PROTOCOLS = Registry(
    "flavour of servers",
    {
        "openai": "antiphon.engines.server_protocols:OpenAIProtocol",
        "vllm": "antiphon.engines.server_protocols:VLLMProtocol",
        "sglang": "antiphon.engines.server_protocols:SGLangProtocol",
    },
    group="antiphon.server_protocols",
)


def open_protocol(flavour: str, url: str) -> OpenAIProtocol:
    """Return the protocol of a flavour for the server at a URL. Errors of a user's class name the setting and the line."""
    key = "engine.options.flavour"
    found = resolve_protocol(flavour, key)
    if flavour in SERVER_PROTOCOLS.shipped:
        return found(url)
    protocol: OpenAIProtocol = name_user_errors(found, key, flavour)(url)
    for name in _METHODS:
        setattr(protocol, name, name_user_errors(getattr(protocol, name), key, f"{flavour}.{name}"))
    return protocol


def resolve_protocol(flavour: str, key: str) -> type[OpenAIProtocol]:
    """Return the class of a flavour; `ConfigError` under `key` if it is none that extends `OpenAIProtocol`."""
    found: Any = SERVER_PROTOCOLS.resolve(flavour, key)
    if not (isinstance(found, type) and issubclass(found, OpenAIProtocol)):
        raise ConfigError(f"{flavour!r} must be a class that extends {__name__}.OpenAIProtocol", key=key, value=flavour)
    return found

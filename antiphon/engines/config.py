"""Configuration of generating tokens. Importing it imports no torch."""

import math
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from antiphon.core.config import Config, options_by_kind, parse, unit
from antiphon.core.errors import ValidatorError

NATIVE_DTYPES = ("float32", "bfloat16", "float16", "float64")
SERVER_KINDS = frozenset({"server"})  # kinds of engines that run in a server started by others
PREALLOCATING_KINDS = frozenset({"vllm"})  # kinds that allocate their share of a device when they start
SLEEP_OPTIONS = {"vllm": {"enable_sleep_mode": True}}  # options with which a kind frees GPU memory while it sleeps
PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
)  # options that divide an engine over several devices


class ServerOptions(Config):
    """`engine.options` of servers."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Address of each server, such as http://127.0.0.1:8000."""
    flavour: str = "vllm"
    """Protocol of the servers: `vllm` (in its development mode) and `sglang` can be given weights; `openai` is any other, with
    the weights it has. `package.module:attribute` is a class of your own that extends one of these."""
    model: str = ""
    """Name of the model on the server; by default the first that the server lists."""
    key: str = ""
    """The environment variable that holds the API key."""
    directory: str = ""
    """Directory in which weights are passed to the servers, under the same path for both sides; by default in this machine's
    shared memory."""


class EngineKind(Config):
    """Engines of one kind with the same settings."""

    kind: str = "native"
    """`native`, `vllm`, `server` (run by others, see `options`), a name that an installed package registers, or
    package.module:attribute."""
    python: str = ""
    """The interpreter that runs the engines, such as envs/vllm/bin/python: for an engine whose packages conflict with
    Antiphon's. Empty: the run's own interpreter."""
    replicas: Annotated[int, unit("engines")] = Field(1, gt=0)
    """Engines of this kind."""
    slots: Annotated[int, unit("sequences")] = Field(64, gt=0)
    """Sequences that one engine decodes at once."""
    max_length: Annotated[int, unit("tokens")] = Field(0, ge=0)
    """Longest prompt and completion together; 0 takes the model's own limit."""
    prefill_tokens: Annotated[int, unit("tokens")] = Field(512, gt=0)
    """Maximum number of prompt tokens that one engine step reads, so that prefill does not delay decoding for long."""
    dtype: str = "float32"
    """Type of the engine's weights and computation, such as float32 or bfloat16. `auto` takes the faster of these two on the
    device of a native engine, which is measured when a run starts; vLLM takes the checkpoint's."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`."""
    threads: Annotated[int, unit("threads")] = Field(1, gt=0)
    """CPU threads of one engine process."""
    draft_tokens: Annotated[int, unit("tokens")] = Field(0, ge=0)
    """Maximum number of tokens that one step of the native engine guesses for a sequence, from earlier text of the sequence and
    of other completions of its prompt. A step keeps those that sampling confirms, so the distribution of samples does not
    change. It pays where few sequences run and texts repeat. 0 guesses none."""
    draft_rows: Annotated[int, unit("tokens")] = Field(32, gt=0)
    """Maximum number of tokens that a step with guesses computes: with more running sequences, none is guessed for."""
    routed_experts: bool = False
    """Record which experts computed each token, and have the learner take the same (routing replay): for models with a
    mixture of experts, in the native engine and in vLLM."""
    options: Annotated[dict[str, Any], options_by_kind({"server": ServerOptions})] = {}
    """Options of this kind of engine: for `vllm`, fields of its EngineArgs; for `server`: urls, flavour, model, key,
    directory. For every kind, tensor_parallel_size times pipeline_parallel_size is the number of devices of one engine."""

    @property
    def server_options(self) -> ServerOptions | None:
        """Options of servers, if the engines run in servers; else None."""
        return parse(ServerOptions, self.options) if self.kind in SERVER_KINDS else None

    @property
    def with_sleep_mode(self) -> Self:
        """A copy of this configuration with the options that let the engine free its GPU while it sleeps."""
        return self.model_copy(update={"options": {**SLEEP_OPTIONS.get(self.kind, {}), **self.options}})

    @property
    def devices_per_engine(self) -> int:
        """Number of devices that each engine runs on."""
        return math.prod(self.options.get(name, 1) for name in PARALLEL_SIZES)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for name in PARALLEL_SIZES:
            if type(count := self.options.get(name, 1)) is not int or count < 1:
                raise ValidatorError([(f"options.{name}", f"{count!r} is no number of devices")])
        servers = self.server_options
        if servers is not None:
            if len(set(servers.urls)) < len(servers.urls):
                raise ValidatorError([("options.urls", "each server is one engine, and one is there twice")])
            if self.replicas != len(servers.urls):
                raise ValidatorError(
                    [("replicas", f"there are {len(servers.urls)} servers (options.urls), not {self.replicas}")]
                )
            if self.routed_experts:
                raise ValidatorError(
                    [("routed_experts", "streams of servers have no experts: use engines of kind native or vllm")]
                )
        return self


class EngineConfig(EngineKind):
    """An engine pool."""

    also: tuple[EngineKind, ...] = ()
    """More engines in the same pool, of other kinds or with other settings, after these."""
    minimum: Annotated[int, unit("engines")] = Field(0, ge=0)
    """Number of engines that must be ready before the run begins. The others join when their devices or servers are there, and
    may leave and come back. 0: all."""

    @property
    def engine_kinds(self) -> list[EngineKind]:
        """Kind of each engine of the pool, in order."""
        return [kind for kind in (self, *self.also) for _ in range(kind.replicas)]

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.minimum > len(self.engine_kinds):
            raise ValidatorError(
                [("minimum", f"{self.minimum} is more than the {len(self.engine_kinds)} engines of the pool")]
            )
        for number, other in enumerate(self.also):
            if other.routed_experts != self.routed_experts:
                raise ValidatorError([(f"also.{number}.routed_experts", "all engines of a pool record them, or none")])
        return self

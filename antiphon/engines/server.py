"""An engine on a running server: vLLM, SGLang, or another that returns token ids (`engines.server_protocols`).

The engine lives in the controller: requests wait here, and each running request is one HTTP stream. Text is never
tokenised again: a server that does not return every token's id and log-prob is refused before it is used.

An HTTP stream never outlives a weight update, so a token's version is that of the weights in use when it comes. Each update
gives the weights a new id, and a server that supports `cache_salt` reuses only prefixes that weights of the same id computed.
"""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
from typing_extensions import override

from antiphon.core.config import read_secret
from antiphon.core.errors import AntiphonError, ConfigError, RequestError, UnsupportedError, WorkerDiedError
from antiphon.core.types import MIXED_CACHE, FinishReason, GenerateRequest, OnUpdate, Sampling, Streams, WeightsUpdate
from antiphon.engines.base import InferenceEngine
from antiphon.engines.config import EngineKind, ServerOptions
from antiphon.engines.deltas import Delta
from antiphon.engines.generation import Generation
from antiphon.engines.request_checks import MIN_SERVED_TEMPERATURE, check_sampling_supported, validate_request
from antiphon.engines.request_queue import Continuation, Progress, RequestQueue
from antiphon.engines.server_connection import INVALID_STATUSES, ServerConnection
from antiphon.engines.server_protocols import StreamChunk, open_protocol
from antiphon.engines.stops import FINISH_REASONS, StopRule, append_to_stop, read_decoder
from antiphon.weights.base import CHANNELS
from antiphon.weights.shared_directory import shared_directory


@dataclass(slots=True, eq=False)
class _Running:
    """A request that the server has, or gets again after a load."""

    generation: Generation
    rule: StopRule | None
    tokens: list[int] = field(default_factory=list)  # sampled so far
    task: asyncio.Task[None] | None = None  # reads its stream


class ServerEngine(InferenceEngine):
    """An engine on the server `options.urls[number]`, which must hold the architecture of the model in a directory.

    If it can load weights, it is given those of that model first, and each new version as a checkpoint in a directory that
    both ends see. The engine does not end the server. Once its connection broke, or someone else changed the weights, the
    engine is dead, and another `ServerEngine` may begin anew with the server.
    """

    colocated = False
    device = ""

    def __init__(self, options: ServerOptions, number: int, model: Path, config: EngineKind, channel: str) -> None:
        """Create the engine; `ready` connects it.

        Args:
            options: Addresses and protocol of the servers.
            number: Which of `options.urls` it is.
            model: Model directory.
            config: Slots and length.
            channel: Name of the channel that new weights come by.
        """
        self.version = 0
        self.capacity = config.slots
        self.max_length = config.max_length
        self.dead = False
        self.url = options.urls[number].rstrip("/").removesuffix("/v1")
        from transformers import AutoConfig  # imports torch, for which runs without servers need not wait

        self._model_config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
        self.vocabulary: int = self._model_config.vocab_size
        self._options = options
        self._model = model
        self._name = options.model
        self._channel = channel
        self._protocol = open_protocol(options.flavour, self.url)
        self._decoder = read_decoder(str(model))
        key = read_secret(options.key) if options.key else ""
        self._connection = ServerConnection(self.url, key, self._on_death)
        self._requests: dict[str, Generation] = {}  # queued and running
        self._queue: RequestQueue[_Running] = RequestQueue(
            config.slots, start=self._start_stream, stop=_cancel, emit=self._deliver
        )
        self._idle = asyncio.Event()  # set when nothing runs
        self._loading = asyncio.Lock()
        self._weights_id = uuid4().hex  # differs from that of any other run

    async def ready(self) -> None:
        """Check the server, and give it the model's weights if it can load them.

        Raises:
            WorkerDiedError: If the server does not answer.
            ConfigError: If it does not serve the model, or does not say how long a sequence may be.
            UnsupportedError: If it lacks something that training needs.
        """
        served = (await self._call("GET", "/v1/models"))["data"]
        named = [each for each in served if self._name in ("", each["id"])]
        if not named:
            names = ", ".join(each["id"] for each in served)
            raise ConfigError(f"engine.options.model: {self.url} does not serve {self._name!r}, only {names}")
        self._name = named[0]["id"]
        limits = [limit for limit in (self.max_length, named[0].get("max_model_len")) if limit]
        if not limits:
            raise ConfigError(f"engine.max_length: {self.url} does not say how long a sequence may be: set it")
        self.max_length = min(limits)
        await self._check_logprobs()
        if self._protocol.loads_weights:
            await self._protocol.check_reloadable(self._call, self._model_config)
            await self._push_weights(0, self._copy_model, OnUpdate.DRAIN)

    async def _check_logprobs(self) -> None:
        """Raise `UnsupportedError` if tokens come without ids, or without the log-probs they were sampled with."""
        request = GenerateRequest(id="probe", tokens=np.zeros(1, np.int32), sampling=Sampling(max_tokens=1))
        body = self._protocol.request_body(self._name, request, [], self._weights_id)
        spread = []  # between the highest log-probs, at temperatures 1 and 2
        for temperature in (1.0, 2.0):
            top = await self._protocol.top_logprobs(self._call, body, temperature)
            spread.append(max(top) - min(top))
        if spread[1] > 0.75 * spread[0]:  # half of it, if log-probs are taken after the temperature
            raise UnsupportedError(
                f"{self.url} returns log-probs without the temperature: it must return those that tokens are sampled with "
                "(vLLM: --logprobs-mode processed_logprobs)"
            )
        completion = await self.start(request).result()  # as all others will be
        self._protocol.check_logprobs(completion.logprobs.tolist())

    # --- requests ------------------------------------------------------------------------------------------------------

    @override
    def start(self, request: GenerateRequest) -> Generation:
        generation = Generation(self, request)
        try:
            if self._connection.death is not None:
                raise self._connection.death
            if request.id in self._queue:
                raise RequestError(f"request {request.id!r} is already running")
            validate_request(request, self.max_length, self.vocabulary, decodes=self._decoder is not None)
            check_sampling_supported(
                request.sampling,
                f"the server {self.url}",
                MIN_SERVED_TEMPERATURE,
                penalties=self._protocol.penalties,
                sampled=request.sampled,
            )
        except AntiphonError as error:
            generation.fail(error)
            return generation
        self._requests[request.id] = generation
        self._queue.add(request)
        self._admit()
        return generation

    def abort(self, request: str) -> None:
        """End a request early; the server notices that nobody reads its stream."""
        if self._queue.abort(request):
            self._admit()

    def forget(self, request: str) -> None:
        """Note that a request has ended."""
        self._requests.pop(request, None)

    @override
    def pause(self) -> None:
        self._queue.hold("paused")

    @override
    def resume(self) -> None:
        self._queue.release("paused")
        self._admit()

    def _admit(self) -> None:
        """Send the requests that there is room for, the most urgent first."""
        self._queue.admit()
        if not self._queue.running:
            self._idle.set()

    def _deliver(self, delta: Delta) -> None:
        self._requests[delta.request].receive(delta)

    def _start_stream(self, request: GenerateRequest) -> _Running:
        running = _Running(self._requests[request.id], StopRule.of(request))
        self._send(running)
        return running

    def _send(self, running: _Running) -> None:
        running.task = asyncio.create_task(self._read_stream(running), name=f"stream {running.generation.request.id}")
        running.task.add_done_callback(partial(self._on_stream_end, running))

    def _on_stream_end(self, running: _Running, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, httpx.HTTPError):
            self._connection.die(f"{type(error).__name__} {error}")
        elif error is not None and self._is_running(running):
            self._finish(running)
            running.generation.fail(error)
        self._admit()

    def _is_running(self, running: _Running) -> bool:
        return self._queue.running.get(running.generation.request.id) is running

    def _finish(self, running: _Running) -> None:
        if self._is_running(running):
            self._queue.finish(running.generation.request.id)
            self.forget(running.generation.request.id)

    async def _read_stream(self, running: _Running) -> None:
        """Send a request, with the tokens there are, and read its stream to the end."""
        begun = len(running.tokens)
        request = running.generation.request
        body = self._protocol.request_body(self._name, request, running.tokens, self._weights_id)
        async with self._connection.stream_lines(self._protocol.path, body) as lines:
            async for line in lines:
                text = line.removeprefix("data:").strip()
                if text.startswith("{"):
                    answer = json.loads(text)
                    if answer.get("error"):
                        raise _stream_error(answer["error"])
                    chunk = self._protocol.parse_chunk(answer, len(running.tokens) - begun)
                    if chunk is not None and self._accept(running, chunk):
                        return
        raise httpx.RemoteProtocolError("a stream ended before its request")

    def _accept(self, running: _Running, chunk: StreamChunk) -> bool:
        """Pass on the tokens of a chunk; return True if they were the last."""
        if chunk.finish not in FINISH_REASONS:
            raise httpx.RemoteProtocolError(f"a request was ended by {chunk.finish!r}")
        # Stop strings are found here: after a load, the server would not know how the text before ended.
        count, stopped = append_to_stop(running.tokens, chunk.tokens, running.rule, self._decoder)
        tokens, logprobs = chunk.tokens[:count], chunk.logprobs
        finish = FinishReason.STOP if stopped else FINISH_REASONS[chunk.finish]
        if finish is not None:
            self._finish(running)
        if tokens or finish is not None:
            running.generation.receive(
                Delta(
                    request=running.generation.request.id,
                    tokens=np.array(tokens, np.int32),
                    logprobs=np.array(logprobs[: len(tokens)], np.float32),
                    versions=np.full(len(tokens), self.version, np.int32),
                    streams=Streams({MIXED_CACHE: np.zeros(len(tokens), np.bool_)}),
                    finish=finish,
                )
            )
        return finish is not None

    # --- weights -------------------------------------------------------------------------------------------------------

    @override
    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Have the server load published weights.

        Raises:
            WeightsError: If they are not what was sent, or not the model's; the server keeps its weights then.
            UnsupportedError: If the server cannot load weights, or for `KEEP`: a stream across a load does not say which
                weights each token came from.
        """
        if not self._protocol.loads_weights:
            raise UnsupportedError(f"{self.url}: a server of flavour {self._options.flavour!r} cannot be given weights")
        if mode is OnUpdate.KEEP:
            raise UnsupportedError(f"{self.url}: a server cannot load weights with on_update 'keep'")
        await self._push_weights(update.version, partial(self._write_update, update), mode)

    async def _push_weights(self, version: int, write: Callable[[Path], None], mode: OnUpdate) -> None:
        """Have the server load the checkpoint that `write` writes to a directory."""
        async with self._loading:
            try:
                directory = self._options.directory
                with shared_directory("checkpoint", directory, key="engine.options.directory") as folder:
                    shutil.copy(self._model / "config.json", folder)
                    await asyncio.to_thread(write, folder)
                    self._queue.hold("load")
                    await self._exchange_weights(folder, mode)
                self.version = version
                for running in self._queue.running.values():
                    self._send(running)
            finally:
                self._queue.release("load")
                self._admit()

    def _copy_model(self, folder: Path) -> None:
        for path in self._model.glob("*.safetensors*"):
            shutil.copy(path, folder)

    def _write_update(self, update: WeightsUpdate, folder: Path) -> None:
        """Write an update as a checkpoint. It is checked first: vLLM loads what it knows and ignores what is missing."""
        from safetensors.torch import save_file  # torch, which the controller does without if it can

        from antiphon.weights.checkpoint_layout import CheckpointLayout

        tensors = dict(CHANNELS.resolve(self._channel).receive(update))
        layout = CheckpointLayout(self._model, self._model_config.tie_word_embeddings)
        layout.validate(tensors, update.version)
        save_file(dict(layout.convert(tensors)), folder / "model.safetensors")

    async def _exchange_weights(self, folder: Path, mode: OnUpdate) -> None:
        """Load the checkpoint in a folder. A failure here leaves unknown weights: the server is given up."""
        try:
            await self._interrupt_streams(mode)
            weights_id = uuid4().hex
            await self._protocol.push_weights(self._call, str(folder), weights_id)
        except BaseException as error:
            death = self._connection.die(f"it was to load weights, and did not: {error}")
            if isinstance(error, UnsupportedError):
                raise death from error
            raise
        self._weights_id = weights_id

    async def _interrupt_streams(self, mode: OnUpdate) -> None:
        """End all streams: at once, or with `DRAIN` as their requests end."""
        if mode is OnUpdate.DRAIN:
            while self._queue.running:
                self._idle.clear()
                await self._idle.wait()
            return
        tasks = [running.task for running in self._queue.running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for running, continuation in self._queue.continue_running(mode, _progress):
            if continuation is Continuation.RESTART:
                running.tokens.clear()

    # --- the server ----------------------------------------------------------------------------------------------------

    @override
    async def sleep(self) -> None:
        raise UnsupportedError(f"{self.url}: a server does not leave its device to what trains (placement.engine)")

    @override
    async def wake(self) -> None:
        """Do nothing: a server never sleeps."""

    @override
    async def health(self) -> None:
        """Return once the server has answered; raise `WorkerDiedError` also if it holds other weights than it was given."""
        await self._call("GET", "/health")
        if self._protocol.loads_weights and not self._loading.locked():
            expected, found = self._weights_id, await self._protocol.weights_id(self._call)
            if found != expected == self._weights_id and not self._loading.locked():
                raise self._connection.die("it was started anew, or someone else has given it weights")

    @override
    def kill(self) -> None:
        """Give the server up, without ending it."""
        self._connection.die("it was given up")

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        return await self._connection.call(method, path, body)

    def _on_death(self, death: WorkerDiedError) -> None:
        self.dead = True
        for running in self._queue.running.values():
            _cancel(running)
        for generation in self._requests.values():
            generation.fail(death)
        self._requests.clear()
        self._queue.clear()
        self._idle.set()


def _cancel(running: _Running) -> None:
    if running.task is not None:
        running.task.cancel()


def _progress(running: _Running) -> Progress:
    sampling = running.generation.request.sampling
    # A stream never outlives a load. Tokens of a prompt do not count as output, which some penalties are of.
    return Progress(sampled=bool(running.tokens), cached=False, resumable=not sampling.counts_output)


def _stream_error(error: Any) -> Exception:
    """Return the exception for an error in a stream: the request is invalid, or the server is lost."""
    if isinstance(error, dict) and error.get("code") in INVALID_STATUSES:
        return RequestError(f"a server refuses a request: {str(error)[:300]}")
    return httpx.RemoteProtocolError(str(error))

"""An engine in a running server: vLLM, SGLang, or another that returns token ids (`engines.server_protocols`).

It lives in the controller: requests wait here, and each that runs is one stream. Nothing is tokenised again: a server that
does not tell every token's id and log-prob is refused before it is used. Each load opens an epoch, and a server that
knows `cache_salt` finds in its prefix cache only what the weights of the epoch computed. A stream never outlives a load, so
that a token's version is that of the weights there are when it comes.
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

from antiphon.core.config import read_secret
from antiphon.core.errors import AntiphonError, ConfigError, RequestError, UnsupportedError, WorkerDied
from antiphon.core.types import MIXED_CACHE, FinishReason, GenerateRequest, OnUpdate, Sampling, Streams, WeightsUpdate
from antiphon.engines.base import FINISHED, Delta, check_sampling_supported, validate_request
from antiphon.engines.config import LOADABLE_FLAVOURS, EngineKind, ServerOptions
from antiphon.engines.generation import Generation
from antiphon.engines.request_queue import Continuation, Progress, RequestQueue
from antiphon.engines.server_protocols import DIALECTS, Piece
from antiphon.engines.stops import StopRule, read_decoder
from antiphon.weights.base import CHANNELS
from antiphon.weights.shared_directory import shared_directory

CONNECT_SECONDS = 10.0
INVALID = frozenset({400, 413, 422})  # statuses with which a server refuses one request


@dataclass(slots=True, eq=False)
class _Running:
    """A request that the server has, or gets again after a load."""

    generation: Generation
    rule: StopRule | None
    tokens: list[int] = field(default_factory=list)  # sampled so far
    task: asyncio.Task[None] | None = None  # reads its stream


class ServerEngine:
    """An `InferenceEngine` on the server `options.urls[number]`, which holds the architecture of the model in a directory.

    With a flavour that can load it is given that model's weights first, whatever it was started with, and each new version as
    a checkpoint in a directory that both ends see. It ends by no doing of ours: once its connection broke, or someone else
    changed its weights, it is dead here, and another `ServerEngine` may begin anew with it.
    """

    colocated = False
    device = ""

    def __init__(self, options: ServerOptions, number: int, model: Path, config: EngineKind, channel: str) -> None:
        self.version = 0
        self.capacity = config.slots
        self.max_length = config.max_length
        self.dead = False
        self.url = options.urls[number].rstrip("/").removesuffix("/v1")
        from transformers import AutoConfig  # and with it torch, which no run without servers is to wait for

        self._shape = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
        self.vocabulary: int = self._shape.vocab_size
        self._options = options
        self._model = model
        self._name = options.model
        self._channel = channel
        self._loads = options.flavour in LOADABLE_FLAVOURS
        self._dialect = DIALECTS[options.flavour](self.url)
        self._decoder = read_decoder(str(model))
        headers = {"Authorization": f"Bearer {read_secret(options.key)}"} if options.key else {}
        # A connection that is kept may be closed by the server at any time, which would look like its death.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, limits=limits)
        self._requests: dict[str, Generation] = {}  # queued and running
        self._queue: RequestQueue[_Running] = RequestQueue(
            config.slots, start=self._start_stream, stop=_cancel, emit=self._deliver
        )
        self._idle = asyncio.Event()
        self._loading = asyncio.Lock()
        self._epoch = uuid4().hex  # no other run's
        self._death: WorkerDied | None = None

    async def ready(self) -> None:
        """Return once the server has shown that it can be relied on. `WorkerDied` if it does not answer, `UnsupportedError` if
        it cannot do what it has to."""
        served = (await self._call("GET", "/v1/models"))["data"]
        named = [each for each in served if self._name in ("", each["id"])]
        if not named:
            names = ", ".join(each["id"] for each in served)
            raise ConfigError(f"engine.options.model: {self.url} does not serve {self._name!r}, only {names}")
        self._name = named[0]["id"]
        limits = [limit for limit in (self.max_length, named[0].get("max_model_len")) if limit]
        if not limits:
            raise ConfigError(f"engine.max_length: {self.url} does not tell how long a sequence may be: give it")
        self.max_length = min(limits)
        await self._probe()
        if self._loads:
            await self._dialect.require_reloadable(self._call, self._shape)
            await self._give(0, self._copy_model, OnUpdate.DRAIN)

    async def _probe(self) -> None:
        """`UnsupportedError` if tokens do not come with their ids, or with the log-probs that they were drawn with."""
        request = GenerateRequest(id="probe", tokens=np.zeros(1, np.int32), sampling=Sampling(max_tokens=1))
        body = self._dialect.body(self._name, request, [], self._epoch)
        spread = []  # between the log-probs of the most likely tokens
        for temperature in (1.0, 2.0):
            most = await self._dialect.likeliest(self._call, body, temperature)
            spread.append(most[-1] - most[0])
        if spread[1] > 0.75 * spread[0]:  # half of it, if the temperature is in them
            raise UnsupportedError(
                f"{self.url} tells log-probs that no temperature is in: it must tell those that tokens are drawn with (of "
                "vLLM: --logprobs-mode processed_logprobs)"
            )
        told = await self.start(request).result()  # as all others will be
        self._dialect.require_logprobs(told.logprobs.tolist())

    # --- requests ------------------------------------------------------------------------------------------------------

    def start(self, request: GenerateRequest) -> Generation:
        """See `InferenceEngine.start`."""
        generation = Generation(self, request)
        try:
            if self._death is not None:
                raise self._death
            if request.id in self._queue:
                raise RequestError(f"request {request.id!r} is already running")
            validate_request(request, self.max_length, self.vocabulary, decodes=self._decoder is not None)
            check_sampling_supported(request.sampling)
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
        """It has ended."""
        self._requests.pop(request, None)

    def _admit(self) -> None:
        """Send the requests that there is room for, most urgent first."""
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
        running.task = asyncio.create_task(self._stream(running), name=f"stream {running.generation.request.id}")
        running.task.add_done_callback(partial(self._ended, running))

    def _ended(self, running: _Running, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, httpx.HTTPError):
            self._die(f"{type(error).__name__} {error}")
        elif error is not None and self._queue.running.get(running.generation.request.id) is running:
            self._leave(running)
            running.generation.fail(error)
        self._admit()

    def _leave(self, running: _Running) -> None:
        name = running.generation.request.id
        if self._queue.running.get(name) is running:
            self._queue.finish(name)
            self.forget(name)

    async def _stream(self, running: _Running) -> None:
        """Send a request, with the tokens there are, and take what comes until it ends."""
        begun = len(running.tokens)
        body = self._dialect.body(self._name, running.generation.request, running.tokens, self._epoch)
        async with self._client.stream("POST", self._dialect.path, json=body) as response:
            if not response.is_success:
                await response.aread()
                if response.status_code in INVALID:
                    raise RequestError(f"{self.url} refuses a request: {response.text[:300]}")
                self._refuse(response)
            async for line in response.aiter_lines():
                text = line.removeprefix("data:").strip()
                if text.startswith("{"):
                    told = json.loads(text)
                    if "error" in told:
                        raise _stream_error(told["error"])
                    piece = self._dialect.read(told, len(running.tokens) - begun)
                    if piece is not None and self._accept(running, piece):
                        return
        raise httpx.RemoteProtocolError("a stream ended before its request")

    def _accept(self, running: _Running, piece: Piece) -> bool:
        """Pass on what came; whether that was the last."""
        if piece.finish not in FINISHED:
            raise httpx.RemoteProtocolError(f"a request was ended by {piece.finish!r}")
        tokens, logprobs, _ = piece
        finish, rule = FINISHED[piece.finish], running.rule
        for count, token in enumerate(tokens, 1):
            running.tokens.append(token)
            # Stop strings are ours: after a load, the server would not know how the text before ended.
            if rule is not None and rule.ends(np.array(running.tokens[-rule.window :], np.int32), self._decoder):
                tokens, finish = tokens[:count], FinishReason.STOP
                break
        if finish is not None:
            self._leave(running)
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

    def pause(self) -> None:
        """See `InferenceEngine.pause`."""
        self._queue.hold("paused")

    def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        self._queue.release("paused")
        self._admit()

    # --- weights -------------------------------------------------------------------------------------------------------

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Have the server load published weights. `WeightsError` if they are not what was sent, or not the model's: the old
        ones are in use then as before. `UnsupportedError` for a server that cannot load, and for `KEEP`: what it streams
        across a load does not tell which weights each token came from."""
        if not self._loads:
            raise UnsupportedError(f"{self.url}: a server of flavour {self._options.flavour!r} cannot be given weights")
        if mode is OnUpdate.KEEP:
            raise UnsupportedError(f"{self.url}: a server cannot load weights with on_update 'keep'")
        await self._give(update.version, partial(self._write, update), mode)

    async def _give(self, version: int, write: Callable[[Path], None], mode: OnUpdate) -> None:
        """Have the server load the checkpoint that is written to a directory."""
        async with self._loading:
            try:
                with shared_directory("checkpoint", self._options.directory) as folder:
                    shutil.copy(self._model / "config.json", folder)
                    await asyncio.to_thread(write, folder)
                    self._queue.hold("load")
                    await self._exchange(folder, mode)
                self.version = version
                for running in self._queue.running.values():
                    self._send(running)
            finally:
                self._queue.release("load")
                self._admit()

    def _copy_model(self, folder: Path) -> None:
        for path in self._model.glob("*.safetensors*"):
            shutil.copy(path, folder)

    def _write(self, update: WeightsUpdate, folder: Path) -> None:
        """All is checked before the server hears of it: vLLM takes what it knows, and leaves what is missing as it is."""
        from safetensors.torch import save_file  # torch, which the controller does without if it can

        from antiphon.weights.checkpoint_layout import CheckpointLayout

        tensors = dict(CHANNELS.resolve(self._channel).receive(update))
        layout = CheckpointLayout(self._model, self._shape.tie_word_embeddings)
        layout.validate(tensors, update.version)
        save_file(dict(layout.convert(tensors)), folder / "model.safetensors")

    async def _exchange(self, folder: Path, mode: OnUpdate) -> None:
        """What goes wrong here leaves weights that nobody knows."""
        try:
            await self._interrupt(mode)
            epoch = uuid4().hex
            await self._dialect.give(self._call, str(folder), epoch)
        except BaseException as error:
            death = self._die(f"it was to load weights, and did not: {error}")
            if isinstance(error, UnsupportedError):
                raise death from error
            raise
        self._epoch = epoch

    async def _interrupt(self, mode: OnUpdate) -> None:
        """End all streams: at once, or with `DRAIN` as they end."""
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

    async def sleep(self) -> None:
        """Not here: the device is the server's."""
        raise UnsupportedError(f"{self.url}: a server does not leave its device to what trains (placement.engine)")

    async def wake(self) -> None:
        """Nothing: it never sleeps."""

    async def health(self) -> None:
        """See `InferenceEngine.health`. `WorkerDied` also of a server that has other weights than we gave it."""
        await self._call("GET", "/health")
        if self._loads and not self._loading.locked():
            epoch, there = self._epoch, await self._dialect.epoch(self._call)
            if there != epoch == self._epoch and not self._loading.locked():
                raise self._die("it was started anew, or someone else has given it weights")

    def kill(self) -> None:
        """Give the server up: it is not ours to end."""
        self._die("it was given up")

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        """What the server answers."""
        if self._death is not None:
            raise self._death
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._die(f"{type(error).__name__} {error}") from error
        if not response.is_success:
            self._refuse(response)
        return response.json() if response.content else None

    def _refuse(self, response: httpx.Response) -> None:
        told = f"HTTP {response.status_code} for {response.request.url.path}: {response.text[:300]}"
        if response.is_server_error:
            raise self._die(told)
        raise UnsupportedError(f"{self.url} answers {told}")

    def _die(self, reason: str) -> WorkerDied:
        """Do without the server from now on, and tell whoever waits for it."""
        if self._death is None:
            self.dead, self._death = True, WorkerDied(f"the server at {self.url} is lost: {reason}")
            for running in self._queue.running.values():
                _cancel(running)
            for generation in self._requests.values():
                generation.fail(self._death)
            self._requests.clear()
            self._queue.clear()
            self._idle.set()
        return self._death


def _cancel(running: _Running) -> None:
    """Stop reading the stream of a request; the server notices that nobody reads it."""
    if running.task is not None:
        running.task.cancel()


def _progress(running: _Running) -> Progress:
    return Progress(sampled=bool(running.tokens), cached=False)  # a stream never outlives a load


def _stream_error(told: Any) -> Exception:
    """Return what an error in a stream means: that the request is invalid, or that the server is lost."""
    if isinstance(told, dict) and told.get("code") in INVALID:
        return RequestError(f"a server refuses a request: {str(told)[:300]}")
    return httpx.RemoteProtocolError(str(told))

"""The smallest engine that keeps the whole contract: one model of transformers, one token of each request a step.

`docs/engines.md`, "An engine of your own", explains what an engine must do. A configuration names this one by its import path:

    engine: {kind: "tests.example_engine:ExampleEngine"}
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from antiphon.core.errors import StateError, UnsupportedError
from antiphon.core.rng import derive
from antiphon.core.types import MIXED_CACHE, FinishReason, GenerateRequest, OnUpdate, Streams, WeightsUpdate
from antiphon.engines.base import EngineCore, Receive
from antiphon.engines.config import EngineKind
from antiphon.engines.deltas import Delta
from antiphon.engines.native.models import eos_ids, max_sequence_length, resolve_device, resolve_dtype
from antiphon.engines.native.weights import copy_weights
from antiphon.engines.request_checks import check_sampling_supported, validate_request
from antiphon.engines.request_queue import Continuation, Progress, RequestQueue
from antiphon.engines.stops import StopRule, read_decoder


@dataclass(slots=True, eq=False)
class Running:
    """A request that runs."""

    request: GenerateRequest
    sampled: list[int] = field(default_factory=list)
    cache: DynamicCache = field(default_factory=DynamicCache)
    mixed: bool = False  # weights of more than one version wrote the cache

    @property
    def progress(self) -> Progress:
        """How far it is, as the queue asks."""
        return Progress(sampled=bool(self.sampled), cached=self.cache.get_seq_length() > 0)


class ExampleEngine(EngineCore):
    """Computes each request by itself. For CPUs, and for reading."""

    def __init__(self, model: str, config: EngineKind, receive: Receive) -> None:
        """Load the model of a directory; `receive` yields the tensors of an update by name."""
        if config.routed_experts:
            raise UnsupportedError("engine.routed_experts: the example engine records no experts")
        torch.set_num_threads(config.threads)
        self.version = 0
        self.loads = 0
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=resolve_dtype(config))
        self.model = loaded.to(resolve_device(config)).eval()
        self.capacity = config.slots
        self.max_length = max_sequence_length(self.model, config.max_length)
        self.vocabulary = self.model.config.vocab_size
        self._receive = receive
        self._decoder = read_decoder(model)
        self._ends = set(eos_ids(self.model))
        self._deltas: list[Delta] = []  # that the next step returns
        self._queue = RequestQueue[Running](
            config.slots, start=Running, stop=lambda running: None, emit=self._deltas.append
        )

    def add(self, request: GenerateRequest) -> None:
        """Queue a request, or refuse it."""
        validate_request(request, self.max_length, self.vocabulary, decodes=self._decoder is not None)
        check_sampling_supported(request.sampling, "the example engine")
        self._queue.add(request)

    def abort(self, request: str) -> None:
        """End a request; the queue emits its last delta."""
        self._queue.abort(request)

    @property
    def busy(self) -> bool:
        """True while `step` has something to do."""
        return bool(self._deltas) or self._queue.busy

    def step(self) -> list[Delta]:
        """Sample one token of each running request."""
        self._finish_draining()
        self._queue.admit()
        for running in list(self._queue.running.values()):
            self._deltas.append(self._sample(running))
        self._finish_draining()
        deltas = self._deltas.copy()
        self._deltas.clear()
        return deltas

    @torch.inference_mode()
    def _sample(self, running: Running) -> Delta:
        request, sampling = running.request, running.request.sampling
        tokens = [*request.tokens.tolist(), *running.sampled]
        unread = torch.tensor([tokens[running.cache.get_seq_length() :]], device=self.model.device)
        logits = self.model(unread, past_key_values=running.cache, logits_to_keep=1).logits[0, -1].float().cpu()
        logprobs = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
        if sampling.temperature:
            # A seed for each position: a request that continues on another engine does not repeat its first draws.
            source = torch.Generator().manual_seed(derive(sampling.seed, len(tokens)))
            token = int(torch.multinomial(logprobs.exp(), 1, generator=source))
        else:
            token = int(logprobs.argmax())
        running.sampled.append(token)
        finish = self._finish(running)
        if finish is not None:
            self._queue.finish(request.id)
        return Delta(
            request=request.id,
            tokens=np.array([token], np.int32),
            logprobs=np.array([logprobs[token]], np.float32),
            versions=np.array([self.version], np.int32),
            streams=Streams({MIXED_CACHE: np.array([running.mixed])}),
            finish=finish,
        )

    def _finish(self, running: Running) -> FinishReason | None:
        rule = StopRule.of(running.request)
        matched = rule is not None and rule.matches(np.array(running.sampled, np.int32), self._decoder)
        if matched or running.sampled[-1] in self._ends:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(running.sampled) == running.request.sampling.max_tokens else None

    def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load weights at once, or when what runs has ended."""
        if self._queue.begin_update(update, mode):
            self._swap(update, mode)

    def _finish_draining(self) -> None:
        if (update := self._queue.take_drained()) is not None:
            self._swap(update, OnUpdate.DRAIN)

    def _swap(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        copy_weights(self.model, self._receive(update))  # `WeightsError`: the pool kills and replaces this engine
        self.version = update.version
        self.loads += 1
        for running, continuation in self._queue.continue_running(mode, lambda running: running.progress):
            if continuation is Continuation.KEEP_CACHE:
                running.mixed = True
                continue
            running.cache, running.mixed = DynamicCache(), False
            if continuation is Continuation.RESTART:
                running.sampled.clear()

    def sleep(self) -> None:
        """Start no request until `wake`. A real engine frees its device here."""
        if count := len(self._queue.running):
            raise StateError(f"the engine cannot sleep: {count} requests are running")
        self._queue.hold("asleep")

    def wake(self) -> None:
        """Go on."""
        self._queue.release("asleep")

"""An engine that takes its time and makes no tokens: continuous batching on the event loop's clock.

All running sequences gain a token an iteration. What an iteration takes grows with their number and with the tokens in
the cache; reading a prompt takes time of its own. Nothing is done token by token: from one event (a sequence comes, ends,
is preempted, weights arrive) to the next, a stretch of iterations has a closed form, and a heap says which sequence ends
first. So an event costs the logarithm of what runs, however long the sequences are.

    seconds of m iterations over n sequences with K tokens in the cache
        = m (iteration + per_sequence n + per_token K) + per_token n m (m - 1) / 2
"""

import asyncio
import heapq
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from antiphon.core.config import Config
from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import AntiphonError, RequestError, WeightsError, WorkerDied
from antiphon.core.types import (
    MIXED_CACHE,
    Completion,
    FinishReason,
    GenerateRequest,
    OnUpdate,
    Streams,
    Timing,
    WeightsUpdate,
)
from antiphon.engines.base import Delta, validate_request

Length = Callable[[GenerateRequest], int]

RETURN = (
    256  # iterations that the cache must have room for before a sequence that gave way comes back, else it goes at once
)
SAMPLED = 1  # the token that all completions consist of
UNBOUNDED = 1 << 62  # tokens of a sequence, and of the vocabulary


class EngineSpeed(Config):
    """How fast a simulated engine is. Seconds and tokens."""

    slots: int = Field(256, gt=0)
    """Sequences that run at once."""
    iteration: float = Field(0.01, ge=0.0)
    """Seconds of a decode iteration, before what its sequences add."""
    per_sequence: float = Field(0.0, ge=0.0)
    per_token: float = Field(0.0, ge=0.0)
    """Seconds an iteration a token in the cache."""
    prefill: float = Field(0.0, ge=0.0)
    """Seconds a token that is read."""
    memory: int = Field(1 << 40, gt=0)
    """Tokens that the cache holds; when it is full the newest sequence gives way, and is read again later."""
    load: float = Field(0.0, ge=0.0)
    """Seconds to take new weights, in which nothing runs."""
    beside_learner: float = Field(1.0, gt=0.0)
    """Times as long as all else takes while the learner trains on the same machine."""


@dataclass(slots=True, eq=False)
class _Sequence:
    request: GenerateRequest
    order: int
    target: int  # tokens it will have
    generation: "SimulatedGeneration"
    done: int = 0  # tokens it has, while it does not run
    born: int = 0  # while it runs: the engine's iteration before its first token
    ends: int = -1  # while it runs: the iteration of its last token
    spans: list[tuple[int, int]] = field(default_factory=list)  # (first token, version that sampled from there on)
    mixed_from: int | None = None  # first token that was sampled over a cache of more than one version

    prefix: tuple[str, int] = field(init=False)  # of siblings at their first turn equal; later only their group is

    def __post_init__(self) -> None:
        self.prefix = (self.request.affinity or (self.request.id,))[-1], len(self.request.tokens)

    @property
    def place(self) -> tuple[int, int]:
        """Who goes first."""
        return self.request.priority, self.order

    @property
    def size(self) -> int:
        """Tokens to read before it can go on."""
        return len(self.request.tokens) + self.done


class SimulatedEngine:
    """An `InferenceEngine` on the running loop's clock. `length` says how many tokens a request gets in all: one that
    another engine began gets the rest."""

    device = ""  # they are all alike

    def __init__(self, speed: EngineSpeed, length: Length, version: int = 0, *, colocated: bool = False) -> None:
        self.speed = speed
        self.colocated = colocated
        self.version = version
        self.capacity = speed.slots
        self.dead: WorkerDied | None = None
        self._hung: asyncio.Future[None] | None = None
        self._slow = 1.0  # a fault
        self._beside = 1.0  # the learner trains
        self._factor = 1.0  # times as long as everything takes
        self.sampled_tokens = 0
        self.read_tokens = 0
        self.preemptions = 0
        self.busy_seconds = 0.0  # in which anything ran
        self.load_failures: Callable[[], bool] = lambda: False  # asked at each load
        self._busy_since = 0.0
        self._length = length
        self._orders = itertools.count()
        self._iterations = 0
        self._cached = 0  # tokens
        self._running: dict[str, _Sequence] = {}
        self._ends: list[tuple[int, int, _Sequence]] = []  # heap of (iteration of its last token, order, sequence)
        self._queue: list[tuple[tuple[int, int], _Sequence]] = []  # heap
        self._known: dict[str, _Sequence] = {}  # queued or running
        self._prefixes: Counter[tuple[str, int]] = Counter()  # running sequences of each `prefix`
        self._draining: tuple[WeightsUpdate, asyncio.Future[None]] | None = None
        self._paused = 0  # reasons to stand still: loads under way, and hanging
        # The stretch under way: it began then, with that much to read, and will be looked at by the timer.
        self._began = 0.0
        self._reading = 0.0  # seconds
        self._unread = 0.0  # seconds of reading that a load interrupted
        self._ending = 0  # iterations, when the timer comes
        self._timer: asyncio.TimerHandle | None = None

    # --- requests ------------------------------------------------------------------------------------------------------

    def start(self, request: GenerateRequest) -> "SimulatedGeneration":
        """See `InferenceEngine.start`."""
        generation = SimulatedGeneration(self, request)
        sequence = generation.sequence = _Sequence(request, next(self._orders), 0, generation)
        try:
            if self.dead is not None:
                raise self.dead
            if request.id in self._known:
                raise RequestError(f"request {request.id!r} is already running")
            validate_request(request, UNBOUNDED, UNBOUNDED, decodes=True)
        except AntiphonError as error:
            generation.fail(error)
            return generation
        sequence.target = max(1, min(self._length(request) - _resumed(request), request.sampling.max_tokens))
        self._known[request.id] = sequence
        heapq.heappush(self._queue, (sequence.place, sequence))
        if len(self._running) < self.capacity:
            self._look_at_next_iteration()
        return generation

    def abort(self, request: str) -> None:
        """End a request with the tokens it has. Unknown ids are ignored."""
        if request not in self._known:
            return
        self._catch_up()
        sequence = self._known.pop(request)
        if request in self._running:
            self._leave(sequence)
        sequence.generation.finish(self.completion(sequence, FinishReason.ABORT))
        self._look_at_next_iteration()

    # --- faults --------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Die now, as a killed process does."""
        self._catch_up()
        self._stop_timer()
        self.dead = WorkerDied("a simulated engine crashed")
        for sequence in self._known.values():
            if sequence.request.id in self._running:
                self._leave(sequence)
            sequence.generation.fail(self.dead)
        self._known.clear()
        if self._hung is not None:
            fail(self._hung, self.dead)
        if self._draining is not None:
            fail(self._draining[1], self.dead)

    def kill(self) -> None:
        """See `InferenceEngine.kill`."""
        if self.dead is None:
            self.crash()

    def hang(self) -> None:
        """Stand still for ever: nothing ends, nothing is answered, until it is killed."""
        if self._hung is not None:
            return
        self._interrupt()
        self._paused += 1
        self._hung = asyncio.get_running_loop().create_future()

    def slow_down(self, factor: float) -> None:
        """Take `factor` times as long from now on; 1 is as fast as at first."""
        self._slow = factor
        self._change_pace()

    def share_machine(self, training: bool) -> None:
        """The learner has begun to train, or is done."""
        self._beside = self.speed.beside_learner if training else 1.0
        if self.dead is None:
            self._change_pace()

    def _change_pace(self) -> None:
        if self._factor != self._slow * self._beside:
            self._interrupt()
            self._factor = self._slow * self._beside
            self._begin_stretch(0)

    @property
    def running(self) -> int:
        """Sequences that are decoded now."""
        return len(self._running)

    def recover(self) -> None:
        """Be as fast as at first, if it still lives."""
        if self.dead is None:
            self.slow_down(1.0)

    def pause(self) -> None:
        """See `InferenceEngine.pause`."""
        self._interrupt()
        self._paused += 1

    def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        self._paused -= 1
        self._begin_stretch(0)

    async def sleep(self) -> None:
        """See `InferenceEngine.sleep`: what does not run takes nothing."""

    async def wake(self) -> None:
        """See `InferenceEngine.wake`."""

    async def health(self) -> None:
        """See `InferenceEngine.health`."""
        if self.dead is None and self._hung is not None:
            await asyncio.shield(self._hung)
        if self.dead is not None:
            raise self.dead

    # --- weights -------------------------------------------------------------------------------------------------------

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """See `InferenceEngine.load`."""
        if self.dead is not None:
            raise self.dead
        if mode is OnUpdate.DRAIN and self._running:
            if self._draining is not None:  # replaced: who waits for it gets the newer one
                self._draining = update, self._draining[1]
            else:
                self._draining = update, asyncio.get_running_loop().create_future()
            await asyncio.shield(self._draining[1])
            return
        await self._swap(update, mode)

    async def _swap(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        self._interrupt()
        self._paused += 1
        await asyncio.sleep(self.speed.load)
        await self.health()
        if self.load_failures():
            raise WeightsError(f"weights of version {update.version} arrived with a wrong digest: not loaded")
        self._paused -= 1
        self.version = update.version
        reading = 0
        for sequence in list(self._running.values()):
            if mode is OnUpdate.RESTART:
                self._leave(sequence)
                sequence.done, sequence.spans, sequence.mixed_from = 0, [], None
                heapq.heappush(self._queue, (sequence.place, sequence))
                continue
            done = self._iterations - sequence.born
            sequence.spans.append((done, self.version))
            if mode is OnUpdate.RECOMPUTE:
                reading += len(sequence.request.tokens) + done
            elif sequence.mixed_from is None:
                sequence.mixed_from = done
        self._begin_stretch(reading)

    # --- time ----------------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Credit the iterations that have ended by now; the one under way goes on."""
        if self._timer is None:
            return
        elapsed = asyncio.get_running_loop().time() - self._began - self._reading
        whole = self._iterations_in(elapsed)
        if whole:
            self._began += self._reading + self._seconds(whole)
            self._reading = 0.0
            self._credit(whole)

    def _interrupt(self) -> None:
        """End the stretch here: what is unread stays so, and the iteration under way will start over."""
        self._catch_up()
        if self._timer is not None:
            self._unread = max(self._began + self._reading - asyncio.get_running_loop().time(), 0.0)
            self._stop_timer()

    def _credit(self, iterations: int) -> None:
        self._iterations += iterations
        self._cached += iterations * len(self._running)
        self.sampled_tokens += iterations * len(self._running)

    def _seconds(self, iterations: int) -> float:
        speed, n = self.speed, len(self._running)
        first = speed.iteration + speed.per_sequence * n + speed.per_token * self._cached
        growing = speed.per_token * n * iterations * (iterations - 1) / 2
        return self._factor * (iterations * first + growing)

    def _iterations_in(self, seconds: float) -> int:
        """Iterations that end within `seconds`."""
        if seconds <= 0 or not self._running:
            return 0
        one = self._seconds(1)
        growth = self._factor * self.speed.per_token * len(self._running) / 2
        linear = one - growth
        if growth:
            guess = (math.sqrt(linear * linear + 4 * growth * seconds) - linear) / (2 * growth)
        else:
            guess = seconds / one if one else math.inf
        most = self._until_end()  # the timer comes no later
        whole = most if guess >= most else int(guess)
        # The root is rounded; the timer was set with `_seconds`, so that is what decides.
        while whole < most and self._seconds(whole + 1) <= seconds * (1 + 1e-12):
            whole += 1
        while whole and self._seconds(whole) > seconds * (1 + 1e-12):
            whole -= 1
        return whole

    def _look_at_next_iteration(self) -> None:
        """Something may join or has left: end the stretch with the iteration under way."""
        if self._paused:
            return
        if self._timer is None:
            self._begin_stretch(0)
            return
        self._catch_up()
        self._set_timer(min(1, self._until_end()) if self._running else 0)

    def _begin_stretch(self, reading: int) -> None:
        """Seat who can be seated, and let all run until the first of them ends or the cache is full."""
        self._stop_timer()
        if self._paused:
            return
        self._make_room()
        reading += self._admit()
        self.read_tokens += reading
        if not self._running:
            if self._draining is not None:
                update, loaded = self._draining
                self._draining = None
                task = asyncio.ensure_future(self._swap(update, OnUpdate.DRAIN))
                task.add_done_callback(lambda swapped: _pass_on(swapped, loaded))
            return
        self._began = asyncio.get_running_loop().time()
        self._reading, self._unread = self._factor * self.speed.prefill * reading + self._unread, 0.0
        until_full = (self.speed.memory - self._cached) // len(self._running)
        self._set_timer(max(1, min(self._until_end(), until_full)))

    def _set_timer(self, iterations: int) -> None:
        when = self._began + self._reading + self._seconds(iterations)
        if self._timer is None or self._timer.when() != when or self._ending != iterations:
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_at(when, self._stretch_ended, iterations)
            self._ending = iterations

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stretch_ended(self, iterations: int) -> None:
        self._timer = None
        self._credit(iterations)
        while self._running and self._until_end() == 0:
            _, _, sequence = heapq.heappop(self._ends)
            self._leave(sequence)
            del self._known[sequence.request.id]
            limit = sequence.target == sequence.request.sampling.max_tokens
            reason = FinishReason.LENGTH if limit else FinishReason.STOP
            sequence.generation.finish(self.completion(sequence, reason))
        self._begin_stretch(0)

    def _until_end(self) -> int:
        """Iterations until the first running sequence ends."""
        while (end := self._ends[0])[2].ends != end[0]:
            heapq.heappop(self._ends)  # left out when it was aborted, preempted or restarted
        return self._ends[0][0] - self._iterations

    # --- seats ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> int:
        """Seat queued sequences; returns the tokens to read for them."""
        reading = 0
        while self._queue and len(self._running) < self.capacity and self._draining is None:
            _, sequence = self._queue[0]
            if self._known.get(sequence.request.id) is sequence:
                ahead = RETURN if sequence.done else 1
                if self._running and self._cached + sequence.size + ahead * len(self._running) >= self.speed.memory:
                    break
                reading += sequence.done if self._prefixes[sequence.prefix] else sequence.size
                self._seat(sequence)
            heapq.heappop(self._queue)  # else it was aborted while it was queued
        return reading

    def _seat(self, sequence: _Sequence) -> None:
        sequence.born = self._iterations - sequence.done
        sequence.ends = sequence.born + sequence.target
        sequence.generation.began = sequence.generation.began or asyncio.get_running_loop().time()
        if not sequence.spans or sequence.spans[-1][1] != self.version:
            sequence.spans.append((sequence.done, self.version))
        if not self._running:
            self._busy_since = asyncio.get_running_loop().time()
        self._running[sequence.request.id] = sequence
        self._prefixes[sequence.prefix] += 1
        self._cached += sequence.size
        heapq.heappush(self._ends, (sequence.ends, sequence.order, sequence))

    def _leave(self, sequence: _Sequence) -> None:
        sequence.done = self._iterations - sequence.born
        sequence.ends = -1
        del self._running[sequence.request.id]
        if not self._running:
            self.busy_seconds += asyncio.get_running_loop().time() - self._busy_since
        self._prefixes[sequence.prefix] -= 1
        if not self._prefixes[sequence.prefix]:
            del self._prefixes[sequence.prefix]
        self._cached -= sequence.size

    def _make_room(self) -> None:
        """Preempt the newest sequences until every other one has room for a token."""
        while len(self._running) > 1 and self._cached + len(self._running) > self.speed.memory:
            sequence = self._running[next(reversed(self._running))]
            self._leave(sequence)
            heapq.heappush(self._queue, (sequence.place, sequence))
            self.preemptions += 1

    def completion(self, sequence: _Sequence, finish: FinishReason) -> Completion:
        """What a sequence has."""
        running = sequence.request.id in self._running
        count = self._iterations - sequence.born if running else sequence.done
        versions = np.zeros(count, np.int32)
        for first, version in sequence.spans:
            versions[first:] = version
        mixed = np.zeros(count, np.bool_)
        if sequence.mixed_from is not None:
            mixed[sequence.mixed_from :] = True
        generation = sequence.generation
        finished = asyncio.get_running_loop().time()
        return Completion(
            tokens=np.full(count, SAMPLED, np.int32),
            logprobs=np.zeros(count, np.float32),
            versions=versions,
            finish=finish,
            streams=Streams({MIXED_CACHE: mixed}),
            timing=Timing(queued=generation.queued, started=generation.began, finished=finished),
        )


def _resumed(request: GenerateRequest) -> int:
    """Tokens at the request's end that an engine before made: ones. What was not sampled here is zeros."""
    if request.tokens[-1] != SAMPLED:
        return 0
    others = np.flatnonzero(request.tokens != SAMPLED)
    return len(request.tokens) - int(others[-1]) - 1 if len(others) else len(request.tokens)


def _pass_on(done: "asyncio.Task[None]", to: "asyncio.Future[None]") -> None:
    if done.cancelled():
        return
    error = done.exception()
    if error is not None:
        fail(to, error)
    else:
        succeed(to, None)


class SimulatedGeneration:
    """A `GenerationHandle`; all its tokens come with its end."""

    def __init__(self, engine: SimulatedEngine, request: GenerateRequest) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.queued = loop.time()
        self.began = 0.0
        self.sequence: _Sequence  # set by the engine
        self._engine = engine
        self._completion: asyncio.Future[Completion] = loop.create_future()

    async def result(self) -> Completion:
        """See `GenerationHandle.result`."""
        return await self._completion

    async def __aiter__(self) -> AsyncIterator[Delta]:
        whole = await self.result()
        yield Delta(
            request=self.request.id,
            tokens=whole.tokens,
            logprobs=whole.logprobs,
            versions=whole.versions,
            streams=whole.streams,
            finish=whole.finish,
        )

    def partial(self) -> Completion:
        """See `GenerationHandle.partial`."""
        return self._engine.completion(self.sequence, FinishReason.ABORT)

    def abort(self) -> None:
        """See `GenerationHandle.abort`."""
        if not self._completion.done() or self._completion.cancelled():  # else another may have its id
            self._engine.abort(self.request.id)

    def finish(self, completion: Completion) -> None:
        """The engine is done with it."""
        succeed(self._completion, completion)

    def fail(self, error: AntiphonError) -> None:
        """The engine died."""
        fail(self._completion, error)

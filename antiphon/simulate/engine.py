"""A simulated inference engine: continuous batching on the event loop's clock, without tokens.

Nothing is done token by token. Between two events (a sequence comes, ends or is preempted, weights arrive) lies a *stretch* of
iterations whose duration has a closed form, and a heap says which sequence ends first. An event therefore costs the logarithm
of the number of sequences, however long they are.
"""

import asyncio
import itertools
from collections.abc import Callable

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import AntiphonError, RequestError, WeightsError, WorkerDiedError
from antiphon.core.types import Completion, FinishReason, GenerateRequest, OnUpdate, WeightsUpdate
from antiphon.engines.request_checks import validate_request
from antiphon.simulate.decode_batch import DecodeBatch
from antiphon.simulate.engine_speed import EngineSpeed
from antiphon.simulate.generation import Sequence, SimulatedGeneration, count_resumed

Length = Callable[[GenerateRequest], int]

UNBOUNDED = 1 << 62  # tokens of a sequence, and of the vocabulary


class SimulatedEngine:
    """An `InferenceEngine` on the running loop's clock."""

    device = ""  # all simulated engines are alike

    def __init__(self, speed: EngineSpeed, length: Length, version: int = 0, *, colocated: bool = False) -> None:
        """Make an idle engine.

        Args:
            speed: How fast it is.
            length: Returns how many tokens a request gets in all; a request that another engine began gets the rest.
            version: Version of its weights.
            colocated: It shares a device with the learner, and sleeps while that trains.
        """
        self.speed = speed
        self.colocated = colocated
        self.version = version
        self.capacity = speed.slots
        self.dead: WorkerDiedError | None = None
        self.read_tokens = 0  # prefilled
        self.load_failures: Callable[[], bool] = lambda: False  # called at each load
        self._batch = DecodeBatch(speed)
        self._length = length
        self._orders = itertools.count()
        self._hung: asyncio.Future[None] | None = None
        self._fault_factor = 1.0  # times as long, because of a fault
        self._learner_factor = 1.0  # times as long, because the learner trains
        self._factor = 1.0  # the product of both, in force
        self._draining: tuple[WeightsUpdate, asyncio.Future[None]] | None = None
        self._paused = 0  # reasons to stand still: loads under way, hanging, `pause`
        # The current stretch.
        self._began = 0.0
        self._prefill_left = 0.0  # seconds of prefill before its first iteration
        self._interrupted_prefill = 0.0  # seconds of prefill that an interruption left
        self._timer: asyncio.TimerHandle | None = None
        self._timer_iterations = 0  # of the stretch, when the timer comes

    # --- counters ------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of sequences that are decoded now."""
        return len(self._batch.running)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return self._batch.sampled_tokens

    @property
    def preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._batch.preemptions

    @property
    def busy_seconds(self) -> float:
        """Seconds in which any sequence ran, up to when the last one ended."""
        return self._batch.busy_seconds

    # --- requests ------------------------------------------------------------------------------------------------------

    def start(self, request: GenerateRequest) -> SimulatedGeneration:
        """Queue a request; an invalid one, or one to a dead engine, fails at once."""
        generation = SimulatedGeneration(request, self._make_partial, self.abort)
        sequence = generation.sequence = Sequence(request, next(self._orders), generation)
        try:
            if self.dead is not None:
                raise self.dead
            if request.id in self._batch.known:
                raise RequestError(f"request {request.id!r} is already running")
            validate_request(request, UNBOUNDED, UNBOUNDED, decodes=True)
        except AntiphonError as error:
            generation.fail(error)
            return generation
        sequence.target = max(1, min(self._length(request) - count_resumed(request), request.sampling.max_tokens))
        self._batch.enqueue(sequence)
        if self.running < self.capacity:
            self._end_stretch_soon()
        return generation

    def abort(self, request: str) -> None:
        """End a request with the tokens it has. Unknown ids are ignored."""
        if request not in self._batch.known:
            return
        self._catch_up()
        sequence = self._batch.discard(request)
        sequence.generation.finish(sequence.make_completion(sequence.done, FinishReason.ABORT))
        self._end_stretch_soon()

    def _make_partial(self, generation: SimulatedGeneration) -> Completion:
        sequence = generation.sequence
        return sequence.make_completion(self._batch.count_tokens(sequence), FinishReason.ABORT)

    # --- faults and pace -----------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Die now, as a killed process does."""
        self._catch_up()
        self._stop_timer()
        self.dead = WorkerDiedError("a simulated engine crashed")
        for request in list(self._batch.known):
            self._batch.discard(request).generation.fail(self.dead)
        if self._hung is not None:
            fail(self._hung, self.dead)
        if self._draining is not None:
            fail(self._draining[1], self.dead)

    def kill(self) -> None:
        """Crash, unless the engine is dead already."""
        if self.dead is None:
            self.crash()

    def hang(self) -> None:
        """Stand still: nothing ends and nothing is answered until the engine is killed."""
        if self._hung is not None:
            return
        self._interrupt()
        self._paused += 1
        self._hung = asyncio.get_running_loop().create_future()

    def slow_down(self, factor: float) -> None:
        """Take `factor` times as long from now on."""
        self._fault_factor = factor
        self._update_pace()

    def recover(self) -> None:
        """Return to full speed, if the engine lives."""
        if self.dead is None:
            self.slow_down(1.0)

    def share_machine(self, training: bool) -> None:
        """Slow down while the learner trains on the same machine."""
        self._learner_factor = self.speed.beside_learner if training else 1.0
        if self.dead is None:
            self._update_pace()

    def _update_pace(self) -> None:
        if self._factor != self._fault_factor * self._learner_factor:
            self._interrupt()
            self._factor = self._fault_factor * self._learner_factor
            self._begin_stretch(0)

    def pause(self) -> None:
        """Stand still until `resume`."""
        self._interrupt()
        self._paused += 1

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused -= 1
        self._begin_stretch(0)

    async def sleep(self) -> None:
        """Do nothing: an engine that does not run uses no memory."""

    async def wake(self) -> None:
        """Do nothing: there is nothing to restore."""

    async def health(self) -> None:
        """Return if the engine works; raise `WorkerDiedError` if it is dead; wait while it hangs."""
        if self.dead is None and self._hung is not None:
            await asyncio.shield(self._hung)
        if self.dead is not None:
            raise self.dead

    # --- weights -------------------------------------------------------------------------------------------------------

    async def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load a version; running sequences are treated as `mode` says."""
        if self.dead is not None:
            raise self.dead
        if mode is OnUpdate.DRAIN and self.running:
            if self._draining is not None:  # replaced: who waits for it gets the newer version
                self._draining = update, self._draining[1]
            else:
                self._draining = update, asyncio.get_running_loop().create_future()
            await asyncio.shield(self._draining[1])
            return
        await self._swap_weights(update, mode)

    async def _swap_weights(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        self._interrupt()
        self._paused += 1
        await asyncio.sleep(self.speed.load)
        await self.health()
        if self.load_failures():
            message = f"weights of version {update.version} arrived with a wrong digest: not loaded"
            raise WeightsError(message, version=update.version)
        self._paused -= 1
        self.version = update.version
        prefill = 0
        for sequence in list(self._batch.running.values()):
            if mode is OnUpdate.RESTART:
                self._batch.restart(sequence)
                continue
            done = self._batch.count_tokens(sequence)
            sequence.spans.append((done, self.version))
            if mode is OnUpdate.RECOMPUTE:
                prefill += len(sequence.request.tokens) + done
            elif sequence.mixed_from is None:
                sequence.mixed_from = done
        self._begin_stretch(prefill)

    # --- stretches -----------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Count the iterations that have ended by now; the current one goes on."""
        if self._timer is None:
            return
        elapsed = asyncio.get_running_loop().time() - self._began - self._prefill_left
        whole = self._batch.iterations_within(elapsed, self._factor)
        if whole:
            self._began += self._prefill_left + self._factor * self._batch.seconds_of(whole)
            self._prefill_left = 0.0
            self._batch.advance(whole)

    def _interrupt(self) -> None:
        """End the stretch now: the rest of its prefill is kept, and the current iteration will start over."""
        self._catch_up()
        if self._timer is not None:
            now = asyncio.get_running_loop().time()
            self._interrupted_prefill = max(self._began + self._prefill_left - now, 0.0)
            self._stop_timer()

    def _end_stretch_soon(self) -> None:
        """End the stretch with the current iteration, since a sequence may join or has left."""
        if self._paused:
            return
        if self._timer is None:
            self._begin_stretch(0)
            return
        self._catch_up()
        self._set_timer(min(1, self._batch.iterations_to_end()) if self.running else 0)

    def _begin_stretch(self, prefill: int) -> None:
        """Admit sequences, and run until the first one ends or the cache is full.

        Args:
            prefill: Tokens to prefill besides those of admitted sequences.
        """
        self._stop_timer()
        if self._paused:
            return
        self._batch.preempt()
        if self._draining is None:
            prefill += self._batch.admit(self.version)
        self.read_tokens += prefill
        if not self.running:
            self._finish_draining()
            return
        self._began = asyncio.get_running_loop().time()
        self._prefill_left = self._factor * self.speed.prefill * prefill + self._interrupted_prefill
        self._interrupted_prefill = 0.0
        self._set_timer(self._batch.iterations_to_change())

    def _finish_draining(self) -> None:
        """Load the weights that waited for the last sequence to end."""
        if self._draining is None:
            return
        update, loaded = self._draining
        self._draining = None
        task = asyncio.ensure_future(self._swap_weights(update, OnUpdate.DRAIN))
        task.add_done_callback(lambda swapped: _copy_result(swapped, loaded))

    def _set_timer(self, iterations: int) -> None:
        when = self._began + self._prefill_left + self._factor * self._batch.seconds_of(iterations)
        if self._timer is None or self._timer.when() != when or self._timer_iterations != iterations:
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_at(when, self._on_timer, iterations)
            self._timer_iterations = iterations

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self, iterations: int) -> None:
        self._timer = None
        self._batch.advance(iterations)
        while (sequence := self._batch.pop_ended()) is not None:
            is_limited = sequence.target == sequence.request.sampling.max_tokens
            reason = FinishReason.LENGTH if is_limited else FinishReason.STOP
            sequence.generation.finish(sequence.make_completion(sequence.done, reason))
        self._begin_stretch(0)


def _copy_result(done: "asyncio.Task[None]", to: "asyncio.Future[None]") -> None:
    if done.cancelled():
        return
    error = done.exception()
    if error is not None:
        fail(to, error)
    else:
        succeed(to, None)

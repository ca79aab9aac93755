"""The sequences of a simulated engine, counted in iterations: who waits, who runs, and how long iterations take.

All running sequences gain a token an iteration. The seconds of an iteration grow with the number of sequences and with the
tokens in the cache:

    seconds of m iterations over n sequences with K tokens in the cache
        = m (iteration + per_sequence n + per_token K) + per_token n m (m - 1) / 2
"""

import asyncio
import heapq
import math
from collections import Counter

from antiphon.simulate.engine_speed import EngineSpeed
from antiphon.simulate.generation import Sequence

READMIT_ITERATIONS = 256  # that the cache must have room for before a preempted sequence runs again


class DecodeBatch:
    """Continuous batching. It knows no timers: the engine says how many iterations have passed."""

    def __init__(self, speed: EngineSpeed) -> None:
        self.speed = speed
        self.running: dict[str, Sequence] = {}
        self.known: dict[str, Sequence] = {}  # queued or running
        self.iterations = 0
        self.sampled_tokens = 0
        self.preemptions = 0
        self.busy_seconds = 0.0  # in which anything ran
        self._busy_since = 0.0
        self._cached = 0  # tokens
        self._ends: list[tuple[int, int, Sequence]] = []  # heap of (iteration of its last token, order, sequence)
        self._queue: list[tuple[tuple[int, int], Sequence]] = []  # heap
        self._prefixes: Counter[tuple[str, int]] = Counter()  # running sequences of each `prefix`

    # --- time ----------------------------------------------------------------------------------------------------------

    def advance(self, iterations: int) -> None:
        """Give each running sequence that many tokens."""
        self.iterations += iterations
        self._cached += iterations * len(self.running)
        self.sampled_tokens += iterations * len(self.running)

    def seconds_of(self, iterations: int) -> float:
        """Return the seconds of the next iterations at full speed."""
        speed, n = self.speed, len(self.running)
        first = speed.iteration + speed.per_sequence * n + speed.per_token * self._cached
        return iterations * first + speed.per_token * n * iterations * (iterations - 1) / 2

    def iterations_within(self, seconds: float, factor: float) -> int:
        """Return how many iterations end within some seconds, if each takes `factor` times as long as at full speed."""
        if seconds <= 0 or not self.running:
            return 0
        one = factor * self.seconds_of(1)
        growth = factor * self.speed.per_token * len(self.running) / 2
        linear = one - growth
        if growth:
            guess = (math.sqrt(linear * linear + 4 * growth * seconds) - linear) / (2 * growth)
        else:
            guess = seconds / one if one else math.inf
        most = self.iterations_to_end()  # the engine's timer comes no later
        whole = most if guess >= most else int(guess)
        # The root is rounded; the timer was set with `seconds_of`, so that is what decides.
        while whole < most and factor * self.seconds_of(whole + 1) <= seconds * (1 + 1e-12):
            whole += 1
        while whole and factor * self.seconds_of(whole) > seconds * (1 + 1e-12):
            whole -= 1
        return whole

    def iterations_to_end(self) -> int:
        """Return the iterations until the first running sequence ends."""
        while (end := self._ends[0])[2].ends != end[0]:
            heapq.heappop(self._ends)  # a stale entry of a sequence that was aborted, preempted or restarted
        return self._ends[0][0] - self.iterations

    def iterations_to_change(self) -> int:
        """Return the iterations until a running sequence ends or the cache is full, at least 1."""
        until_full = (self.speed.memory - self._cached) // len(self.running)
        return max(1, min(self.iterations_to_end(), until_full))

    # --- sequences -----------------------------------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence wait for a slot."""
        self.known[sequence.request.id] = sequence
        heapq.heappush(self._queue, (sequence.place, sequence))

    def discard(self, request: str) -> Sequence:
        """Remove a queued or running sequence."""
        sequence = self.known.pop(request)
        if request in self.running:
            self.stop(sequence)
        return sequence  # its entry in the queue is dropped when it comes up

    def pop_ended(self) -> Sequence | None:
        """Remove and return a running sequence that has all its tokens; None if there is none."""
        if not self.running or self.iterations_to_end():
            return None
        _, _, sequence = heapq.heappop(self._ends)
        return self.discard(sequence.request.id)

    def count_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence has."""
        is_running = self.running.get(sequence.request.id) is sequence
        return self.iterations - sequence.born if is_running else sequence.done

    def admit(self, version: int) -> int:
        """Let queued sequences run while there are slots and memory; returns the tokens to prefill for them."""
        prefill = 0
        while self._queue and len(self.running) < self.speed.slots:
            _, sequence = self._queue[0]
            if self.known.get(sequence.request.id) is sequence:  # else it was aborted while it was queued
                ahead = READMIT_ITERATIONS if sequence.done else 1
                if self.running and self._cached + sequence.size + ahead * len(self.running) >= self.speed.memory:
                    break
                prefill += sequence.done if self._prefixes[sequence.prefix] else sequence.size
                self._run(sequence, version)
            heapq.heappop(self._queue)
        return prefill

    def _run(self, sequence: Sequence, version: int) -> None:
        now = asyncio.get_running_loop().time()
        sequence.born = self.iterations - sequence.done
        sequence.ends = sequence.born + sequence.target
        sequence.generation.began = sequence.generation.began or now
        if not sequence.spans or sequence.spans[-1][1] != version:
            sequence.spans.append((sequence.done, version))
        if not self.running:
            self._busy_since = now
        self.running[sequence.request.id] = sequence
        self._prefixes[sequence.prefix] += 1
        self._cached += sequence.size
        heapq.heappush(self._ends, (sequence.ends, sequence.order, sequence))

    def stop(self, sequence: Sequence) -> None:
        """Take a running sequence out of the batch; it keeps its tokens."""
        sequence.done = self.iterations - sequence.born
        sequence.ends = -1
        del self.running[sequence.request.id]
        if not self.running:
            self.busy_seconds += asyncio.get_running_loop().time() - self._busy_since
        self._prefixes[sequence.prefix] -= 1
        if not self._prefixes[sequence.prefix]:
            del self._prefixes[sequence.prefix]
        self._cached -= sequence.size

    def restart(self, sequence: Sequence) -> None:
        """Put a running sequence back into the queue without its tokens."""
        self.stop(sequence)
        sequence.done, sequence.spans, sequence.mixed_from = 0, [], None
        self.enqueue(sequence)

    def preempt(self) -> None:
        """Put the newest sequences back into the queue until every other one has room for a token."""
        while len(self.running) > 1 and self._cached + len(self.running) > self.speed.memory:
            sequence = self.running[next(reversed(self.running))]
            self.stop(sequence)
            self.enqueue(sequence)
            self.preemptions += 1

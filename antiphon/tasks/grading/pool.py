"""The grading pool: rewards run in processes that can be killed, because model output hangs and crashes graders.

Who has what, and what each event does:

    score()  ->  pending  ->  a worker's batch  ->  the caller's future
                    ^               |
                    +---------------+   the worker was killed or died: what it had not answered goes back, in order

A worker answers a batch in order, so the first unanswered item is the one it is at. If that item outlasts the deadline,
the worker is killed and the item is ungraded. If the worker dies by itself, the item is tried once more, then reported
as failed infrastructure. The other items of the batch lose nothing but time. A batch is as much as lately took a tenth
of a second, so that little waits behind one that hangs.

When items stay pending for a second on end, another worker starts, up to `max_workers`; one beyond `workers` that is idle
for long is ended. If an additional worker cannot be started, the pool stays as large as it is; any other is tried again,
and the pool ends if that does not help. Nothing here polls: a worker's process speaks or closes its socket, or the event
loop's clock reaches a deadline.
"""

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

import antiphon
from antiphon.core.deadlines import Deadlines, fail, succeed
from antiphon.core.errors import ConfigError, DataError, StallError, WorkerDied
from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import levels
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import GradingConfig
from antiphon.tasks.grading.worker import (
    HEADER,
    LONGEST_ANSWER,
    Answer,
    Failed,
    Graded,
    Ready,
    SetUp,
    decode_answer,
    frame_order,
)
from antiphon.tasks.rewards import GROUP_REWARDS, REWARDS

START_SECONDS = 120.0  # a worker imports sympy or a user's package; on a loaded machine that takes a while
LARGEST_BATCH = 64  # enough to pay for the message
BATCH_SECONDS = 0.1
GROW_SECONDS = 1.0  # longer than a burst takes; a worker takes about as long to start
RESTART_SECONDS = (1.0, 5.0)  # before a worker that was there is tried to be started again

Named = dict[str, tuple[str, Mapping[str, Any]]]  # task -> name and options

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; {first}from antiphon.tasks.grading.worker import main; "
    "main({descriptor}, {cores}, {gpu!r})"
)
_CONFINE = (
    "from antiphon.sandbox.isolation.confinement import confine; "
    "confine({level}, {readable}, user_namespace={user_namespace}); "
)


@dataclass(slots=True, eq=False)
class _Grading:
    """One call of `score` or `score_group` under way."""

    number: int
    task: str
    together: bool
    content: bytes
    verdict: asyncio.Future[Graded]
    deaths: int = 0


@dataclass(slots=True)
class GradingStats:
    """Gradings so far, by how they ended, and worker processes started."""

    scored: int = 0
    ungraded: int = 0  # the reward said so
    raised: int = 0
    timed_out: int = 0
    died: int = 0
    processes: int = 0
    failed_starts: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    """One process, and the items it has not answered."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gpu: str | None = None  # that it sees, see `Gpus`
    batch: deque[_Grading] = field(default_factory=deque)
    since: float = 0.0  # when it began with the first of them, seconds of the event loop's clock
    timer: asyncio.TimerHandle | None = None
    overdue: _Grading | None = None  # the item it was killed for
    extra: bool = False  # there beyond those that are always there
    retired: bool = False  # it was ended for having nothing to do

    async def read(self) -> Answer | None:
        """Return the next answer; None when the process has closed its end, or sent anything but an answer."""
        try:
            (length,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            return decode_answer(await self.reader.readexactly(length)) if length <= LONGEST_ANSWER else None
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            return None

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Gpus:
    """GPUs of graders. Each process sees one: a model that is on "cuda" is on the first that its process sees, and all of them
    would be on the same."""

    def __init__(self, names: Sequence[str]) -> None:
        """By the names that CUDA_VISIBLE_DEVICES has for them; there may be none."""
        self._held = dict.fromkeys(names, 0)  # processes

    def take(self) -> str:
        """The one that the fewest processes see; empty if there is none."""
        gpu = min(self._held, key=self._held.__getitem__, default="")
        if gpu:
            self._held[gpu] += 1
        return gpu

    def give_back(self, gpu: str) -> None:
        """A process that saw it has ended."""
        if gpu:
            self._held[gpu] -= 1


class GradingPool:
    """Scores transcripts in processes. Use as `async with`; leaving it leaves no process behind."""

    def __init__(
        self,
        rewards: Named,
        config: GradingConfig,
        deadlines: Deadlines,
        group_rewards: Named | None = None,
        cores: Sequence[int] = (),
        gpus: Gpus | None = None,
        confined: bool = False,
    ) -> None:
        """`rewards` maps each task to its reward's name and options, `group_rewards` some to that of their groups. Workers, and
        what they start, are held to `cores`; if there are none, to none in particular. Each sees one of `gpus`, or all
        GPUs if nothing is said of them. Those that are `confined` have no more of this machine than Python."""
        self._cores = tuple(cores)
        self._confined = confined
        self._first = ""  # what a worker does before all else
        self._gpus = gpus
        self._rewards = dict(rewards)
        self._group_rewards = dict(group_rewards or {})
        for registry, named in ((REWARDS, self._rewards), (GROUP_REWARDS, self._group_rewards)):
            for name, _ in named.values():
                registry.check(name)
        self._config = config
        self._deadlines = deadlines
        self._pending: deque[_Grading] = deque()
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._ready: list[asyncio.Future[None]] = []  # whom the start waits for
        self._serving = 0  # workers
        self._wanted = config.workers
        self._most = max(config.max_workers, config.workers)
        self._growth: asyncio.TimerHandle | None = None  # set while items are pending
        self._pace = BATCH_SECONDS  # seconds that a grading takes; at first one goes alone
        self._broken: BaseException | None = None
        self._dispatching = False
        self._numbers = itertools.count()
        self.stats = GradingStats()

    async def __aenter__(self) -> Self:
        """Start all workers and wait until each has built all rewards; `ConfigError` if one cannot be built."""
        if self._confined:
            self._first = await asyncio.to_thread(self._confinement)
        loop = asyncio.get_running_loop()
        self._ready = [loop.create_future() for _ in range(self._config.workers)]
        for ready in self._ready:
            self._hire(ready)
        try:
            await asyncio.gather(*self._ready)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        """The verdict of the task's reward, or why there is none; raises only if the pool itself cannot go on."""
        if prompt.task not in self._rewards:
            raise ConfigError(f"there is no reward for task {prompt.task!r}: {', '.join(self._rewards)} have one")
        return (await self._grade(prompt, transcript)).score

    async def score_group(
        self, prompt: Prompt, transcripts: Sequence[Transcript], scores: Sequence[Score]
    ) -> tuple[Score, ...]:
        """The final scores of siblings that have `scores`, by the task's reward of groups: of all, or of none."""
        graded = await self._grade(prompt, transcripts, scores)
        if graded.score.status is not ScoreStatus.SCORED:
            return (graded.score,) * len(transcripts)
        if len(graded.siblings) != len(transcripts):
            detail = f"the grading process gave {len(graded.siblings)} verdicts on {len(transcripts)} siblings"
            return (Score(status=ScoreStatus.INFRASTRUCTURE, detail=detail),) * len(transcripts)
        return graded.siblings

    async def _grade(self, prompt: Prompt, *judged: Any) -> Graded:
        if self._broken is not None:
            raise self._broken
        try:
            content = pickle.dumps((prompt, *judged), pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise DataError(f"prompt {prompt.id} cannot be sent to a grading process: {error}") from error
        grading = _Grading(
            next(self._numbers), prompt.task, len(judged) > 1, content, asyncio.get_running_loop().create_future()
        )
        self._pending.append(grading)
        self._dispatch_soon()
        # Each grading ahead may use up its deadline, twice if it kills its worker, and each time a worker must start.
        ahead = len(self._pending) + sum(len(worker.batch) for worker in self._workers)
        patience = ahead * 2 * (self._config.deadline + START_SECONDS)
        return await self._deadlines.wait(
            grading.verdict, name="grade", owner="attempt", on=f"the grade of prompt {prompt.id}", deadline=patience
        )

    async def close(self) -> None:
        """End all processes, and all waits for them. May be called twice."""
        self._break(WorkerDied("the grading pool was closed"))
        self._look_for_growth()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for worker in self._workers:  # killed by their keepers, who were cancelled before they saw it
            await worker.process.wait()
        self._keepers.clear()
        self._workers.clear()

    # --- one worker after the other -----------------------------------------------------------------------------------

    def _hire(self, ready: asyncio.Future[None] | None = None) -> None:
        self._keepers = [keeper for keeper in self._keepers if not keeper.done()]
        self._keepers.append(asyncio.get_running_loop().create_task(self._keep(ready), name="grading worker"))

    async def _keep(self, ready: asyncio.Future[None] | None) -> None:
        """Keep one worker alive: consumes its answers, waits for them, is unblocked by its death, produces verdicts and
        a new worker. Ends the pool if a worker cannot be started, unless it is an additional one, which has no `ready`."""
        try:
            pauses = iter(() if ready is None else RESTART_SECONDS)
            while True:
                try:
                    worker = await self._start()
                except (ConfigError, WorkerDied, StallError, OSError):
                    self.stats.failed_starts += 1
                    if ready is None:
                        self._wanted -= 1
                        self._most = self._wanted
                        return
                    if not ready.done() or (pause := next(pauses, None)) is None:
                        raise
                    await asyncio.sleep(pause)
                    continue
                if ready is None:
                    worker.extra = True
                else:
                    succeed(ready, None)
                    pauses = iter(RESTART_SECONDS)
                await self._serve(worker)
                if worker.retired:
                    return
        except Exception as error:  # noqa: BLE001 - named boundary: those who wait for the pool raise it
            self._break(error)

    async def _serve(self, worker: _Worker) -> None:
        """Give work to a worker until it ends."""
        self._serving += 1
        try:
            self._now_idle(worker)
            while isinstance(answer := await worker.read(), Graded):
                if not worker.batch or answer.number != worker.batch[0].number:
                    break  # an answer to nothing that was asked
                self._answered(worker, answer)
        finally:
            self._serving -= 1
            await self._end(worker)
        self._recover(worker)

    async def _start(self) -> _Worker:
        """A worker that has built all rewards."""
        worker = await self._spawn()
        try:
            await self._wait_ready(worker)
        except BaseException:
            await self._end(worker)
            self._workers.discard(worker)
            raise
        return worker

    def _confinement(self) -> str:
        """What confines a worker; nothing where that cannot be had, and is not demanded."""
        if self._config.minimum_level == Level.LIMITS and (levels.probe().level or 0) < Level.CONFINED:
            return ""
        level = levels.require_level(self._config.minimum_level, "grading.minimum_level")
        readable = [*levels.python_sources(), str(Path(antiphon.__file__).parent)]
        readable += [path for path in sys.path if self._config.confine == "all" or path.endswith("-packages")]
        user_namespace = levels.probe().user_namespace
        return _CONFINE.format(level=int(level), readable=readable, user_namespace=user_namespace)

    async def _spawn(self) -> _Worker:
        gpu = self._gpus.take() if self._gpus else None
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-c",
                    _PROGRAM.format(
                        path=sys.path, first=self._first, descriptor=theirs.fileno(), cores=self._cores, gpu=gpu
                    ),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is ours to handle; killing the group ends what a reward started
                )
            except BaseException:
                writer.close()
                self._give_back(gpu)
                raise
        worker = _Worker(process, reader, writer, gpu)
        self._workers.add(worker)
        self.stats.processes += 1
        writer.write(frame_order(SetUp(self._rewards, self._group_rewards, os.getpid())))
        return worker

    async def _wait_ready(self, worker: _Worker) -> None:
        answer = await self._deadlines.wait(
            worker.read(), name="start", owner="the grading pool", on="a grading worker", deadline=START_SECONDS
        )
        if isinstance(answer, Failed):
            raise ConfigError(answer.message)
        if not isinstance(answer, Ready):
            code = await self._deadlines.wait(
                worker.process.wait(),
                name="end",
                owner="the grading pool",
                on="a grading worker",
                deadline=START_SECONDS,
            )
            raise WorkerDied(f"a grading worker ended with {_ending(code)} before it was ready")

    async def _end(self, worker: _Worker) -> None:
        """Make sure that nothing of the worker runs on, whatever ended it, and that it gets no more work."""
        if worker in self._idle:
            self._idle.remove(worker)
        if worker.timer is not None:
            worker.timer.cancel()
        worker.kill()
        worker.writer.close()
        self._give_back(worker.gpu)
        await worker.process.wait()

    def _give_back(self, gpu: str | None) -> None:
        if self._gpus is not None and gpu is not None:
            self._gpus.give_back(gpu)

    # --- how many ------------------------------------------------------------------------------------------------------

    def _look_for_growth(self) -> None:
        """While items are pending, the clock runs to the next worker."""
        if not self._pending or self._broken is not None or self._wanted >= self._most:
            if self._growth is not None:
                self._growth.cancel()
                self._growth = None
        elif self._growth is None:
            self._growth = asyncio.get_running_loop().call_later(GROW_SECONDS, self._grow)

    def _grow(self) -> None:
        self._growth = None
        if self._serving == self._wanted:  # else one is on its way
            self._wanted += 1
            self._hire()
        self._look_for_growth()

    def _retire(self, worker: _Worker) -> None:
        """End an additional worker that had nothing to do."""
        worker.timer = None
        if worker in self._idle:
            self._wanted -= 1
            self._idle.remove(worker)
            worker.retired = True
            worker.kill()

    # --- work and answers ---------------------------------------------------------------------------------------------

    def _dispatch_soon(self) -> None:
        """Dispatch once the callers of this turn of the event loop have all put in their work: they share a message."""
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        while self._idle and self._pending:
            share = min(
                -(-len(self._pending) // len(self._workers)), LARGEST_BATCH, int(BATCH_SECONDS / self._pace) or 1
            )
            taken = (self._pending.popleft() for _ in range(share))
            batch = [grading for grading in taken if not grading.verdict.done()]  # else its caller has gone
            if batch:
                worker = self._idle.pop()
                worker.batch.extend(batch)
                worker.since = asyncio.get_running_loop().time()
                self._time(worker, self._config.deadline, self._look_at)
                worker.writer.write(
                    frame_order([(each.number, each.task, each.together, each.content) for each in batch])
                )
        self._look_for_growth()

    def _now_idle(self, worker: _Worker) -> None:
        if worker.extra:  # it comes last, and so may go
            self._idle.insert(0, worker)
            self._time(worker, self._config.idle_seconds, self._retire)
        else:
            self._idle.append(worker)
        self._dispatch_soon()

    def _time(self, worker: _Worker, seconds: float, then: Callable[[_Worker], None]) -> None:
        if worker.timer is not None:
            worker.timer.cancel()
        worker.timer = asyncio.get_running_loop().call_later(seconds, then, worker)

    def _look_at(self, worker: _Worker) -> None:
        """Kill the worker if its item is overdue, else look again when it would be: one timer goes on over a batch."""
        worker.timer = None
        if not worker.batch:
            return
        loop = asyncio.get_running_loop()
        due = worker.since + self._config.deadline
        if loop.time() < due:
            worker.timer = loop.call_at(due, self._look_at, worker)
            return
        if worker.process.returncode is None:  # else it died by itself, and something it started holds its socket
            worker.overdue = worker.batch[0]
        worker.kill()

    def _answered(self, worker: _Worker, answer: Graded) -> None:
        grading = worker.batch.popleft()
        score = answer.score
        if answer.raised:
            self.stats.raised += 1
        elif score.status is ScoreStatus.SCORED:
            self.stats.scored += 1
        else:
            self.stats.ungraded += 1
        succeed(grading.verdict, answer)
        now = asyncio.get_running_loop().time()
        self._pace += (max(now - worker.since, 1e-6) - self._pace) / 8
        worker.since = now  # the worker is at the next item
        if not worker.batch:
            self._now_idle(worker)

    def _recover(self, worker: _Worker) -> None:
        """After a worker's end: judge the item it was at, and give back the others.

        What the worker had answered before it ended has been read by now, so an item that was overdue may be graded
        after all; then none is to blame.
        """
        self._workers.discard(worker)
        left = worker.batch
        culprit = left[0] if left else None
        if culprit is not None and culprit is worker.overdue:
            left.popleft()
            self.stats.timed_out += 1
            succeed(culprit.verdict, Graded(Score.ungraded(f"timed out after {self._config.deadline:g} s")))
        elif culprit is not None and worker.overdue is None:
            culprit.deaths += 1
            if culprit.deaths > 1:
                left.popleft()
                self.stats.died += 1
                detail = f"the grading process died twice, the last time with {_ending(worker.process.returncode or 0)}"
                succeed(culprit.verdict, Graded(Score(status=ScoreStatus.INFRASTRUCTURE, detail=detail)))
        self._pending.extendleft(reversed(left))

    def _break(self, error: BaseException) -> None:
        """No grading can be done any more: everyone who waits learns why."""
        self._broken = self._broken or error
        waiting = [*self._pending, *(grading for worker in self._workers for grading in worker.batch)]
        futures: list[asyncio.Future[Any]] = [*self._ready, *(grading.verdict for grading in waiting)]
        for future in futures:
            fail(future, self._broken)


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"

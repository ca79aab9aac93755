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
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from antiphon.core.deadlines import Deadlines, fail, succeed
from antiphon.core.errors import ConfigError, DataError, StallError, WorkerDiedError
from antiphon.core.processes.child import describe_exit
from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.tasks.base import Transcript
from antiphon.tasks.grading.gpus import GpuAssigner
from antiphon.tasks.grading.worker import END_PROFILE, START_PROFILE, Graded, Profiled
from antiphon.tasks.grading.worker_process import (
    START_SECONDS,
    Grading,
    PoolSettings,
    WorkerLauncher,
    WorkerProcess,
)
from antiphon.tasks.rewards import GROUP_REWARDS, REWARDS

LARGEST_BATCH = 64  # enough to pay for the message
BATCH_SECONDS = 0.1
GROW_SECONDS = 1.0  # longer than a burst takes; a worker takes about as long to start
RESTART_SECONDS = (1.0, 5.0)  # before a worker that was there is tried to be started again


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

    @staticmethod
    def sum(every: "Iterable[GradingStats]") -> "GradingStats":
        """Return the sums of several statistics."""
        return GradingStats(*map(sum, zip((0,) * len(fields(GradingStats)), *map(astuple, every), strict=True)))


class GradingPool:
    """Scores transcripts in processes. Use as `async with`; leaving it leaves no process behind."""

    def __init__(
        self,
        settings: PoolSettings,
        deadlines: Deadlines,
        cores: Sequence[int] = (),
        gpus: GpuAssigner | None = None,
        where: str = "",
    ) -> None:
        """Create a pool.

        Args:
            settings: Rewards, number of workers, deadline of a grading and confinement.
            deadlines: Bounds the waits for starts and gradings.
            cores: Cores that workers, and what they start, run on; empty for all.
            gpus: Assigns one GPU to each worker; None if workers see all.
            where: Where the pool is, for the records of verdicts; empty for the run's own process.
        """
        for registry, named in ((REWARDS, settings.rewards), (GROUP_REWARDS, settings.group_rewards)):
            for name, _ in named.values():
                registry.check(name)
        self._settings = settings
        self._where = where
        self._launcher = WorkerLauncher(settings, deadlines, cores, gpus)
        self._config = config = settings.config
        self._deadlines = deadlines
        self._pending: deque[Grading] = deque()
        self._idle: list[WorkerProcess] = []
        self._workers: set[WorkerProcess] = set()
        self._supervisors: list[asyncio.Task[None]] = []
        self._ready: list[asyncio.Future[None]] = []  # whom the start waits for
        self._serving: list[WorkerProcess] = []
        self._wanted = config.workers
        self._max_workers = max(config.max_workers, config.workers)
        self._scale_up_timer: asyncio.TimerHandle | None = None  # set while items are pending
        self._grading_seconds = BATCH_SECONDS  # seconds that a grading takes; at first one goes alone
        self._broken: BaseException | None = None
        self._dispatching = False
        self._numbers = itertools.count()
        self.stats = GradingStats()

    async def __aenter__(self) -> Self:
        """Start all workers and wait until each has built all rewards; `ConfigError` if one cannot be built."""
        if self._settings.confined:
            await self._launcher.confine()
        loop = asyncio.get_running_loop()
        self._ready = [loop.create_future() for _ in range(self._config.workers)]
        for ready in self._ready:
            self._spawn_worker(ready)
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
        """Return the score by the task's reward, or the reason why there is none.

        Raises:
            WorkerDiedError: The pool cannot go on.
        """
        if prompt.task not in self._settings.rewards:
            known = self._settings.rewards
            message = f"there is no reward for task {prompt.task!r}: {', '.join(known)} have one"
            raise ConfigError(message, key="tasks", value=prompt.task, valid=known)
        return (await self._grade(prompt, transcript)).score

    async def score_group(
        self, prompt: Prompt, transcripts: Sequence[Transcript], scores: Sequence[Score]
    ) -> tuple[Score, ...]:
        """Return the final scores of siblings by the task's group reward: of all siblings, or of none."""
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
        grading = Grading(
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

    async def start_profile(self, memory: bool) -> None:
        """Begin to profile the processes that there are, with Python's profiler; of their `memory` it knows nothing."""
        for worker in self._serving:
            worker.send(START_PROFILE)

    async def write_profile(self, folder: Path, prefix: str) -> None:
        """Write the profile of each process as a text file."""
        running, loop = [*self._serving], asyncio.get_running_loop()
        for worker in running:
            worker.profile = loop.create_future()
            worker.send(END_PROFILE)
        for worker in running:
            assert worker.profile is not None
            if text := await worker.profile:  # one that hangs is killed, which ends this
                folder.mkdir(parents=True, exist_ok=True)
                file = folder / f"{prefix}{worker.name.replace(' ', '-')}.txt"
                await asyncio.to_thread(file.write_text, text, encoding="utf-8")
            worker.profile = None

    async def close(self) -> None:
        """End all processes, and all waits for them. May be called twice."""
        self._fail(WorkerDiedError("the grading pool was closed"))
        self._schedule_scale_up()
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        for worker in self._workers:  # killed by their supervisors, which were cancelled before its end
            await worker.child.wait()
        self._supervisors.clear()
        self._workers.clear()

    # --- life of a worker ------------------------------------------------------------------------------------------------

    def _spawn_worker(self, ready: asyncio.Future[None] | None = None) -> None:
        self._supervisors = [supervisor for supervisor in self._supervisors if not supervisor.done()]
        self._supervisors.append(asyncio.get_running_loop().create_task(self._supervise(ready), name="grading worker"))

    async def _supervise(self, ready: asyncio.Future[None] | None) -> None:
        """Keep one worker alive.

        Consumes its answers, waits for them, is unblocked by its death, produces verdicts and a new worker. Ends the pool if a
        worker cannot be started, unless it is an additional one, which has no `ready`.
        """
        try:
            pauses = iter(() if ready is None else RESTART_SECONDS)
            while True:
                try:
                    worker = await self._start()
                except (ConfigError, WorkerDiedError, StallError, OSError):
                    self.stats.failed_starts += 1
                    if ready is None:
                        self._wanted -= 1
                        self._max_workers = self._wanted
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
            self._fail(error)

    async def _serve(self, worker: WorkerProcess) -> None:
        """Give work to a worker until it ends."""
        self._serving.append(worker)
        try:
            self._set_idle(worker)
            while isinstance(answer := await worker.read(), Graded | Profiled):
                if isinstance(answer, Profiled):
                    if worker.profile is None:
                        break
                    succeed(worker.profile, answer.text)
                    continue
                if not worker.batch or answer.number != worker.batch[0].number:
                    break  # an answer to nothing that was asked
                self._on_answer(worker, answer)
        finally:
            self._serving.remove(worker)
            if worker.profile is not None:
                succeed(worker.profile, "")
            await self._stop(worker)
        self._recover(worker)

    async def _start(self) -> WorkerProcess:
        """Start a worker and wait until it has built all rewards."""
        self.stats.processes += 1
        worker = self._launcher.spawn(f"process {self.stats.processes}{self._where}")
        self._workers.add(worker)
        try:
            await self._launcher.wait_ready(worker)
        except BaseException:
            await self._stop(worker)
            self._workers.discard(worker)
            raise
        return worker

    async def _stop(self, worker: WorkerProcess) -> None:
        """Make sure that nothing of the worker runs on, whatever ended it, and that it gets no more work."""
        if worker in self._idle:
            self._idle.remove(worker)
        if worker.timer is not None:
            worker.timer.cancel()
        await self._launcher.stop(worker)

    # --- number of workers ------------------------------------------------------------------------------------------------

    def _schedule_scale_up(self) -> None:
        """Start the timer of the next worker while gradings are pending; else cancel it."""
        if not self._pending or self._broken is not None or self._wanted >= self._max_workers:
            if self._scale_up_timer is not None:
                self._scale_up_timer.cancel()
                self._scale_up_timer = None
        elif self._scale_up_timer is None:
            self._scale_up_timer = asyncio.get_running_loop().call_later(GROW_SECONDS, self._scale_up)

    def _scale_up(self) -> None:
        self._scale_up_timer = None
        if len(self._serving) == self._wanted:  # else one is on its way
            self._wanted += 1
            self._spawn_worker()
        self._schedule_scale_up()

    def _retire(self, worker: WorkerProcess) -> None:
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
                -(-len(self._pending) // len(self._workers)),
                LARGEST_BATCH,
                int(BATCH_SECONDS / self._grading_seconds) or 1,
            )
            taken = (self._pending.popleft() for _ in range(share))
            batch = [grading for grading in taken if not grading.verdict.done()]  # else its caller has gone
            if batch:
                worker = self._idle.pop()
                worker.batch.extend(batch)
                worker.since = asyncio.get_running_loop().time()
                self._set_timer(worker, self._config.deadline, self._check_deadline)
                worker.send([(each.number, each.task, each.together, each.content) for each in batch])
        self._schedule_scale_up()

    def _set_idle(self, worker: WorkerProcess) -> None:
        if worker.extra:  # it comes last, and so may go
            self._idle.insert(0, worker)
            self._set_timer(worker, self._config.idle_seconds, self._retire)
        else:
            self._idle.append(worker)
        self._dispatch_soon()

    def _set_timer(self, worker: WorkerProcess, seconds: float, then: Callable[[WorkerProcess], None]) -> None:
        if worker.timer is not None:
            worker.timer.cancel()
        worker.timer = asyncio.get_running_loop().call_later(seconds, then, worker)

    def _check_deadline(self, worker: WorkerProcess) -> None:
        """Kill the worker if its item is overdue, else look again when it would be: one timer goes on over a batch."""
        worker.timer = None
        if not worker.batch:
            return
        loop = asyncio.get_running_loop()
        due = worker.since + self._config.deadline
        if loop.time() < due:
            worker.timer = loop.call_at(due, self._check_deadline, worker)
            return
        if not worker.child.has_ended:  # else it died by itself, and something it started holds its socket
            worker.overdue = worker.batch[0]
        worker.kill()

    def _on_answer(self, worker: WorkerProcess, answer: Graded) -> None:
        grading = worker.batch.popleft()
        score = answer.score
        if score.raised:
            self.stats.raised += 1
        elif score.status is ScoreStatus.SCORED:
            self.stats.scored += 1
        else:
            self.stats.ungraded += 1
        succeed(grading.verdict, _signed(answer, worker.name))
        now = asyncio.get_running_loop().time()
        self._grading_seconds += (max(now - worker.since, 1e-6) - self._grading_seconds) / 8
        worker.since = now  # the worker is at the next item
        if not worker.batch:
            self._set_idle(worker)

    def _recover(self, worker: WorkerProcess) -> None:
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
            late = Graded(Score.ungraded(f"timed out after {self._config.deadline:g} s"))
            succeed(culprit.verdict, _signed(late, worker.name))
        elif culprit is not None and worker.overdue is None:
            culprit.deaths += 1
            if culprit.deaths > 1:
                left.popleft()
                self.stats.died += 1
                detail = f"the grading process died twice; the last time it {describe_exit(worker.child.exit_code)}"
                broken = Graded(Score(status=ScoreStatus.INFRASTRUCTURE, detail=detail))
                succeed(culprit.verdict, _signed(broken, worker.name))
        self._pending.extendleft(reversed(left))

    def _fail(self, error: BaseException) -> None:
        """No grading can be done any more: everyone who waits learns why."""
        self._broken = self._broken or error
        waiting = [*self._pending, *(grading for worker in self._workers for grading in worker.batch)]
        futures: list[asyncio.Future[Any]] = [*self._ready, *(grading.verdict for grading in waiting)]
        for future in futures:
            fail(future, self._broken)


def _signed(answer: Graded, grader: str) -> Graded:
    """Return a verdict that names its grader."""
    siblings = tuple(replace(score, grader=grader) for score in answer.siblings)
    return Graded(replace(answer.score, grader=grader), siblings)

"""Attempts whose scores need each other: a reward of groups judges siblings together.

An attempt of such a task is not at its end when it has its own score: it waits until `group_size` of its group have one, and
ends with the score that the group's reward then gives it. So the scheduler, the ledger and a replay see final scores only, and
a group is complete as ever. Who comes later, redundant, waits for a next round, and is aborted when the first has made the
group complete; if the round has no verdict, all of it has failed, each is tried again, and those that wait are judged with
them. Nobody judges less than a whole group: what an earlier life of the run has left of one is generated again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from antiphon.core.deadlines import Deadlines, succeed
from antiphon.core.types import AttemptId, AttemptStatus, PolicyVersion, Prompt, Sampling, Score, Trajectory
from antiphon.rollout.attempt import AttemptRunner, UnscoredAttempt
from antiphon.tasks.base import Transcript

Judge = Callable[[Prompt, Sequence[Transcript], Sequence[Score]], Awaitable[Sequence[Score]]]
_Waiting = tuple[UnscoredAttempt, Score, asyncio.Future[Score]]


class GroupScoring:
    """Plays attempts as `episodes` does, and scores those of `tasks` together."""

    def __init__(
        self,
        episodes: AttemptRunner,
        judge: Judge,
        tasks: frozenset[str],
        group_size: int,
        deadlines: Deadlines,
        timeout: float,
    ) -> None:
        """`timeout` is what an attempt may wait for its siblings, in seconds."""
        self._episodes = episodes
        self._judge = judge
        self._tasks = tasks
        self._group_size = group_size
        self._deadlines = deadlines
        self._timeout = timeout
        self._groups: dict[int, dict[AttemptId, _Waiting]] = {}  # those of the next round

    async def run(self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion) -> Trajectory:
        """Play one attempt, and score it with its siblings."""
        return await self.score(await self.generate(prompt, attempt, started))

    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling | None = None
    ) -> UnscoredAttempt:
        """Play one attempt to its end."""
        return await self._episodes.generate(prompt, attempt, started, sampling)

    async def score(self, played: UnscoredAttempt) -> Trajectory:
        """Score what was played; if that succeeds, with its siblings."""
        alone = await self._episodes.score(played)
        if played.prompt.task not in self._tasks or alone.meta.status is not AttemptStatus.FINISHED:
            return alone
        score = await self._together(played, alone.meta.score)
        return played.trajectory(score, asyncio.get_running_loop().time())

    async def _together(self, played: UnscoredAttempt, score: Score) -> Score:
        attempt, verdict = played.attempt, asyncio.get_running_loop().create_future()
        waiting = self._groups.setdefault(attempt.group, {})
        waiting[attempt] = played, score, verdict
        try:
            if len(waiting) == self._group_size:
                await self._judge_round(self._groups.pop(attempt.group))
            on, deadline = f"the siblings of attempt {attempt}", self._timeout
            return await self._deadlines.wait(
                verdict, name="siblings", owner="attempt", on=on, deadline=deadline, key="rollout.timeout"
            )
        finally:
            del waiting[attempt]
            if not waiting and self._groups.get(attempt.group) is waiting:
                del self._groups[attempt.group]

    async def _judge_round(self, waiting: dict[AttemptId, _Waiting]) -> None:
        ordered = [waiting[attempt] for attempt in sorted(waiting)]  # a verdict must not depend on who came first
        transcripts, scores = [played.transcript for played, _, _ in ordered], [score for _, score, _ in ordered]
        judged = await self._judge(ordered[0][0].prompt, transcripts, scores)
        for (_, _, verdict), score in zip(ordered, judged, strict=True):
            succeed(verdict, score)

"""Scores siblings together, for tasks whose reward judges a group.

An attempt of such a task does not end with its own score: it waits until `group_size` attempts of its group have one, and
ends with the score that the group's reward then gives it. So the scheduler, the ledger and a replay see final scores only.

A redundant attempt that comes later waits for a second round, and is aborted when the first round has completed the group.
If a round fails, all its attempts fail; each is tried again, and those that wait are scored with them. Fewer than
`group_size` attempts are never scored: what an earlier lineage left of a group is generated again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from antiphon.core.deadlines import Deadlines, succeed
from antiphon.core.types import AttemptId, AttemptStatus, PolicyVersion, Prompt, Sampling, Score, Trajectory
from antiphon.rollout.attempt import AttemptRunner, UnscoredAttempt
from antiphon.tasks.base import Transcript

ScoreGroup = Callable[[Prompt, Sequence[Transcript], Sequence[Score]], Awaitable[Sequence[Score]]]
_Waiting = tuple[UnscoredAttempt, Score, asyncio.Future[Score]]  # the attempt, its own score, its final score


class GroupScoring:
    """An `AttemptRunner` that scores the attempts of some tasks together."""

    def __init__(
        self,
        episodes: AttemptRunner,
        score_group: ScoreGroup,
        tasks: frozenset[str],
        group_size: int,
        deadlines: Deadlines,
        timeout: float,
    ) -> None:
        """Create a runner.

        Args:
            episodes: Runs attempts and gives each its own score.
            score_group: Returns the final scores of siblings from their transcripts and own scores.
            tasks: Names of the tasks whose siblings are scored together.
            group_size: Attempts that are scored together.
            deadlines: Bound every wait.
            timeout: Seconds that an attempt may wait for its siblings.
        """
        self._episodes = episodes
        self._score_group = score_group
        self._tasks = tasks
        self._group_size = group_size
        self._deadlines = deadlines
        self._timeout = timeout
        self._groups: dict[int, dict[AttemptId, _Waiting]] = {}  # attempts that wait for the next round, by group

    async def run(self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion) -> Trajectory:
        """Run one attempt, and score it with its siblings."""
        return await self.score(await self.generate(prompt, attempt, started))

    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling | None = None
    ) -> UnscoredAttempt:
        """Run one attempt to its last token."""
        return await self._episodes.generate(prompt, attempt, started, sampling)

    async def score(self, unscored: UnscoredAttempt) -> Trajectory:
        """Score an attempt; if that succeeds, with its siblings."""
        alone = await self._episodes.score(unscored)
        if unscored.prompt.task not in self._tasks or alone.meta.status is not AttemptStatus.FINISHED:
            return alone
        score = await self._score_with_siblings(unscored, alone.meta.score)
        return unscored.to_trajectory(score, asyncio.get_running_loop().time())

    async def _score_with_siblings(self, unscored: UnscoredAttempt, own: Score) -> Score:
        attempt, final = unscored.attempt, asyncio.get_running_loop().create_future()
        waiting = self._groups.setdefault(attempt.group, {})
        waiting[attempt] = unscored, own, final
        try:
            if len(waiting) == self._group_size:
                await self._score_round(self._groups.pop(attempt.group))
            on, deadline = f"the siblings of attempt {attempt}", self._timeout
            return await self._deadlines.wait(
                final, name="siblings", owner="attempt", on=on, deadline=deadline, key="rollout.timeout"
            )
        finally:
            del waiting[attempt]
            if not waiting and self._groups.get(attempt.group) is waiting:
                del self._groups[attempt.group]

    async def _score_round(self, waiting: dict[AttemptId, _Waiting]) -> None:
        ordered = [waiting[attempt] for attempt in sorted(waiting)]  # a score must not depend on who came first
        transcripts, own = [unscored.transcript for unscored, _, _ in ordered], [score for _, score, _ in ordered]
        scores = await self._score_group(ordered[0][0].prompt, transcripts, own)
        for (_, _, final), score in zip(ordered, scores, strict=True):
            succeed(final, score)

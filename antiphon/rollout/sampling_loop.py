"""Sampling loops of the user's own: `rollout.sampler: package.module:function`.

    async def best_two_of_four(group: SamplingGroup) -> None:
        attempts = await asyncio.gather(*(group.generate(temperature=1.2) for _ in range(4)))
        attempts = sorted(attempts, key=lambda attempt: attempt.completion_tokens)
        for attempt in attempts[:2]:
            await group.reward(attempt)

The function is called once for each group. The group is complete with the first `expected` trajectories that were rewarded
and are usable. Then the function is cancelled, and every attempt that it still runs. If it returns before, the group fails.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from antiphon.core.types import AttemptId, Prompt, Trajectory
from antiphon.rollout.attempt import UnscoredAttempt


class SamplingGroup:
    """The group that a sampling loop fills."""

    def __init__(
        self,
        prompt: Prompt,
        expected: int,
        generate: Callable[[dict[str, Any]], Awaitable[UnscoredAttempt]],
        reward: Callable[[UnscoredAttempt], Awaitable[Trajectory]],
        drop: Callable[[AttemptId], None],
    ) -> None:
        """Create a group; the callables are the scheduler's."""
        self.prompt = prompt
        self.expected = expected  # trajectories that complete the group
        self._generate = generate
        self._reward = reward
        self._drop = drop

    async def generate(self, **sampling: Any) -> UnscoredAttempt:
        """Run an attempt to its last token; cancel this to abort it.

        Args:
            sampling: Fields of `rollout.sampling` to change for this attempt.
        """
        return await self._generate(sampling)

    async def reward(self, unscored: UnscoredAttempt) -> Trajectory:
        """Score an attempt; if that succeeds, it counts towards the group."""
        return await self._reward(unscored)

    def abort(self, unscored: UnscoredAttempt) -> None:
        """Drop an attempt instead of scoring it."""
        self._drop(unscored.attempt)


class SamplingLoop(Protocol):
    """A function that runs and rewards attempts until its group is complete."""

    async def __call__(self, group: SamplingGroup) -> None:
        """Fill the group."""

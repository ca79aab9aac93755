"""Sampling a group in a way of the user's own: `rollout.sampler: package.module:function`.

    async def best_two_of_four(group: SamplingGroup) -> None:
        async def one() -> UnscoredAttempt:
            return await group.generate(temperature=1.2)

        played = await asyncio.gather(*(one() for _ in range(4)))
        played.sort(key=lambda each: each.completion_tokens)
        for each in played[:2]:
            await group.reward(each)

The function is called once a group. The group is complete with the first `expected` trajectories that were rewarded and are
usable; then the function is cancelled, and what it still has running with it. If it returns before, the group fails.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from antiphon.core.types import AttemptId, Prompt, Trajectory
from antiphon.rollout.attempt import UnscoredAttempt


class SamplingGroup:
    """What a sampling loop may do."""

    def __init__(
        self,
        prompt: Prompt,
        expected: int,
        generate: Callable[[dict[str, Any]], Awaitable[UnscoredAttempt]],
        reward: Callable[[UnscoredAttempt], Awaitable[Trajectory]],
        drop: Callable[[AttemptId], None],
    ) -> None:
        self.prompt = prompt
        self.expected = expected  # trajectories that complete the group
        self._generate = generate
        self._reward = reward
        self._drop = drop

    async def generate(self, **sampling: Any) -> UnscoredAttempt:
        """Start an attempt and play it to its end; `sampling` changes what the configuration says. To abort it, cancel."""
        return await self._generate(sampling)

    async def reward(self, played: UnscoredAttempt) -> Trajectory:
        """Score what was played; if that succeeds, it counts towards the group."""
        return await self._reward(played)

    def abort(self, played: UnscoredAttempt) -> None:
        """Do without what was played."""
        self._drop(played.attempt)


class SamplingLoop(Protocol):
    """The function."""

    async def __call__(self, group: SamplingGroup) -> None:
        """Play and reward until the group is complete."""

"""Attempts that an environment of Atropos runs and scores, a whole group at a time.

An environment of Atropos collects the trajectories of an item together and may compare them. So the attempts of a group wait
until all have come, and then the environment's process runs `collect_trajectories` once; each of its completions is sampled,
and recorded, as one attempt's. All attempts of a group get a verdict, or all fail: an attempt that ends early ends the others.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from antiphon.core.errors import ConfigError, SandboxError
from antiphon.core.types import AttemptId, Prompt, Score
from antiphon.rollout.agents import Access, Outcome, run_agent
from antiphon.rollout.attempt import AttemptInputs
from antiphon.rollout.gateway.server import Gateway

Collect = Callable[[int, Sequence[str]], Awaitable[Sequence[Score]]]  # `host.GroupCollector.collect`


@dataclass(slots=True, eq=False)
class _WaitingGroup:
    """Attempts of a group that have come so far, with their keys."""

    keys: dict[AttemptId, str] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    scores: asyncio.Task[Mapping[AttemptId, Score]] | None = None


class AtroposAgent:
    """Runs the attempts of a task with an environment of Atropos; each returns its `Score` as the result of an agent."""

    def __init__(self, collect: Collect, gateway: Gateway, group_size: int, seconds: float) -> None:
        """Create an agent.

        Args:
            collect: Has the environment run the attempts with these keys at an item, and returns their scores.
            gateway: Answers the environment's requests.
            group_size: Attempts of a group. In an evaluation each attempt is a group of its own.
            seconds: Time limit of an attempt.
        """
        self._collect = collect
        self._gateway = gateway
        self._group_size = group_size
        self._seconds = seconds
        self._waiting: dict[int, _WaitingGroup] = {}  # by the number of the group
        self._scored: set[int] = set()  # numbers of groups whose attempts have a verdict

    async def run(self, inputs: AttemptInputs) -> Outcome:
        """Run one attempt, when its siblings have come."""

        async def join(access: Access, prompt: Prompt) -> Score:
            if inputs.attempt.group < 0:
                return (await self._score(prompt, {inputs.attempt: access.key}))[inputs.attempt]
            return await self._join_group(inputs.attempt, prompt, access.key)

        return await run_agent(join, self._gateway, inputs, seconds=self._seconds)

    async def _join_group(self, attempt: AttemptId, prompt: Prompt, key: str) -> Score:
        """Wait until the group is complete, and return the score of an attempt of it."""
        if attempt.group in self._scored:
            raise SandboxError("the environment has scored its group before, and scores whole groups alone")
        group = self._waiting.setdefault(attempt.group, _WaitingGroup())
        group.keys[attempt] = key
        try:
            if len(group.keys) == self._group_size:
                del self._waiting[attempt.group]
                group.scores = asyncio.create_task(self._score(prompt, group.keys), name=f"group {attempt.group}")
                group.complete.set()
            await group.complete.wait()
            assert group.scores is not None
            await asyncio.wait([group.scores])
            if group.scores.cancelled():
                raise SandboxError("a sibling ended before the environment had scored the group")
            score = group.scores.result()[attempt]
            self._scored.add(attempt.group)
            return score
        finally:
            if group.scores is None:
                del group.keys[attempt]  # its next try takes its place
            else:
                group.scores.cancel()

    async def _score(self, prompt: Prompt, keys: Mapping[AttemptId, str]) -> Mapping[AttemptId, Score]:
        """Have the environment run attempts at a prompt's item; a score must not depend on which of them came first."""
        ordered = sorted(keys)
        scores = await self._collect(_read_index(prompt), [keys[attempt] for attempt in ordered])
        return dict(zip(ordered, scores, strict=True))


def _read_index(prompt: Prompt) -> int:
    """Return the number of a prompt's item."""
    payload: Any = prompt.payload
    index = payload.get("index") if isinstance(payload, Mapping) else None
    if not isinstance(index, int) or index < 0:
        message = f"prompt {prompt.id!r} has no item of its environment: its index is {index!r}; the source 'numbered' has them"
        raise ConfigError(message, key="tasks.prompts.source", value=index, valid=("numbered",))
    return index

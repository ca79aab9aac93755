"""The seams of a task: where prompts come from, what the policy acts in, who judges."""

import math
import reprlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from antiphon.core.types import Message, Prompt, Score, Turn

Reset = tuple[str, dict[str, Any]]
Step = tuple[str, float, bool, bool, dict[str, Any]]


FLAG_PREFIX = "mark/"
"""Prefix of reward-hacking flags among the parts of a score, see `tasks.reward_checks.reward_hacking_signals`."""


class Environment(Protocol):
    """A single-use world of text, in the shape of Gymnasium and GEM. Methods may be plain or `async`."""

    def reset(self, seed: int) -> Reset | Awaitable[Reset]:
        """Begin; return the first observation and info."""

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Act; return observation, reward, terminated, truncated, info."""

    def close(self) -> Awaitable[None] | None:
        """Give back what the environment holds."""


class Reward(Protocol):
    """Judges one trajectory. Runs in a worker process that may be killed; may raise: that leaves the trajectory ungraded."""

    def __call__(self, prompt: Prompt, transcript: "Transcript") -> Score | float:
        """The verdict on `transcript` as an answer to `prompt`; a float stands for a scored verdict."""


class GroupReward(Protocol):
    """Judges the siblings of a group together, once each has a score of its own; runs where rewards do."""

    def __call__(
        self, prompt: Prompt, transcripts: "Sequence[Transcript]", scores: Sequence[Score]
    ) -> Sequence[Score | float]:
        """The final verdict on each, in their order. May raise: that leaves them all ungraded."""


def as_score(verdict: Any) -> Score:
    """Return a reward's verdict as a score of plain floats; `TypeError` if it is neither a score nor a number."""
    if isinstance(verdict, Score):
        parts = {str(name): float(value) for name, value in verdict.parts.items()}
        return replace(verdict, parts=parts, turns=tuple(map(float, verdict.turns)))
    if isinstance(verdict, str) or not hasattr(verdict, "__float__"):
        raise TypeError(f"the reward returned {type(verdict).__name__}, expected a float or a Score")
    return Score.of(float(verdict))


def as_reset(told: Any) -> Reset:
    """What an environment's `reset` returned; `TypeError` if it is not an observation and info."""
    try:
        observation, info = told
    except (TypeError, ValueError):
        raise TypeError(f"reset returned {_short(told)}, expected (observation, info)") from None
    return _text("reset", observation), _mapping("reset", info)


def as_step(told: Any) -> Step:
    """What an environment's `step` returned; `TypeError` if it is not the five things that it should be."""
    try:
        observation, reward, terminated, truncated, info = told
        reward = float(reward)
    except (TypeError, ValueError):
        expected = "(observation, reward, terminated, truncated, info)"
        raise TypeError(f"step returned {_short(told)}, expected {expected}") from None
    if not math.isfinite(reward):
        raise TypeError(f"step returned a reward of {reward}")
    return _text("step", observation), reward, bool(terminated), bool(truncated), _mapping("step", info)


def _text(method: str, observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"{method} returned an observation that is {_short(observation)}, expected text")
    return observation


def _mapping(method: str, info: Any) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise TypeError(f"{method} returned an info that is {_short(info)}, expected a dict")
    return dict(info)


def _short(value: Any) -> str:
    return reprlib.repr(value)


class Transcript:
    """What a reward sees of a trajectory: the messages, the last response, and what the environment said."""

    __slots__ = ("messages", "result", "truncated", "turns")

    def __init__(
        self, messages: Sequence[Message], turns: Sequence[Turn] = (), truncated: bool = False, result: Any = None
    ) -> None:
        """`result` is what an agent returned, or wrote to standard output."""
        self.messages = tuple(messages)
        self.turns = tuple(turns)
        self.truncated = truncated
        self.result = result

    @property
    def response(self) -> str:
        """Text of the last assistant message; empty if there is none."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")


class AsyncReward(Protocol):
    """A reward that waits for someone else to judge. It runs in the controller: it must never compute for long. It may have a
    `close`, plain or `async`."""

    async def __call__(self, prompt: Prompt, transcript: Transcript) -> Score | float:
        """See `Reward`."""


class Generate(Protocol):
    """Asks a model, and is handed to a reward that needs one."""

    async def __call__(self, messages: Sequence[Message]) -> str:
        """What the model replies. `Unreachable` if there is no reply to be had."""


class Unreachable(Exception):
    """A model that a reward asks does not answer: that says nothing about what was to be judged."""

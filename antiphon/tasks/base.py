"""The interfaces of a task: environments, rewards, and the transcript that a reward sees."""

import math
import reprlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from antiphon.core.types import IMAGE_MARKER, Message, Prompt, Score, Turn

Reset = tuple[str, dict[str, Any]]
Step = tuple[str, float, bool, bool, dict[str, Any]]

# Keys of an info: could the last action be read and done, did it change anything, was the episode a success.
ENVIRONMENT_MEASURES = frozenset({"valid", "effective", "success"})

FLAG_PREFIX = "mark/"
"""Prefix of reward-hacking flags among the parts of a score, see `tasks.reward_checks.reward_hacking_signals`."""


class Environment(Protocol):
    """A single-use text environment in the shape of Gymnasium and GEM. Methods may be plain or `async`."""

    def reset(self, seed: int) -> Reset | Awaitable[Reset]:
        """Begin an episode; return the first observation and info.

        For a vision-language model, `info["images"]` of this method and of `step` has image files as bytes, one for each
        `<image>` in the observation.
        """

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Take one action; return observation, reward, terminated, truncated, info."""

    def close(self) -> Awaitable[None] | None:
        """Release what the environment holds."""


class Reward(Protocol):
    """Scores one trajectory in a worker process that may be killed; if it raises, the trajectory is left ungraded."""

    def __call__(self, prompt: Prompt, transcript: "Transcript") -> Score | float:
        """Score `transcript` as an answer to `prompt`; a float stands for a score."""


class GroupReward(Protocol):
    """Scores the siblings of a group together, once each has a score of its own; runs where rewards run."""

    def __call__(
        self, prompt: Prompt, transcripts: "Sequence[Transcript]", scores: Sequence[Score]
    ) -> Sequence[Score | float]:
        """Return the final score of each, in their order; if it raises, all are left ungraded."""


def as_score(result: Any) -> Score:
    """Return a reward's result as a score of plain floats; `TypeError` if it is neither a score nor a number."""
    if isinstance(result, Score):
        parts = {str(name): float(value) for name, value in result.parts.items()}
        return replace(result, parts=parts, turns=tuple(map(float, result.turns)))
    if isinstance(result, str) or not hasattr(result, "__float__"):
        hint = "; write it as `async def`, so that it is awaited" if isinstance(result, Awaitable) else ""
        raise TypeError(f"the reward returned {type(result).__name__}, expected a float or a Score{hint}")
    return Score.of(float(result))


def as_reset(result: Any) -> Reset:
    """Check what `reset` returned; `TypeError` if it is not an observation and info."""
    try:
        observation, info = result
    except (TypeError, ValueError):
        raise TypeError(f"reset returned {_short(result)}, expected (observation, info)") from None
    return _text("reset", observation), _info("reset", observation, info)


def as_step(result: Any) -> Step:
    """Check what `step` returned; `TypeError` if it is not the five values of a step."""
    try:
        observation, reward, terminated, truncated, info = result
        reward = float(reward)
    except (TypeError, ValueError):
        expected = "(observation, reward, terminated, truncated, info)"
        raise TypeError(f"step returned {_short(result)}, expected {expected}") from None
    if not math.isfinite(reward):
        raise TypeError(f"step returned a reward of {reward}")
    return _text("step", observation), reward, bool(terminated), bool(truncated), _info("step", observation, info)


def _text(method: str, observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"{method} returned an observation that is {_short(observation)}, expected text")
    return observation


def _info(method: str, observation: str, info: Any) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise TypeError(f"{method} returned an info that is {_short(info)}, expected a dict")
    given, images = dict(info), info.get("images")
    good = isinstance(images, list | tuple) and all(isinstance(image, bytes) for image in images)
    count = len(images) if good and images is not None else 0
    if images is not None and IMAGE_MARKER in observation and observation.count(IMAGE_MARKER) != count:
        raise TypeError(
            f"{method} returned an observation with {observation.count(IMAGE_MARKER)} times {IMAGE_MARKER}, and images that "
            f"are {_short(images)}, expected as many files as bytes"
        )
    if not good or IMAGE_MARKER not in observation:  # what else an environment calls so
        given.pop("images", None)
    return given


def _short(value: Any) -> str:
    return reprlib.repr(value)


class Transcript:
    """The view of a trajectory that a reward gets: messages and turns."""

    __slots__ = ("messages", "result", "truncated", "turns")

    def __init__(
        self, messages: Sequence[Message], turns: Sequence[Turn] = (), truncated: bool = False, result: Any = None
    ) -> None:
        """Make a transcript; `result` is what an agent returned or wrote to standard output."""
        self.messages = tuple(messages)
        self.turns = tuple(turns)
        self.truncated = truncated
        self.result = result

    @property
    def response(self) -> str:
        """Text of the last assistant message; empty if there is none."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")


class AsyncReward(Protocol):
    """A reward that waits for another service.

    It runs in the controller, so it must never compute for long. It may have a `close`, plain or `async`.
    """

    async def __call__(self, prompt: Prompt, transcript: Transcript) -> Score | float:
        """Score `transcript` as an answer to `prompt`."""


class Generate(Protocol):
    """A function that asks a model, for rewards that need one."""

    async def __call__(self, messages: Sequence[Message]) -> str:
        """Return the model's reply; `UnreachableError` if there is none."""


class UnreachableError(Exception):
    """A model that a reward asks does not answer, so nothing is known about the trajectory."""

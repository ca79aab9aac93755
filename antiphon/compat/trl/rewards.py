"""Rewards with TRL's signature, `f(prompts, completions, **columns) -> list`, as a reward of a run."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.tasks.base import Transcript

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
UNSUPPORTED = ("completion_ids", "trainer_state", "environments")  # arguments of TRL's that a grading process lacks
RewardFunction = Callable[..., Any]


class TrlReward:
    """The weighted sum of reward functions with TRL's signature.

    Each is called with one completion at a time, in a process that may be killed. A function that returns None for it is left
    out of the sum; if all do, the response is ungraded.
    """

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float], *, is_chat: bool) -> None:
        """Take functions as TRL does.

        Args:
            functions: Plain or `async` functions.
            weights: One for each.
            is_chat: Prompts are lists of messages; completions then are, too.
        """
        self._functions, self._weights, self._is_chat = tuple(functions), tuple(map(float, weights)), is_chat

    def __call__(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Score one response; its parts are the values of the functions by their names."""
        row: Mapping[str, Any] = prompt.payload
        text = transcript.response
        given = {name: [value] for name, value in row.items() if name not in NOT_COLUMNS}
        given["prompts"] = [row["prompt"]]
        given["completions"] = [[{"role": "assistant", "content": text}] if self._is_chat else text]
        parts: dict[str, float] = {}
        total = 0.0
        for name, function, weight in zip(self.names, self._functions, self._weights, strict=True):
            value = _call(function, name, given)
            if value is not None:
                parts[name] = value
                total += weight * value
        if not parts:
            return Score.ungraded("all reward functions returned None")
        return Score(status=ScoreStatus.SCORED, value=total, parts=parts)

    @property
    def names(self) -> list[str]:
        """Names of the functions; equal ones are numbered."""
        plain = [name_of(function) for function in self._functions]
        return [name if plain.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(plain)]


def name_of(function: RewardFunction) -> str:
    """Return the name of a reward function."""
    return str(getattr(function, "__name__", type(function).__name__))


def check_functions(functions: Sequence[Any], columns: Sequence[str]) -> None:
    """Raise `ConfigError` for a reward that cannot be called as TRL calls it, with the columns of the data.

    Args:
        functions: What was given as `reward_funcs`.
        columns: Columns of the data set.
    """
    if not functions:
        raise ConfigError("is missing: give a reward function, or a list of them", key="reward_funcs")
    for number, function in enumerate(functions):
        key = f"reward_funcs.{number}"
        if isinstance(function, str) or hasattr(function, "save_pretrained") or not callable(function):
            message = (
                f"is {type(function).__name__}; only functions are supported. A reward model is `reward: reward_model`"
            )
            raise ConfigError(message, key=key, value=function)
        parameters = inspect.signature(function).parameters.values()
        needed = [each.name for each in parameters if each.default is each.empty]
        if found := [name for name in needed if name in UNSUPPORTED]:
            message = (
                f"{name_of(function)} needs {found[0]!r}, which is not passed: rewards run in processes of their own"
            )
            raise ConfigError(message, key=key, value=name_of(function))
        given = {name: None for name in columns if name not in NOT_COLUMNS}
        try:
            inspect.signature(function).bind(**given, prompts=None, completions=None)
        except TypeError as error:
            message = f"{name_of(function)} is called with prompts, completions and the data's columns, but {error}"
            raise ConfigError(message, key=key, value=name_of(function)) from None


def _call(function: RewardFunction, name: str, given: Mapping[str, Any]) -> float | None:
    values = function(**given)
    if inspect.isawaitable(values):
        values = asyncio.run(_await(values))
    if not isinstance(values, Sequence) and not hasattr(values, "__len__"):
        raise TypeError(f"{name} returned {type(values).__name__}, expected a list with one reward a completion")
    if len(values) != 1:
        raise ValueError(f"{name} returned {len(values)} rewards for 1 completion")
    return None if values[0] is None else float(values[0])


async def _await(awaitable: Any) -> Any:
    return await awaitable

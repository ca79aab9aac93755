"""Rewards with TRL's signature, `f(prompts, completions, **columns) -> list`, as a reward of a task."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.core.user_errors import find_definition
from antiphon.tasks.base import Transcript

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
# Arguments of TRL's that a grading process lacks.
UNSUPPORTED = ("completion_ids", "trainer_state", "environments", "log_extra", "log_metric")
SIGNATURE = "(prompts, completions, **columns) -> list[float]"
RewardFunction = Callable[..., Any]


class TrlReward:
    """The weighted sum of reward functions with TRL's signature.

    Each is called with one completion at a time, in a process that may be killed. A function that returns None for it is left
    out of the sum; if all do, the response is ungraded.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Take functions as TRL does.

        Args:
            functions: Plain or `async` functions.
            weights: One for each; by default 1.
            options: Arguments that are passed besides the columns of the data.
        """
        self._functions = tuple(functions)
        self._weights = (1.0,) * len(self._functions) if weights is None else tuple(map(float, weights))
        self._options = dict(options or {})

    def __call__(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Score one response; its parts are the values of the functions by their names."""
        row: Mapping[str, Any] = prompt.payload if isinstance(prompt.payload, Mapping) else {}
        given = {name: [value] for name, value in row.items() if name not in NOT_COLUMNS}
        asked, text = _trl_prompt(prompt, row), transcript.response
        given["prompts"] = [asked]
        given["completions"] = [text if isinstance(asked, str) else [{"role": "assistant", "content": text}]]
        parts: dict[str, float] = {}
        total = 0.0
        for name, function, weight in zip(self.names, self._functions, self._weights, strict=True):
            value = _call(function, name, {**given, **self._options})
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


def has_trl_signature(reward: Any) -> bool:
    """Return True if a function, a class of callable objects, or such an object takes `completions`, as TRL's rewards do."""
    called = reward.__call__ if inspect.isclass(reward) else reward
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):  # not of Python
        return False
    return "completions" in parameters and "transcript" not in parameters


def name_of(function: RewardFunction) -> str:
    """Return the name of a reward function."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def check_function(
    function: RewardFunction, key: str = "", columns: Sequence[str] | None = None, options: Collection[str] = ()
) -> None:
    """Raise `ConfigError` for a function that cannot be called as TRL calls it.

    Args:
        function: The function.
        key: Key that names it, for the error.
        columns: Columns of the data; None if they are not known.
        options: Names of other arguments that it is called with.
    """
    name, signature = name_of(function), inspect.signature(function)
    needed = [
        each.name
        for each in signature.parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if each.name not in options
    ]
    if found := [each for each in needed if each in (*NOT_COLUMNS, *UNSUPPORTED)]:
        message = (
            f"{name} has the signature of a reward of TRL and needs {found[0]!r}, which is not passed: rewards run in "
            f"processes of their own. It can be {SIGNATURE}, with columns of the data; or (prompt, transcript) -> float"
        )
        raise ConfigError(message, key=key, value=name)
    given = [each for each in (needed if columns is None else columns) if each not in NOT_COLUMNS]
    try:
        signature.bind(**dict.fromkeys([*given, *options, "prompts", "completions"]))
    except TypeError as error:
        message = (
            f"{name} is called with prompts, completions and the data's columns, but {error}; it can be {SIGNATURE}"
        )
        raise ConfigError(message, key=key, value=name) from None


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
        check_function(function, key, columns)


def _trl_prompt(prompt: Prompt, row: Mapping[str, Any]) -> Any:
    """Return the prompt as TRL has it: the column `prompt`; else text if a column holds it, and messages if none does."""
    if "prompt" in row:
        return row["prompt"]
    if prompt.messages and prompt.messages[-1].content in [each for each in row.values() if isinstance(each, str)]:
        return prompt.messages[-1].content
    return [{"role": message.role, "content": message.content} for message in prompt.messages]


def _call(function: RewardFunction, name: str, given: Mapping[str, Any]) -> float | None:
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise _make_error(TypeError, function, f"{name} is called with {', '.join(given)}, but {error}") from None
    values = function(**given)
    if inspect.isawaitable(values):
        values = asyncio.run(_await(values))
    if isinstance(values, str) or not hasattr(values, "__len__"):
        message = f"{name} returned {type(values).__name__}, expected a list with one reward a completion"
        raise _make_error(TypeError, function, message)
    if len(values) != 1:
        raise _make_error(ValueError, function, f"{name} returned {len(values)} rewards for 1 completion")
    return None if values[0] is None else float(values[0])


def _make_error(kind: type[Exception], function: RewardFunction, message: str) -> Exception:
    """Return an error that names where a function is defined."""
    place = find_definition(function)
    return kind(f"{message} ({place})" if place else message)


async def _await(awaitable: Any) -> Any:
    return await awaitable

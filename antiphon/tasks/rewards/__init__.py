"""Rewards by name, of one transcript or of a group. They run in processes of a grading pool; `async` ones in the controller."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.registry import Registry
from antiphon.tasks.base import GroupReward
from antiphon.tasks.rewards.trl import SIGNATURE as TRL_SIGNATURE
from antiphon.tasks.rewards.trl import TrlReward, check_function, has_trl_signature

REWARDS = Registry(
    "reward",
    {
        "math": "antiphon.tasks.rewards.math.reward:Math",
        "code": "antiphon.tasks.rewards.code.reward:Code",
        "exact_match": "antiphon.tasks.rewards.exact_match:exact_match",
        "numeric": "antiphon.tasks.rewards.math.numeric:numeric",
        "multiple_choice": "antiphon.tasks.rewards.multiple_choice:multiple_choice",
        "short_answer": "antiphon.tasks.rewards.short_answer:short_answer",
        "regex": "antiphon.tasks.rewards.regex:regex",
        "sql": "antiphon.tasks.rewards.sql:sql",
        "instruction_following": "antiphon.tasks.rewards.instruction_following:instruction_following",
        "length": "antiphon.tasks.rewards.shaping:length",
        "repetition": "antiphon.tasks.rewards.shaping:repetition",
        "composed": "antiphon.tasks.rewards.composed:Composed",
        "reasoning_gym": "antiphon.tasks.rewards.reasoning_gym:reasoning_gym",
        "environment_return": "antiphon.tasks.rewards.environment_return:environment_return",
        "agent_result": "antiphon.tasks.rewards.agent_result:agent_result",
        "judge": "antiphon.tasks.rewards.judge:Judge",
        "reward_model": "antiphon.tasks.rewards.reward_model:RewardModel",
    },
    callables=True,
)

ASYNCHRONOUS = frozenset({"judge", "reward_model"})  # listed, because importing the others is slow
IN_WORKERS = frozenset({"reward_model"})  # that ask a model in workers of the run
COMPOSED = frozenset({"composed"})  # rewards whose option `parts` names others

USING_RESOURCES = frozenset({"code", "judge", "reward_model"})  # sandboxes, the network, devices

GROUP_REWARDS = Registry("group reward", {"duplicates": "antiphon.tasks.rewards.duplicates:duplicates"}, callables=True)


def reads_only_text(name: str, options: Mapping[str, Any]) -> bool:
    """Return True if a reward, or reward of groups, is built in and needs neither files nor the network."""
    if name in COMPOSED:
        parts = options.get("parts")
        inner = [part for part in parts.values() if isinstance(part, Mapping)] if isinstance(parts, Mapping) else []
        return all(reads_only_text(str(part.get("reward")), part.get("options") or {}) for part in inner)
    return name in GROUP_REWARDS.known or name in REWARDS.known.keys() - USING_RESOURCES


def is_asynchronous(name: str) -> bool:
    """Return True if a reward is `async def`, or a class whose `__call__` is. Imports only the user's own rewards."""
    if name in REWARDS.known:
        return name in ASYNCHRONOUS
    found = REWARDS.resolve(name)
    is_function = inspect.isroutine(found) or isinstance(found, functools.partial)
    called = found if is_function else found.__call__  # of a class, or of an instance
    return inspect.iscoroutinefunction(called) and not has_trl_signature(found)


def build_reward(name: str, options: Mapping[str, Any]) -> Any:
    """Build a `Reward` or `AsyncReward`: a class is instantiated with `options`, a function gets them with every call.

    One with TRL's signature, plain or `async`, is adapted.

    Raises:
        ConfigError: The reward does not exist, or does not take its arguments or `options`.
    """
    found = None if name in REWARDS.known else REWARDS.resolve(name)
    if found is not None and has_trl_signature(found):
        return _adapt_trl(found, name, options)
    return _build(REWARDS, name, options, "prompt, transcript")


def _adapt_trl(found: Any, name: str, options: Mapping[str, Any]) -> TrlReward:
    """Return the reward that calls a function, or an object of a class, with TRL's signature."""
    if inspect.isclass(found):
        found, options = _build(REWARDS, name, options, ""), {}
    check_function(found, options=options)
    return TrlReward([found], options=options)


def build_group_reward(name: str, options: Mapping[str, Any]) -> GroupReward:
    """Build a reward of groups as `build_reward` builds one of trajectories."""
    reward: GroupReward = _build(GROUP_REWARDS, name, options, "prompt, transcripts, scores")
    return reward


def _build(registry: Registry, name: str, options: Mapping[str, Any], takes: str) -> Any:
    found = registry.resolve(name)
    is_class = inspect.isclass(found)
    arguments = [] if is_class else takes.split(", ")
    try:
        inspect.signature(found).bind(*arguments, **options)
    except TypeError as error:
        called = ", ".join([*arguments, "**options"])
        hint = f"; it can also be {TRL_SIGNATURE}, as TRL's rewards are" if registry is REWARDS else ""
        raise ConfigError(f"{registry.kind} {name!r} is called with ({called}), but {error}{hint}") from None
    return found(**options) if is_class else functools.partial(found, **options)

"""Rewards by name. Each judges one transcript, or those of a group; they run in processes of a grading pool, or if they are
`async def` in the controller, where they wait for others to judge."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.registry import Registry
from antiphon.tasks.base import GroupReward

REWARDS = Registry(
    "reward",
    {
        "math": "antiphon.tasks.rewards.math.reward:Math",
        "code": "antiphon.tasks.rewards.code.reward:Code",
        "exact_match": "antiphon.tasks.rewards.exact_match:exact_match",
        "numeric": "antiphon.tasks.rewards.math.numeric:numeric",
        "multiple_choice": "antiphon.tasks.rewards.multiple_choice:multiple_choice",
        "regex": "antiphon.tasks.rewards.regex:regex",
        "sql": "antiphon.tasks.rewards.sql:sql",
        "instruction_following": "antiphon.tasks.rewards.instruction_following:instruction_following",
        "length": "antiphon.tasks.rewards.shaping:length",
        "repetition": "antiphon.tasks.rewards.shaping:repetition",
        "composed": "antiphon.tasks.rewards.composed:Composed",
        "reasoning_gym": "antiphon.tasks.rewards.reasoning_gym:reasoning_gym",
        "environment_return": "antiphon.tasks.rewards.environment_return:environment_return",
        "judge": "antiphon.tasks.rewards.judge:Judge",
        "reward_model": "antiphon.tasks.rewards.reward_model:RewardModel",
    },
)

ASYNCHRONOUS = frozenset({"judge"})  # known without importing what the others need
COMPOSED = frozenset({"composed"})  # their option `parts` names others

NEEDING_MORE = frozenset({"code", "judge", "reward_model"})  # than the text: sandboxes, the network, devices

GROUP_REWARDS = Registry("group reward", {"duplicates": "antiphon.tasks.rewards.duplicates:duplicates"})


def reads_only_text(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the reward, or reward of groups, is built in and needs neither files nor the network."""
    if name in COMPOSED:
        parts = options.get("parts")
        inner = [part for part in parts.values() if isinstance(part, Mapping)] if isinstance(parts, Mapping) else []
        return all(reads_only_text(str(part.get("reward")), part.get("options") or {}) for part in inner)
    return name in GROUP_REWARDS.built_in or name in REWARDS.built_in.keys() - NEEDING_MORE


def is_asynchronous(name: str) -> bool:
    """Whether the reward called `name` is `async def`, or a class whose `__call__` is. Of rewards only the user's own are
    imported."""
    if name in REWARDS.built_in:
        return name in ASYNCHRONOUS
    found = REWARDS.resolve(name)
    return inspect.iscoroutinefunction(found.__call__ if inspect.isclass(found) else found)


def build_reward(name: str, options: Mapping[str, Any]) -> Any:
    """The reward called `name`, a `Reward` or `AsyncReward`: a class is instantiated with `options`, a function gets them with
    every call. `ConfigError` if it does not take them."""
    return _build(REWARDS, name, options, "prompt, transcript")


def build_group_reward(name: str, options: Mapping[str, Any]) -> GroupReward:
    """The same for a reward of groups."""
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
        raise ConfigError(f"{registry.kind} {name!r} is called with ({called}), but {error}") from None
    return found(**options) if is_class else functools.partial(found, **options)

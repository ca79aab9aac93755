"""Playing environments, for their tests."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from antiphon.tasks.base import Step
from antiphon.tasks.environments.base import OptionError

World = Any
Policy = Callable[[World], str]


def expert(world: World) -> str:
    return world.expert()


def at_random(seed: int) -> Policy:
    random = Random(seed)
    return lambda world: random.choice(world.actions())


def play(world: World, seed: int, policy: Policy) -> list[Step]:
    """The steps of a game, to its end."""
    world.reset(seed)
    steps = [world.step(policy(world))]
    while not (steps[-1][2] or steps[-1][3]):
        steps.append(world.step(policy(world)))
    return steps


def follow(world: World, seed: int, actions: Sequence[str]) -> list[Any]:
    """All that a world says to a list of actions, until its game is over."""
    said: list[Any] = [world.reset(seed)]
    for action in actions:
        said.append(world.step(action))
        if said[-1][2] or said[-1][3]:
            break
    return said


def success_rate(make: Callable[[], World], policy: Policy, games: int) -> float:
    return sum(play(make(), seed, policy)[-1][4]["success"] for seed in range(games)) / games


def check_contract(make: Callable[[], World], seed: int, actions: Sequence[str]) -> list[Step]:
    """Whatever is said: what every world of a game keeps to. Returns the steps."""
    said = follow(make(), seed, actions)
    assert follow(make(), seed, actions) == said
    (observation, info), steps = said[0], said[1:]
    assert isinstance(observation, str) and isinstance(info["state_key"], str)
    for index, (observation, reward, terminated, truncated, after) in enumerate(steps):
        ended = terminated or truncated
        assert isinstance(observation, str) and isinstance(reward, float)
        assert isinstance(terminated, bool) and isinstance(truncated, bool) and not (terminated and truncated)
        assert set(after) == {"state_key", "valid", "effective"} | ({"success"} if ended else set())
        assert not ended or index == len(steps) - 1
        assert after["effective"] == (after["state_key"] != info["state_key"])
        assert after["valid"] or not after["effective"]
        info = after
    return steps


def check_option_error(make: Callable[[], World], key: str, valid: str = "") -> None:
    """An option is refused by an error that names the environment, the option, its value, and what is valid."""
    with pytest.raises(OptionError) as raised:
        make()
    error = raised.value
    assert error.key == key and any(valid in between.join(error.valid) for between in (", ", " or "))
    assert all(part in str(error) for part in (repr(error.environment), key, valid))

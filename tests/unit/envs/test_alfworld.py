"""The household world: its rules, its expert, and its agreement with ALFWorld's own engine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError
from antiphon.core.rng import generator
from antiphon.tasks.environments import environment_factory
from antiphon.tasks.environments.base import OptionError
from antiphon_envs.alfworld.environment import AlfWorld
from antiphon_envs.alfworld.households import TASK_TYPES, Household, draw_household
from antiphon_envs.alfworld.kinds import HOLDS, LAMP, kind_of
from antiphon_envs.alfworld.state import HouseholdState
from benchmarks._alfworld_games import digest_commands
from tests.raising import raises_with
from tests.unit.tasks.worlds import check_option_error

TRANSCRIPTS = json.loads(Path(__file__).with_name("alfworld_transcripts.json").read_text())

seeds = st.integers(0, 2**32)
types = st.sampled_from(sorted(TASK_TYPES))
BREAKFAST = Household(
    task_type="heat_and_place",
    object="egg",
    receptacle="diningtable",
    receptacles=("cabinet 1", "countertop 1", "diningtable 1", "fridge 1", "microwave 1", "sinkbasin 1"),
    objects={"egg 1": "fridge 1", "knife 1": "countertop 1", "apple 1": "countertop 1", "mug 1": "cabinet 1"},
)


def begun(seed: int = 0, **options: Any) -> AlfWorld:
    world = AlfWorld(**options)
    world.reset(seed)
    return world


def played(world: AlfWorld, choose: Callable[[], str], steps: int = 1000) -> bool | None:
    """Act to the end and return whether the task was done; None if it did not end in so many `steps`."""
    for _ in range(steps):
        _, reward, terminated, truncated, info = world.step(choose())
        assert info["valid"]
        assert reward == float(terminated) == float(info.get("success", False))
        if terminated or truncated:
            return terminated
    return None


def chance(world: AlfWorld, seed: int) -> Callable[[], str]:
    """A policy that draws from what may be done."""
    rng = generator(seed, "chance")
    return lambda: str(rng.choice(world.actions()))


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_the_expert_wins(task_type: str) -> None:
    assert all(played(world, world.expert) for world in (begun(seed, task_types=[task_type]) for seed in range(100)))


@given(seed=seeds, task_type=types, receptacles=st.integers(3, 30), objects=st.integers(2, 40))
def test_the_expert_wins_in_the_turns_that_it_promises(
    seed: int, task_type: str, receptacles: int, objects: int
) -> None:
    turns = 2 * receptacles + 12
    world = begun(seed, task_types=[task_type], receptacles=receptacles, objects=objects, turns=turns)
    assert played(world, world.expert)


@given(seed=seeds, task_type=types, steps=st.integers(0, 150))
def test_the_expert_wins_from_wherever_chance_led(seed: int, task_type: str, steps: int) -> None:
    world = begun(seed, task_types=[task_type], turns=steps + 60)
    assert played(world, chance(world, seed), steps) or played(world, world.expert)


@pytest.mark.parametrize(
    ("least", "most", "options"),
    [
        (0.0, 0.03, {}),
        (0.2, 0.4, {"receptacles": 4, "objects": 3, "task_types": ["look_in_light"]}),
        (0.04, 0.2, {"receptacles": 4, "objects": 3, "task_types": ["pick_and_place"]}),
    ],
)
def test_what_chance_is_worth(least: float, most: float, options: dict[str, Any]) -> None:
    worlds = [begun(seed, **options) for seed in range(200)]
    assert least <= sum(bool(played(world, chance(world, i))) for i, world in enumerate(worlds)) / 200 <= most


@given(seed=seeds, task_type=types, receptacles=st.integers(3, 40), objects=st.integers(2, 40))
def test_a_drawn_household_is_in_order_and_its_task_is_not_done(
    seed: int, task_type: str, receptacles: int, objects: int
) -> None:
    drawn = draw_household(generator(seed, "test"), [task_type], receptacles, objects)
    assert len(drawn.receptacles) == len(set(drawn.receptacles)) <= receptacles
    assert len(drawn.objects) <= objects
    assert sum(kind_of(name) == drawn.object for name in drawn.objects) >= drawn.task.count
    for name, place in drawn.objects.items():
        assert place in drawn.receptacles
        assert kind_of(name) == LAMP or kind_of(name) in HOLDS[kind_of(place)]
        assert (kind_of(name), kind_of(place)) != (drawn.object, drawn.receptacle)
    assert not HouseholdState(drawn).is_done()


def test_seeds_draw_all_task_types_and_only_those_wanted() -> None:
    def drawn(seed: int, wanted: list[str]) -> str:
        return draw_household(generator(seed, "test"), wanted, 12, 12).task_type

    assert {drawn(seed, list(TASK_TYPES)) for seed in range(60)} == set(TASK_TYPES)
    wanted = ["heat_and_place", "look_in_light"]
    assert {drawn(seed, wanted) for seed in range(60)} == set(wanted)


HISTORY = """
import json
from antiphon_envs.alfworld.environment import AlfWorld
world = AlfWorld()
told = [world.reset(11)]
for _ in range(4):
    told.append(world.step(world.expert()))
print(json.dumps(told))
"""


def test_the_seed_alone_decides_in_every_process() -> None:
    def history(hashing: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hashing}
        return subprocess.run(
            [sys.executable, "-c", HISTORY], env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert history("1") == history("2")
    assert begun(1).reset(5) == begun(2).reset(5) != begun(3).reset(6)


@given(
    seed=seeds, task_type=types, text=st.one_of(st.text(), st.sampled_from(["go to", "take  from ", "put", "<answer>"]))
)
def test_whatever_is_said_is_answered(seed: int, task_type: str, text: str) -> None:
    world = begun(seed, task_types=[task_type], format_penalty=0.5)
    state = world.reset(seed)[1]["state_key"]
    observation, reward, terminated, truncated, info = world.step(text)
    assert (observation, reward, terminated, truncated) == ("Nothing happens.", -0.5, False, False)
    assert (info["valid"], info["effective"], info["state_key"]) == (False, False, state)


@given(seed=seeds, task_type=types, steps=st.integers(1, 40))
def test_admissible_actions_run_and_effects_change_state(seed: int, task_type: str, steps: int) -> None:
    world = AlfWorld(task_types=[task_type])
    _, before = world.reset(seed)
    choose = chance(world, seed)
    for _ in range(steps):
        assert list(world.actions()) == before["admissible"]
        observation, _, terminated, truncated, after = world.step(choose())
        assert after["valid"] and observation != "Nothing happens."
        assert after["effective"] == (after["state_key"] != before["state_key"])
        before = after
        if terminated or truncated:
            return


def told(world: AlfWorld, *commands: str) -> tuple[str, dict[str, Any]]:
    """What is said to the last of some commands."""
    for command in commands:
        observation, _, _, _, info = world.step(command)
    return observation, info


def test_the_state_is_what_counts_not_the_way_to_it() -> None:
    ways = (
        ["go to fridge 1"],
        ["go to countertop 1", "look", "inventory", "go to fridge 1", "examine fridge 1"],
        ["go to fridge 1", "open fridge 1", "take egg 1 from fridge 1", "move egg 1 to fridge 1", "close fridge 1"],
    )
    keys = [told(begun(household=BREAKFAST), *way)[1]["state_key"] for way in ways]
    assert len(set(keys)) == 1
    others = (["go to microwave 1"], ["go to fridge 1", "open fridge 1"])
    assert len({keys[0], *(told(begun(household=BREAKFAST), *way)[1]["state_key"] for way in others)}) == 3


def test_a_breakfast() -> None:
    world = begun(household=BREAKFAST)
    fetch = "go to fridge 1", "open fridge 1", "take egg 1 from fridge 1", "cool egg 1 with fridge 1"
    assert told(world, *fetch, "examine egg 1")[0] == "This is a cold egg 1."
    assert told(world, "go to microwave 1", "heat egg 1 with microwave 1", "examine egg 1")[0] == "This is a hot egg 1."
    assert told(world, "move egg 1 to microwave 1")[0] == "Nothing happens."  # it is closed
    assert told(world, "go to sinkbasin 1", "clean egg 1 with sinkbasin 1", "examine egg 1")[0] == (
        "This is a hot and clean egg 1."
    )
    world.step("go to diningtable 1")
    assert world.step("Put egg 1 in/on diningtable 1.")[:4] == (
        "You move the egg 1 to the diningtable 1.",
        1.0,
        True,
        False,
    )
    with pytest.raises(RuntimeError, match="over"):
        world.step("look")


def test_nonsense_and_what_is_not_possible_are_told_apart() -> None:
    world = begun(household=BREAKFAST, format_penalty=0.1, turns=4)
    assert world.step("open fridge 1")[1] == 0.0  # it is not here
    assert world.step("take egg 9 from moon 1")[1] == 0.0
    assert world.step("help")[4]["valid"]
    observation, reward, terminated, truncated, info = world.step("open sesame")
    assert (observation, reward, terminated, truncated) == ("Nothing happens.", -0.1, False, True)
    assert info["success"] is False


def test_letters_stand_for_commands() -> None:
    listed, lettered = (begun(household=BREAKFAST, commands=way) for way in ("listed", "lettered"))
    assert "\ngo to cabinet 1\n" in listed.reset(0)[0]
    assert "\na: go to cabinet 1\n" in lettered.reset(0)[0]
    assert lettered.expert() == "b" and listed.expert() == "go to countertop 1"
    assert lettered.step("<answer>B</answer>")[0].startswith(
        "You arrive at countertop 1. On the countertop 1, you see a apple 1"
    )
    assert lettered.step("go to cabinet 1")[4]["valid"]  # so do commands themselves
    many = begun(commands="lettered", receptacles=40, task_types=["heat_and_place"])
    assert len(set(many.actions())) == len(many.actions()) > 26
    played(many, chance(many, 0))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"task_types": ["sleep"]}, "task_types"),
        ({"task_types": "heat_and_place"}, "task_types"),
        ({"task_types": []}, "task_types"),
        ({"receptacles": 2}, "receptacles"),
        ({"objects": 1}, "objects"),
        ({"turns": 0}, "turns"),
        ({"commands": "shouted"}, "commands"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], key: str) -> None:
    check_option_error(lambda: AlfWorld(**options), key)


def test_it_is_found_by_its_name_and_must_begin() -> None:
    world: Any = environment_factory("alfworld", {"turns": 9})(None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="reset"):
        world.step("look")
    assert world.close() is None


def test_games_that_cannot_be_played_are_named(tmp_path: Path) -> None:
    with raises_with(OptionError, match="tw-pddl", key="path", value=str(tmp_path)):
        environment_factory("textworld", {"path": str(tmp_path)})(None)  # type: ignore[arg-type]
    (tmp_path / "game.tw-pddl").touch()
    world: Any = environment_factory("textworld", {"path": str(tmp_path)})(None)  # type: ignore[arg-type]
    if find_spec("alfworld") is None:
        with raises_with(ConfigError, match="pip install", value="alfworld"):
            world.reset(0)
    with pytest.raises(RuntimeError, match="reset"):
        world.step("look")
    world.close()


@pytest.mark.parametrize("game", TRANSCRIPTS, ids=lambda game: game["task_type"])
def test_it_answers_as_the_engine_of_alfworld_did(game: dict[str, Any]) -> None:
    """Transcripts of alfworld 0.4.2, made by `benchmarks/alfworld_transcripts.py --store`."""
    household = Household(**{key: value for key, value in game.items() if key != "steps"})
    world = AlfWorld(household=household, turns=len(game["steps"]))
    (_, first, _, admissible), *steps = game["steps"]
    observation, info = world.reset(0)
    assert (observation, digest_commands(info["admissible"])) == (first, admissible)
    for command, answer, won, admissible in steps:
        observation, _, terminated, _, info = world.step(command)
        assert (observation, terminated, digest_commands(info["admissible"])) == (answer, won, admissible), command
    assert won

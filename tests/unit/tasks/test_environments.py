"""The toy world."""

import sys
import types
from typing import Any, cast

import pytest

from antiphon.core.errors import ConfigError
from antiphon.core.types import Prompt
from antiphon.tasks.environments import ENVIRONMENTS, environment_factory, required_options
from antiphon.tasks.environments.guess_number import GuessNumber
from tests.raising import raises_with
from tests.unit.tasks.worlds import check_option_error


def secret(seed: int) -> int:
    """Found by playing: one game a guess."""
    for guess in range(1, 10):
        game = GuessNumber()
        game.reset(seed)
        if game.step(str(guess))[1] == 1.0:
            return guess
    raise AssertionError("no number is right")


def test_the_seed_alone_decides_and_all_numbers_occur() -> None:
    secrets = [secret(seed) for seed in range(80)]
    assert secrets == [secret(seed) for seed in range(80)]
    assert set(secrets) == set(range(1, 10))


def test_a_game_of_two_turns() -> None:
    seed = next(seed for seed in range(99) if secret(seed) == 7)
    game = GuessNumber()
    observation, info = game.reset(seed)
    assert "1 to 9" in observation and info == {"state_key": "1-9/2"}
    observation, reward, terminated, truncated, info = game.step("I guess 4.")
    assert (observation, terminated, truncated, info) == ("higher", False, False, {"state_key": "5-9/1"})
    assert 0.0 < reward < 0.1
    assert game.step("7")[:3] == ("right", 1.0, True)
    with pytest.raises(RuntimeError, match="over"):
        game.step("7")


def test_last_guess_ends_the_game_and_nonsense_earns_nothing() -> None:
    game = GuessNumber(guesses=2)
    game.reset(0)
    assert game.step("no idea")[:3] == ("not a number", 0.0, False)
    assert game.step("9" * 5000)[:3] == ("lower", 0.0, True)


def test_a_game_must_begin() -> None:
    with pytest.raises(RuntimeError, match="reset"):
        GuessNumber().step("1")


def test_factory_checks_options_and_makes_new_environments() -> None:
    make = environment_factory("guess_number", {"highest": 3})
    prompt = Prompt(id="p", task="t", messages=(), seed=0)
    assert make(prompt) is not make(prompt)
    assert "1 to 3" in make(prompt).reset(0)[0]
    check_option_error(lambda: environment_factory("guess_number", {"higest": 3}), "higest", "highest, guesses")
    check_option_error(lambda: environment_factory("guess_number", {"highest": 0}), "highest", "equal to 1")
    with raises_with(ConfigError, value="guess_numbers", suggestions=("guess_number",)):
        environment_factory("guess_numbers", {})


WITH_EXPERTS = [
    name for name in ENVIRONMENTS.known if not required_options(name) and hasattr(ENVIRONMENTS.resolve(name), "expert")
]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_expert_wins_and_environments_depend_on_the_seed(name: str) -> None:
    make = environment_factory(name, {})
    one, other = (cast(Any, make(Prompt(id=each, task="t", messages=()))) for each in "ab")
    assert one.reset(5) == other.reset(5)
    over = False
    while not over:
        action = one.expert()
        assert other.expert() == action and all(isinstance(each, str) for each in one.actions())
        step = one.step(action)
        assert step == other.step(action)
        _, _, terminated, truncated, info = step
        assert info["valid"] and isinstance(info["state_key"], str)
        over = terminated or truncated
    assert info["success"]


def test_a_world_that_asks_for_its_prompt_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class World:
        def __init__(self, prompt: Prompt, size: int) -> None:
            self.given = prompt, size

    module = types.ModuleType("worlds")
    module.World = World  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "worlds", module)
    prompt = Prompt(id="p", task="t", messages=(), seed=0)
    assert environment_factory("worlds:World", {"size": 3})(prompt).given == (prompt, 3)  # type: ignore[attr-defined]

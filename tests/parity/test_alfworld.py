"""The household world and the adapter against the engines themselves, where alfworld and textworld are installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.core.rng import generator
from antiphon.tasks.environments.adapters.textworld import TextWorld
from antiphon_envs.alfworld.households import TASK_TYPES, draw_household
from benchmarks._alfworld_games import compare_engines, mixed_policy

# The packages leave files open and warn of their own past.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Game .* is not fully supported"),
]


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_both_engines_answer_alike(task_type: str) -> None:
    pytest.importorskip("alfworld", reason="alfworld takes minutes to build from source")
    household = draw_household(generator(5, "parity"), [task_type], 10, 14)
    exchanges = list(compare_engines(household, mixed_policy(household, 5, expert=0.2)))
    assert len(exchanges) > 5
    for exchange in exchanges:
        assert exchange.ours == exchange.theirs, exchange.command


def test_a_game_of_textworld_is_won_by_its_plan(tmp_path: Path) -> None:
    pytest.importorskip("textworld", reason="textworld takes minutes to build from source")
    options = ["--level", "2", "--seed", "3", "--output", str(tmp_path / "coin.z8")]
    maker = Path(sys.executable).with_name("tw-make")
    subprocess.run([maker, "tw-coin_collector", *options], check=True, capture_output=True)
    game = TextWorld(path=str(tmp_path), expert=True, list_commands=True, format_penalty=0.1)
    observation, before = game.reset(0)
    assert "You can:" in observation and game.expert() in game.actions()
    _, reward, _, _, info = game.step("dance with the coin")
    assert (reward, info["valid"], info["effective"], info["state_key"]) == (-0.1, False, False, before["state_key"])
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, info = game.step(f"<answer>{game.expert()}</answer>")
        total, over = total + reward, terminated or truncated
        assert info["valid"] and info["effective"]
    assert (terminated, info["success"], total) == (True, True, 1.0)
    game.close()

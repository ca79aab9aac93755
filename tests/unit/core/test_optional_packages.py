"""Packages of extras: which there are, and what is said where one is missing."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError
from antiphon.core.optional_packages import how_to_install, import_optional, list_extras
from antiphon.core.registry import import_path
from antiphon.core.types import Prompt
from antiphon.tasks.environments import environment_factory
from antiphon.tasks.rewards import REWARDS
from tests.raising import raises_with

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
COMMAND = r"pip install 'antiphon\[reasoning-gym\]'"


@pytest.fixture
def without_reasoning_gym(monkeypatch):
    """An interpreter that has no reasoning_gym, and has imported nothing that imports it."""
    for module in list(sys.modules):
        if module.partition(".")[0] == "reasoning_gym" or module == "antiphon.tasks.rewards.reasoning_gym":
            monkeypatch.delitem(sys.modules, module)

    class NotInstalled:
        @staticmethod
        def find_spec(module, path=None, target=None):
            if module.partition(".")[0] == "reasoning_gym":
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(sys, "meta_path", [NotInstalled, *sys.meta_path])


def test_extras_are_those_of_the_project_file():
    names = lambda requirements: {re.split(r"[<>=\[ ]", each)[0].lower() for each in requirements}  # noqa: E731
    expected = {name: extra for extra in EXTRAS if extra not in ("dev", "trackers") for name in names(EXTRAS[extra])}
    assert list_extras() == expected


def test_a_distribution_is_installed_by_its_extra():
    assert how_to_install("megatron-core") == "pip install 'antiphon[megatron]'"
    assert how_to_install("reasoning_gym") == "pip install 'antiphon[reasoning-gym]'"
    assert how_to_install("wandb") == "pip install 'antiphon[wandb]'"
    assert how_to_install("alfworld") == "pip install alfworld"


def test_a_package_that_is_missing_is_named():
    with raises_with(ConfigError, match="search .*pip install no_such_one", value="no_such_one"):
        import_optional("no_such_one", "search")


def test_a_missing_part_of_a_package_that_is_there_is_raised(tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text("import no_such_part")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_part"):
        import_optional("half", "search")


def test_a_reward_names_its_extra(without_reasoning_gym):
    with raises_with(ConfigError, match=COMMAND):
        REWARDS.resolve("reasoning_gym")


def test_a_prompt_source_names_its_extra(without_reasoning_gym):
    with raises_with(ConfigError, match=COMMAND):
        list(import_path("antiphon.tasks.sources:reasoning_gym")("train", "chain_sum"))


def test_an_environment_names_its_extra(without_reasoning_gym):
    with raises_with(ConfigError, match=COMMAND):
        environment_factory("reasoning_gym", {"name": "chain_sum"})(Prompt(id="p", task="t", messages=()))


def test_a_users_module_names_the_extra(without_reasoning_gym, tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text("import reasoning_gym")
    monkeypatch.syspath_prepend(tmp_path)
    with raises_with(ConfigError, match=COMMAND, key="tasks.0.reward"):
        import_path("my_reward:f", "reward", "tasks.0.reward")

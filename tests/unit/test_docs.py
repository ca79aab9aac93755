"""The documentation runs."""

import doctest
import os
import re
from pathlib import Path

import pytest
import yaml

from antiphon.config import load
from antiphon.run_config import RunConfig
from antiphon.tasks.config import TaskConfig
from antiphon.tasks.environments import ENVIRONMENTS, environment_factory
from antiphon.tasks.rewards import REWARDS as REGISTERED
from antiphon.tasks.rewards import build_group_reward, build_reward

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_examples(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.path", list(os.sys.path))
    result = doctest.testfile(
        str(ROOT / "docs" / page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0


REWARDS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("fragment", REWARDS)
def test_the_rewards_of_their_page_can_be_built(fragment):
    task = yaml.safe_load(fragment)
    if task["reward"] != "reward_model":  # its model is none of ours
        reward = build_reward(task["reward"], task.get("reward_options", {}))
        getattr(reward, "close", bool)()
    if "group_reward" in task:
        build_group_reward(task["group_reward"], task["group_reward_options"])
    assert TaskConfig.model_validate(task)


def test_the_page_of_rewards_has_them_all():
    page = (ROOT / "docs" / "rewards.md").read_text() + (TaskConfig.model_fields["reward"].description or "")
    assert [name for name in REGISTERED.built_in if page.count(f"`{name}`") < 2] == []


FRAGMENTS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_what_the_page_on_algorithms_says_can_be_configured(fragment, tmp_path):
    base = yaml.safe_load((ROOT / "recipes" / "tiny_arithmetic" / "config.yaml").read_text())
    base["tasks"][0]["name"] = "sums"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(base | yaml.safe_load(fragment)))
    load(tmp_path / "config.yaml", model=RunConfig)


ENVIRONMENTS_PAGE = (ROOT / "docs" / "environments.md").read_text()


@pytest.mark.parametrize("fragment", re.findall(r"```yaml\n(.*?)```", ENVIRONMENTS_PAGE, re.DOTALL))
def test_the_environments_of_their_page_can_be_made(fragment):
    task = yaml.safe_load(fragment)
    environment_factory(task["environment"], task["environment_options"])
    assert TaskConfig.model_validate(
        {"name": "a", "prompts": {"source": "jsonl"}, "reward": "environment_return"} | task
    )


def test_the_page_of_environments_has_them_all():
    assert [name for name in ENVIRONMENTS.built_in if f"| `{name}` |" not in ENVIRONMENTS_PAGE] == []

"""A world of another package: installed from a folder, found by its name, trained in."""

import pytest

from tests.packages import install

WORLD = '''
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig
from pydantic import Field


class Parity(BaseEnvironment):
    """Say whether numbers are even."""

    class Config(EnvironmentConfig):
        turns: int = Field(2, ge=1)

    name = "parity"
    inline = True

    def reset(self, seed):
        self._turns_left = self.config.turns
        return f"{seed % 10} is", {}

    def step(self, action):
        self._check_running()
        self._turns_left -= 1
        return "", 0.5, False, not self._turns_left, {}
'''
TASK = {
    "name": "parity",
    "prompts": {"source": "mytask:problems"},
    "environment": "parity",
    "reward": "environment_return",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package, installed from its folder."""
    entry = 'parity = "parity_world:Parity"'
    install(tmp_path, monkeypatch, module="parity_world", code=WORLD, group="antiphon.environments", entry=entry)


@pytest.mark.usefixtures("installed")
def test_a_run_finds_the_world_by_its_name(project):
    done = project.run("train", project.config(tasks=[TASK], rollout={"max_turns": 2}, steps=1))
    assert done.returncode == 0, done.stderr
    assert 0.5 <= project.metrics()[0]["reward/mean"] <= 1.0  # 0.5 a turn, of one or two


@pytest.mark.usefixtures("installed")
def test_its_options_are_checked_before_a_run(project):
    tasks = [TASK | {"environment_options": {"turn": 1}}]
    done = project.run("train", project.config(tasks=tasks, rollout={"max_turns": 2}))
    assert done.returncode == 2 and "'parity'" in done.stderr and "did you mean 'turns'" in done.stderr


def test_without_the_package_there_is_no_such_world(project):
    done = project.run("train", project.config(tasks=[TASK], rollout={"max_turns": 2}))
    assert done.returncode == 2 and "unknown environment 'parity'" in done.stderr

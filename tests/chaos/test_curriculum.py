"""A run with a curriculum that is killed may draw other prompts after its resume, and its record is whole."""

import signal

import pytest

from antiphon.inspect.audit import audit
from tests import warm
from tests.chaos.test_resume import KILLED


@pytest.mark.chaos
def test_a_killed_curriculum_goes_on(project):
    task = {"name": "digits", "prompts": {"source": "mytask:problems"}, "reward": "mytask:digits"}
    task |= {"curriculum": {"sweep": 4}, "mean_range": [0.01, 0.9], "evaluation": {"success_at": 0.125}}
    rollout = {"async_ratio": 2, "groups_per_step": 4, "extra_groups": 2, "order": "ready"}
    path = project.config(steps=8, tasks=[task], rollout=rollout, checkpoint={"every": 2}, evaluation={"every": 0})
    killed = warm.run("-c", KILLED, "published", 4, "train", path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = project.run("train", path, "--resume")
    assert done.returncode == 0, done.stderr
    assert audit(project.folder / "runs" / "run").violations == []

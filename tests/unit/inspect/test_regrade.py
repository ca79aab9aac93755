"""Grading again: what cannot be compared is refused."""

import pytest

from antiphon.core.config import load
from antiphon.core.errors import ConfigError
from antiphon.inspect.regrade import regrade
from antiphon.run.config import RunConfig
from tests.raising import raises_with


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"group_reward": "duplicates"}, "task 'odd' has a group reward"),
        ({"agent": {"function": "mine:agent"}}, "task 'odd' has an agent"),
    ],
)
def test_scores_of_more_than_a_reward_and_a_transcript_are_refused(tmp_path, task, reason):
    plain = {"prompts": {"source": "jsonl", "path": "rows.jsonl"}, "reward": "exact_match"}
    tasks = [{"name": "even", **plain}, {"name": "odd", **plain, **task}]
    rollout = {"groups_per_step": 2, "group_size": 4, "sampling": {"max_tokens": 8}}
    run = {"name": "run", "steps": 1, "model": {"path": "some/model"}, "tasks": tasks, "rollout": rollout}
    config = load(run, model=RunConfig)
    with raises_with(ConfigError, match=reason, key="tasks"):
        regrade(tmp_path, config, "again")
    assert not any(tmp_path.iterdir())

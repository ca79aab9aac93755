"""Arguments of the functions for scripts and notebooks, before anything is started."""

import pytest

import antiphon
from antiphon.core.errors import ConfigError, RecordError
from antiphon.run.api import Result
from tests.raising import raises_with

CONFIG = {
    "name": "run",
    "steps": 1,
    "model": {"path": "model"},
    "tasks": [{"name": "sums", "prompts": {"source": "jsonl", "path": "sums.jsonl"}, "reward": "math"}],
    "rollout": {"groups_per_step": 2, "sampling": {"max_tokens": 8}},
}


@pytest.mark.parametrize("argument", [{"limit": -1}, {"samples": 0}])
def test_numbers_of_an_evaluation_are_checked(argument):
    with raises_with(ConfigError, key=next(iter(argument))):
        antiphon.evaluate("model", CONFIG, **argument)


def test_a_placement_by_the_planner_is_asked_for_before_a_run():
    with raises_with(ConfigError, key="placement.auto", match="place_automatically"):
        antiphon.train(CONFIG, placement="auto")


def test_a_run_without_a_checkpoint_has_no_model(tmp_path):
    with raises_with(RecordError, path=tmp_path):
        _ = Result(tmp_path, {}, 130).model

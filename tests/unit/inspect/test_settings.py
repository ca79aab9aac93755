"""Settings of recorded runs against the defaults and against each other."""

import pytest
import yaml

from antiphon.core.config import dump
from antiphon.inspect.settings import compare_settings, flatten_settings, list_changed_settings
from antiphon.run.config import RunConfig

ROLLOUT = {"groups_per_step": 4, "group_size": 2, "sampling": {"max_tokens": 8}}
PLAIN = {
    "name": "plain",
    "steps": 3,
    "model": {"path": "m"},
    "tasks": [{"name": "sums", "prompts": {"source": "jsonl"}}],
    "rollout": ROLLOUT,
}


def write(folder, **changes):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(RunConfig.model_validate(PLAIN | changes)))
    return folder


def test_only_what_is_not_the_default_is_listed(tmp_path):
    run = write(tmp_path / "run", seed=3, learner={"optimizer": {"betas": (0.8, 0.9)}})
    found = {each.key: (each.value, each.default) for each in list_changed_settings(run)}
    assert found["seed"] == ("3", "0")
    assert found["learner.optimizer.betas"] == ("[0.8, 0.9]", "[0.9, 0.999]")
    assert found["steps"] == ("3", "")  # required: it has no default
    assert found["tasks.0.name"] == ('"sums"', "")
    assert not {"rollout.async_ratio", "engine.slots", "critic", "teachers", "evaluation.every"} & found.keys()


def test_meaning_of_a_setting_is_that_of_the_reference(tmp_path):
    found = {each.key: each.meaning for each in list_changed_settings(write(tmp_path / "run", seed=3))}
    assert found["steps"]


def test_unknown_keys_are_listed_as_they_are(tmp_path):
    run = write(tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"of_another_version": {"x": [1, {"y": 2}]}}))
    found = {each.key: each.value for each in list_changed_settings(run)}
    assert found["of_another_version.x"] == '[1, {"y": 2}]'


def test_runs_are_compared_without_their_names(tmp_path):
    runs = [write(tmp_path / name, name=name, seed=seed) for name, seed in (("a", 0), ("b", 1), ("c", 1))]
    assert compare_settings(runs) == [("seed", ["0", "1", "1"])]
    assert compare_settings(runs[1:]) == []


def test_absent_setting_is_none(tmp_path):
    runs = [write(tmp_path / "a"), write(tmp_path / "b", rollout=ROLLOUT | {"filter": "spread"})]
    config = yaml.safe_load((runs[0] / "config.yaml").read_text())
    del config["rollout"]["filter"]
    (runs[0] / "config.yaml").write_text(yaml.safe_dump(config))
    assert compare_settings(runs) == [("rollout.filter", [None, '"spread"'])]


@pytest.mark.parametrize(
    ("tree", "flat"),
    [
        ({"a": {"b": 1}, "c": []}, {"a.b": "1", "c": "[]"}),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a.0.b": "1", "a.1.b": "2"}),
        ({"a": [1, 2]}, {"a": "[1, 2]"}),
        ({"a": {}}, {"a": "{}"}),
    ],
)
def test_settings_are_flattened(tree, flat):
    assert dict(flatten_settings(tree)) == flat

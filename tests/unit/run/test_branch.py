"""The configuration of a run that begins at a checkpoint of another, and what it keeps of the other's state."""

import json
from dataclasses import asdict

import pytest
import yaml

from antiphon.algorithms.rewards import AlgorithmState, Moments
from antiphon.core.config import dump, load
from antiphon.core.errors import ConfigError
from antiphon.record.checkpoint import publish_checkpoint, read_state, staging_dir
from antiphon.record.run_dir import RunDirectory
from antiphon.run.branch import default_overrides, prepare_branch
from antiphon.run.components import Progress
from antiphon.run.config import RunConfig
from antiphon.tasks.mixture import Mixture
from tests.raising import raises_with

STEP = 4


@pytest.fixture
def folder(tmp_path):
    for name in ("one", "other"):
        rows = [{"id": f"{name}-{number}", "prompt": "1+1=", "answer": "2"} for number in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "name": "run",
        "steps": 9,
        "model": {"path": "some/model"},
        "tasks": [
            {
                "name": "sums",
                "prompts": {"source": "jsonl", "path": str(tmp_path / "one.jsonl")},
                "reward": "exact_match",
            }
        ],
        "rollout": {"groups_per_step": 2, "group_size": 4, "sampling": {"max_tokens": 8}},
        "critic": {"count": 2},
        "algorithm": {"advantage": "gae"},
        "record": {"directory": str(tmp_path / "runs")},
    }
    source = RunDirectory.create(tmp_path / "runs", "run")
    source.write_config(dump(load(config, model=RunConfig)))
    mixture = Mixture.load(load(config, model=RunConfig).tasks, 0)
    for _ in range(5):
        drawn = mixture.next()
    state = {
        "step": STEP,
        "lineage": 0,
        "version": STEP,
        "progress": asdict(Progress(before=[0.0, 1.0], seconds=7.0)),
        "mixture": mixture.state(),
        "scheduler": {"next_group": 5, "live": [(4, (drawn.task, drawn.id, drawn.epoch))], "deferred": []},
        "controllers": asdict(AlgorithmState(rewards=Moments(count=3, mean=0.5, squares=0.1), kl=0.2)),
    }
    place = source.checkpoints / f"step_{STEP:06d}"
    publish_checkpoint(staging_dir(place), place, json.loads(json.dumps(state)))
    return tmp_path


def changed(folder, *overrides):
    return load(folder / "runs" / "run" / "config.yaml", overrides, model=RunConfig)


def branch(folder, *overrides, **options):
    prepare_branch(folder / "runs" / "run", STEP, changed(folder, *overrides), **options)


def state_of(folder, name):
    return read_state(folder / "runs" / name / "checkpoints" / f"step_{STEP:06d}")


def test_unchanged_configuration_keeps_all_state(folder):
    branch(folder, *default_overrides(folder / "runs" / "run", STEP))
    assert state_of(folder, "run_at_4") == state_of(folder, "run")
    other = folder / "runs" / "run_at_4" / "config.yaml"
    assert other.read_text() == dump(changed(folder, "name=run_at_4"))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("algorithm.loss=cispo", set()),
        ("learner.optimizer.learning_rate=0.5", set()),
        ("rollout.group_size=8", set()),
        ("checkpoint.every=3", set()),
        ("critic=null algorithm.advantage=grpo", set()),
        ("seed=5", {"mixture", "scheduler", "progress"}),
        ("tasks.0.prompts.path=other.jsonl", {"mixture", "scheduler", "progress", "controllers"}),
        ("tasks.0.reward=math", {"controllers", "progress"}),
        ("algorithm.reward.scale=group", set()),
        ("algorithm.kl.coefficient=0.5", {"controllers"}),
        ("rollout.sampling.max_tokens=4", {"progress"}),
        ("evaluation.samples=2", {"progress"}),
    ],
)
def test_change_makes_void_what_depends_on_it(folder, change, parts):
    overrides = change.replace("other.jsonl", str(folder / "other.jsonl")).split()
    branch(folder, "name=new", *overrides)
    before, after = state_of(folder, "run"), state_of(folder, "new")
    assert {part for part in before if before[part] != after[part]} == parts
    if "mixture" in parts:  # the prompts begin anew, under numbers that were not used
        assert after["mixture"]["counts"] == {"sums": 0}
        assert after["scheduler"] == {"next_group": 5, "live": [], "deferred": []}
    if "progress" in parts:
        assert after["progress"] == {**before["progress"], "before": None}
    if change.startswith("algorithm.kl"):
        assert after["controllers"] == {**before["controllers"], "kl": None}


def test_data_file_that_changed_begins_anew(folder):
    (folder / "one.jsonl").write_text((folder / "other.jsonl").read_text())
    branch(folder, "name=new")
    assert state_of(folder, "new")["mixture"]["counts"] == {"sums": 0}


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("model.path", "other/model", "other/model"),
        ("learner.lora", "{rank: 4}", None),
        ("critic.count", "1", 1),
        ("critic.path", "value/model", "value/model"),
        ("sft", "{steps: 3}", None),
        ("steps", "4", 4),
    ],
)
def test_changes_that_cannot_be_are_refused_by_name(folder, key, value, found):
    with pytest.raises(ConfigError) as caught:
        branch(folder, f"{key}={value}", "name=new", *(["steps=8"] if key != "steps" else []))
    assert all(mistake.key.startswith(key) for mistake in caught.value.mistakes)
    assert found in [None, *(mistake.value for mistake in caught.value.mistakes)]
    assert not (folder / "runs" / "new").exists()


def test_a_critic_that_the_checkpoint_lacks_is_refused(folder):
    path = folder / "runs" / "run" / "config.yaml"
    path.write_text(dump(changed(folder, "critic=null", "algorithm.advantage=grpo")))
    with raises_with(ConfigError, key="critic"):
        branch(folder, "critic.count=1", "algorithm.advantage=gae")


def test_a_run_that_exists_is_kept(folder):
    branch(folder, "name=new")
    with raises_with(ConfigError, path=folder / "runs" / "new"):
        branch(folder, "name=new", "algorithm.loss=cispo")
    assert yaml.safe_load((folder / "runs" / "new" / "config.yaml").read_text())["algorithm"]["loss"] == "ppo_clip"
    branch(folder, "name=new", "algorithm.loss=cispo", overwrite=True)
    assert yaml.safe_load((folder / "runs" / "new" / "config.yaml").read_text())["algorithm"]["loss"] == "cispo"


def test_the_source_is_never_overwritten(folder):
    with raises_with(ConfigError, key="name", value="run"):
        branch(folder, overwrite=True)
    assert state_of(folder, "run")


def test_a_new_run_lies_beside_one_that_was_moved(folder):
    moved = (folder / "runs" / "run").rename(folder / "moved")
    config = load(moved / "config.yaml", default_overrides(moved, STEP), model=RunConfig)
    prepare_branch(moved, STEP, config)
    assert (folder / "moved_at_4" / "checkpoints" / "step_000004" / "state.json").exists()


def test_a_step_without_checkpoint_leaves_nothing(folder):
    branch(folder, "name=new")
    with raises_with(ConfigError, key="at", value=3, valid=("4",)):
        prepare_branch(folder / "runs" / "run", 3, changed(folder, "name=new"), overwrite=True)
    assert (folder / "runs" / "new" / "config.yaml").exists()  # is not overwritten for nothing
    with raises_with(ConfigError, key="at"):
        prepare_branch(folder / "runs" / "run", 3, changed(folder, "name=other"))
    assert not (folder / "runs" / "other").exists()


def test_a_damaged_checkpoint_leaves_nothing(folder):
    state = folder / "runs" / "run" / "checkpoints" / f"step_{STEP:06d}" / "state.json"
    state.write_text(state.read_text() + " ")
    with raises_with(ConfigError, key="at", value=STEP, valid=()):
        branch(folder, "name=new")
    assert not (folder / "runs" / "new").exists()

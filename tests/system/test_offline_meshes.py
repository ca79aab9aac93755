"""Offline runs whose models have several ranks: they learn as on one, and what they leave goes on with another number."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from antiphon.core.config import load
from antiphon.core.errors import ConfigError
from tests.raising import raises_with
from tests.system.test_offline import VERBS
from tests.system.test_offline_resume import STEPS, configure, here, metrics, start

DEEP = "model.path=mytask:build_deep"
MANY_PACKS, ONE_PACK = 40, 4000  # tokens a pack; with one alone the second rank has nothing to compute
MESHES = [
    ("dpo", "{shard: 2}", MANY_PACKS),
    ("dpo", "{shard: 2}", ONE_PACK),
    ("dpo", "{tensor: 2, pipeline: 2}", MANY_PACKS),
    ("dpo", "{context: 2}", MANY_PACKS),
    ("reward-model", "{replicate: 2}", ONE_PACK),
    ("reward-model", "{context: 2}", MANY_PACKS),
    ("reward-model", "{pipeline: 2}", MANY_PACKS),
    ("distill", "{shard: 2}", ONE_PACK),
    ("distill", "{context: 2}", MANY_PACKS),
    ("distill", "{pipeline: 2}", MANY_PACKS),
    ("distill", "{tensor: 2}", MANY_PACKS),
]


def numbers(project, name):
    """The metrics of each step but the tokens that were computed: each rank computes the prompts of its own packs."""
    return [[line[key] for key in sorted(line) if key != "learner/tokens"] for line in metrics(project, name)]


def whole(project, name):
    """The model of a run, from all of its files."""
    files = (project.folder / "runs" / name / "model").glob("*.safetensors")
    return {key: array for file in files for key, array in load_file(file).items()}


def assert_close(project, one, other):
    assert len(numbers(project, one)) == STEPS
    for first, second in zip(numbers(project, one), numbers(project, other), strict=True):
        assert second == pytest.approx(first, rel=1e-3, abs=1e-4)
    first, second = whole(project, one), whole(project, other)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert np.abs(array - second[name]).max() < 1e-3, name


@pytest.mark.parametrize(("verb", "mesh", "tokens"), MESHES)
def test_ranks_learn_as_one_does(project, verb, mesh, tokens):
    changes = DEEP, f"learner.tokens_per_pack={tokens}"
    here(project, verb, *changes, "name=one")
    done = start(project, verb, *changes, f"learner.mesh={mesh}")
    assert done.returncode == 0, done.stderr
    assert_close(project, "one", "run")


def test_a_run_goes_on_with_other_ranks(project):
    here(project, "dpo", DEEP, "name=one")
    done = start(project, "dpo", DEEP, "learner.mesh={shard: 2}", mark="learner checkpoint.published 3")
    assert done.returncode == 0 and "the run goes on at its last checkpoint" in done.stdout, done.stderr
    assert_close(project, "one", "run")
    done = start(project, "dpo", DEEP, "learner.mesh={tensor: 2}", "name=shorter", mark="kill checkpoint.published 3")
    assert done.returncode < 0
    here(project, "dpo", DEEP, "name=shorter", resume=True)
    assert_close(project, "one", "shorter")


@pytest.mark.parametrize(
    ("verb", "overrides", "key"),
    [
        ("dpo", ["learner.mesh.shard=2"], "cluster.debug"),
        ("dpo", ["learner.cpu_offload=true"], "cluster.debug"),
        ("dpo", ["placement.learner=gpus"], "placement.learner"),
        ("dpo", ["placement.teacher=cpu:1"], "placement.teacher"),
        ("distill", ["learner.kind=mine:Learner"], "learner.kind"),
        ("reward-model", ["learner.kind=deepspeed", "cluster.debug=false"], "learner.mesh.shard"),
        ("dpo", ["learner.kind=megatron"], "cluster.debug"),
    ],
)
def test_an_impossible_mesh_or_placement_is_one_message(project, verb, overrides, key):
    with raises_with(ConfigError, key=key):
        load(configure(project, verb), overrides, model=VERBS[verb][0])


def test_ranks_are_where_they_are_placed(project):
    done = start(project, "dpo", "placement.learner=cpu:0-1", "learner.mesh={shard: 2}")
    assert done.returncode == 0, done.stderr
    with raises_with(ConfigError, key="placement.learner"):
        here(project, "dpo", "placement.learner=cpu:4000-4001", "name=elsewhere")
    assert not (project.folder / "runs" / "elsewhere").exists()

"""The loader: strict, and every message names the place, the value and what would be valid."""

import importlib
import json
import math
import pickle
import pkgutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

import antiphon
from antiphon.cluster.base import Node
from antiphon.core.config import Config, add_import_folder, dump, load, locate_mistakes
from antiphon.core.errors import ConfigError, DataError, Mistake, UnsupportedError
from antiphon.record.config import RecordConfig
from antiphon.run.config import EvaluationConfig, RunConfig
from antiphon.run.memory import memory_estimate
from antiphon.run.model_files import check_model_path, count_parameters
from antiphon.run.placement import resolve_placement
from tests.raising import raises_with

ROOT = Path(__file__).parents[3]
RECIPES = sorted(ROOT.glob("recipes/*/*.yaml"))

BASE = """\
name: demo
steps: 5
model: {path: somewhere}
tasks:
  - name: sums
    prompts: {source: "task:problems"}
    test: {source: "task:problems"}
    reward: exact_match
rollout:
  groups_per_step: 4
  sampling: {max_tokens: 16}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(BASE)
    return path


def refused(path, *overrides, model=RunConfig):
    """Return the error that loading raises."""
    with pytest.raises(ConfigError) as error:
        load(path, overrides, model=model)
    return error.value


# --- what is read ------------------------------------------------------------------------------------------------------


def test_a_file_becomes_a_frozen_model(file):
    config = load(file, model=RunConfig)
    assert config.rollout.group_size == 8 and config.tasks[0].name == "sums"
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 6


def test_overrides_reach_everything(file):
    config = load(
        file,
        [
            "steps=7",
            "tasks.0.reward=math",
            "tasks.0.reward_options.tolerance=0.5",
            "learner.optimizer.learning_rate=1e-4",
            "learner.optimizer.betas=[0.9, 1]",
            "sft.steps=3",
            "rollout.on_update=drain",
            "rollout.filter=null",
            "evaluation.every=2",
            "tasks.0.system=a=b",
        ],
        model=RunConfig,
    )
    assert (config.steps, config.tasks[0].reward, config.tasks[0].reward_options) == (7, "math", {"tolerance": 0.5})
    assert config.learner.optimizer.learning_rate == 1e-4 and config.learner.optimizer.betas == (0.9, 1.0)
    assert config.sft is not None and config.sft.steps == 3
    assert config.rollout.on_update == "drain" and config.rollout.filter is None
    assert config.tasks[0].system == "a=b"


def test_later_overrides_win(file):
    assert load(file, ["steps=7", "steps=9"], model=RunConfig).steps == 9


class Scalars(Config):
    """One of each."""

    text: str = ""
    number: float = 0.0
    whole: int = 0
    flag: bool = False
    pair: tuple[int, int] = (0, 0)
    options: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("yaml_text", "expected"),
    [
        ("number: 1e-6", {"number": 1e-6}),  # a string in YAML 1.1
        ("number: 1E5", {"number": 1e5}),
        ("number: 3", {"number": 3.0}),
        ("options: {x: .inf}", {"options": {"x": float("inf")}}),
        ("text: on", {"text": "on"}),  # a boolean in YAML 1.1
        ("text: 'yes'", {"text": "yes"}),
        ("text: 2024-01-01", {"text": "2024-01-01"}),  # a date in YAML 1.1
        ("whole: 1_000", {"whole": 1000}),
        ("flag: true", {"flag": True}),
        ("pair: [1, 2]", {"pair": (1, 2)}),
        ("options: &a {x: null}", {"options": {"x": None}}),
        ("{}", {}),
    ],
)
def test_scalars(tmp_path, yaml_text, expected):
    path = tmp_path / "scalars.yaml"
    path.write_text(yaml_text)
    assert load(path, model=Scalars) == Scalars(**expected)


@pytest.mark.parametrize(
    ("yaml_text", "key", "value"),
    [
        ('whole: "3"', "whole", "3"),
        ("whole: 3.0", "whole", 3.0),
        ("whole: 010", "whole", "010"),  # eight in YAML 1.1
        ("whole: true", "whole", True),
        ("number: '1.5'", "number", "1.5"),
        ("number: .inf", "number", math.inf),
        ("flag: 1", "flag", 1),
        ("text: 5", "text", 5),
        ("pair: [1, x]", "pair.1", "x"),
    ],
)
def test_types_are_strict(tmp_path, yaml_text, key, value):
    path = tmp_path / "scalars.yaml"
    path.write_text(yaml_text)
    error = refused(path, model=Scalars)
    assert (error.path, error.key, error.value) == (f"{path}:1", key, value)
    assert type(error.value) is type(value)
    assert str(error).startswith(f"{path}:1: {key}: "), "the message names place and key"


def test_bounds_may_be_infinite_and_nothing_is_nan(file):
    bounds = ("learner.optimizer.max_grad_norm", "algorithm.clip_high", "algorithm.correction.keep_high")
    config = load(file, [f"{key}=.inf" for key in bounds], model=RunConfig)
    assert config.learner.optimizer.max_grad_norm == config.algorithm.clip_high == math.inf
    assert returned(config, file) == config
    for key in (*bounds, "learner.optimizer.learning_rate"):
        assert refused(file, f"{key}=.nan").key == key


# --- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "nearest"),
    [
        ("steps: 5", "steps: 5\nsede: 3", 3, "sede", "seed"),
        ("  groups_per_step: 4", "  groups_per_step: 4\n  group_sise: 4", 11, "rollout.group_sise", "group_size"),
        ("max_tokens: 16", "max_tokens: 16, temprature: 1", 11, "rollout.sampling.temprature", "temperature"),
        ("reward: exact_match", "rewards: exact_match", 8, "tasks.0.rewards", "reward"),
        ("prompts: {", "prompts: {limits: 3, ", 6, "tasks.0.prompts.limits", "limit"),
        ("steps: 5", "steps: 5\ngroup_size: 4", 3, "group_size", "rollout.group_size"),
        ("steps: 5", "steps: 5\nlearning_rate: 1", 3, "learning_rate", "learner.optimizer.learning_rate"),
    ],
)
def test_an_unknown_key_names_the_nearest(file, old, new, line, key, nearest):
    file.write_text(BASE.replace(old, new))
    error = refused(file)
    assert [(mistake.path, mistake.key) for mistake in error.mistakes] == [(f"{file}:{line}", key)]
    assert error.suggestions[0] == nearest and repr(nearest) in str(error)
    assert "name" in error.valid or "." in key, "all keys that are valid there"


def test_a_misspelt_override_names_itself_and_the_nearest_key(file):
    error = refused(file, "learner.optimiser.learning_rate=1e-3")
    assert error.path == "override 'learner.optimiser.learning_rate=1e-3'"
    assert error.key == "learner.optimiser" and error.suggestions == ("optimizer",) and "optimizer" in error.valid


def test_all_mistakes_are_reported_at_once(file):
    file.write_text(BASE.replace("steps: 5", "steps: 0").replace("groups_per_step: 4\n", "order: lifo\n"))
    error = refused(file, "tasks.0.weight=-1")
    assert [(mistake.path, mistake.key, mistake.value) for mistake in error.mistakes] == [
        (f"{file}:2", "steps", 0),
        ("override 'tasks.0.weight=-1'", "tasks.0.weight", -1),
        (f"{file}:9", "rollout.groups_per_step", None),
        (f"{file}:10", "rollout.order", "lifo"),
    ]
    assert len(str(error).splitlines()) == 4


def test_mistakes_found_later_are_located_too(file):
    """What is found when a run starts names keys alone."""
    late = [
        Mistake("tasks.0.reward", "no"),
        Mistake("algorithm.loss", "no"),
        Mistake("", "no"),
        Mistake("a", "no", path="b"),
    ]
    with pytest.raises(ConfigError) as error, locate_mistakes(file, ["algorithm.loss=mine:loss"]):
        raise ConfigError.from_mistakes(late)
    places = [mistake.path for mistake in error.value.mistakes]
    assert places == [f"{file}:8", "override 'algorithm.loss=mine:loss'", "", "b"]
    assert str(error.value).splitlines()[0] == f"{file}:8: tasks.0.reward: no"


def test_an_error_keeps_its_fields_across_processes(file):
    error = refused(file, "learner.optimiser.learning_rate=1e-3")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.mistakes, copy.key) == (str(error), error.mistakes, error.key)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [1, 2\nb: 3", 2),
        ("a:\n\t- 1", 2),
        ("text: a\nnumber: 1\ntext: b", 3),
        ("options:\n  x: 1\n  x: 2", 3),
        ("1: a", 1),
        ("- a\n- b", None),
        ("", None),
        ("options: &a {b: *a}", None),
        ("text: !!python/object:os.system x", 1),
        ("text: \x07", None),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, line):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    assert refused(path, model=Scalars).path == (f"{path}:{line}" if line else str(path))


@pytest.mark.parametrize("name", ["no.yaml", "."])
def test_an_unreadable_file_is_named(tmp_path, name):
    assert refused(tmp_path / name).path == str(tmp_path / name)


@pytest.mark.parametrize(
    ("override", "key", "value", "line"),
    [
        ("steps", "", None, ""),
        ("=3", "", None, ""),
        ("rollout..order=fifo", "", None, ""),
        ("steps.x=3", "steps", 5, ""),
        ("tasks.1.reward=math", "tasks", "1", ""),
        ("tasks.first.reward=math", "tasks", "first", ""),
        ("steps=[1", "", None, ":1"),
        ("steps=", "steps", None, ""),
    ],
)
def test_a_bad_override_names_itself(file, override, key, value, line):
    error = refused(file, override)
    assert (error.path, error.key, error.value) == (f"override {override!r}{line}", key, value)


# --- combinations ------------------------------------------------------------------------------------------------------


PPO = ["algorithm.recipe=ppo", "critic.count=1"]
TURNS = ["rollout.max_turns=9"]
ATROPOS, SCORED = "tasks.0.agent={atropos: 'my:World'}", "tasks.0.reward=agent_result"
DRAWN = "tasks.0.evaluation.sampling"
SGLANG = ["engine={kind: server, options: {urls: ['http://e'], flavour: sglang}}", "rollout.on_update=drain"]
REMOTE = ["tasks.0.reward=judge", "tasks.0.reward_options={address: 'http://j/v1', model: m}"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.group_size=1"], "rollout.group_size"),
        (["rollout.group_size=1", "algorithm.advantage=a:b", "rollout.filter=spread"], "rollout.filter"),
        (["rollout.on_expiry=wait"], "rollout.on_expiry"),
        (["learner.minibatches=5"], "learner.minibatches"),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature"),
        (["rollout.sampling.top_p=0.9"], "rollout.sampling.top_k"),
        (["rollout.sampling.top_k=1025"], "rollout.sampling.top_k"),
        (["rollout.sampling.min_p=0.1"], "rollout.sampling.top_k"),
        (["tasks.0.sampling={top_p: 0.9}"], "tasks.0.sampling.top_k"),
        (["rollout.sampling.top_p=0.9", "rollout.sampling.top_k=20", "engine.kind=vllm"], "rollout.sampling.top_p"),
        (["tasks.0.reward=environment_return"], "tasks.0.reward"),
        (["tasks.0.reward=agent_result"], "tasks.0.reward"),
        ([ATROPOS], "tasks.0.reward"),
        ([ATROPOS, SCORED, "rollout.redundancy=1"], "rollout.redundancy"),
        ([ATROPOS, SCORED, "rollout.sampler=a:b"], "rollout.sampler"),
        ([ATROPOS, SCORED, "tasks.0.group_reward=duplicates"], "tasks.0.group_reward"),
        ([SCORED, "tasks.0.agent={atropos: 'my:World', command: 'true'}"], "tasks.0.agent"),
        ([SCORED, "tasks.0.agent={function: a:b, options: {size: 3}}"], "tasks.0.agent"),
        (["tasks.0.group_reward=duplicate"], "tasks.0.group_reward"),
        ([f"{DRAWN}={{num_beams: 4, temperature: 0.5}}"], f"{DRAWN}.num_beams"),
        ([f"{DRAWN}.num_beams=4", "evaluation.samples=2"], f"{DRAWN}.num_beams"),
        ([f"{DRAWN}.num_beams=4", "engine.kind=vllm"], f"{DRAWN}.num_beams"),
        ([f"{DRAWN}.num_beams=4", "engine.also=[{kind: vllm}]"], f"{DRAWN}.num_beams"),
        ([f"{DRAWN}.length_penalty=2"], f"{DRAWN}.length_penalty"),
        ([f"{DRAWN}={{num_beams: 1, early_stopping: never}}"], f"{DRAWN}.early_stopping"),
        ([f"{DRAWN}.repetition_penalty=1.1", *SGLANG], f"{DRAWN}.repetition_penalty"),
        (["tasks.0.group_reward=duplicates", "rollout.sampler=a:b"], "tasks.0.group_reward"),
        (["tasks.0.group_reward_options={penalty: 1}"], "tasks.0.group_reward_options"),
        (["tasks.0.environment=guess_number"], "rollout.max_turns"),
        (["tasks.0.environment=frozen_lake", "rollout.max_turns=19"], "rollout.max_turns"),
        (
            ["tasks.0.environment=my:World", "tasks.0.environment_options={turns: 4}", "rollout.max_turns=3"],
            "rollout.max_turns",
        ),
        ([*TURNS, "algorithm.recipe=gigpo", "algorithm.reward.clip=1"], "algorithm.reward.clip"),
        (
            [*TURNS, "algorithm.advantage=turn_reinforce", "algorithm.reward={baseline: batch, scale: batch}"],
            "algorithm.reward.baseline",
        ),
        (
            [*TURNS, *PPO, "tasks.0.environment=guess_number", "algorithm.reward.baseline=running"],
            "algorithm.reward.baseline",
        ),
        (["tasks.0.test=", "evaluation.every=2"], "evaluation.every"),
        (["tasks.0.test=", "evaluation.minimum_accuracy=0.5"], "evaluation.minimum_accuracy"),
        (["sft.steps=3", "sft.stop_accuracy=0.5"], "sft.stop_accuracy"),
        (["engine.max_length=16"], "rollout.sampling.max_tokens"),
        (["name=a/b"], "name"),
        (['name=""'], "name"),
        (['name="a\\nb"'], "name"),
        (["algorithm.advantage=gpro"], "algorithm.advantage"),
        (["algorithm.loss=ppo"], "algorithm.loss"),
        (["learner.stages=[annotate, update]"], "learner.stages.1"),
        (["engine.kind=vlm"], "engine.kind"),
        (["weights.encoding=delta"], "weights.encoding"),
        (["engine.also=[{kind: vlm}]"], "engine.also.0.kind"),
        (["engine.dtype=bf16"], "engine.dtype"),
        (["engine.also=[{dtype: int32}]"], "engine.also.0.dtype"),
        (["engine.also=[{minimum: 1}]"], "engine.also.0.minimum"),
        (["engine.also=[{routed_experts: true}]"], "engine.also.0.routed_experts"),
        (["engine.also=[{max_length: 9}]"], "rollout.sampling.max_tokens"),
        (["engine.also=[{replicas: 2}]", "engine.minimum=4"], "engine.minimum"),
        (["engine.also=[{}]", "rollout.workers=1"], "engine.also"),
        (["engine.also=[{}]", "placement.auto=true"], "engine.also"),
        (["placement.auto=true", "cluster={kind: ray, address: auto}"], "placement.auto"),
        (["engine.options={tensor_parallel_size: two}"], "engine.options.tensor_parallel_size"),
        (["cluster.kind=rey"], "cluster.kind"),
        (["cluster.kind=ray", "cluster.debug=true"], "cluster.debug"),
        (["cluster.kind=ray", "engine.python=other/python"], "engine.python"),
        (["cluster.kind=ray", "engine.also=[{python: other/python}]"], "engine.also.0.python"),
        (["cluster.debug=true", "learner.kind=megatron"], "cluster.debug"),
        (["algorithm.expert_balance=1", "learner.kind=deepspeed", "learner.mesh.shard=2"], "algorithm.expert_balance"),
        (["learner.kind=megatron", "learner.mesh={shard: 2, replicate: 2}"], "learner.mesh.replicate"),
        (["meshes.critic={shard: 2}"], "meshes.critic"),
        (["meshes.teacher={}"], "meshes.teacher"),
        (["meshes.reference={shard: 2}"], "meshes.reference"),
        (["meshes.reference={shard: 2}", "algorithm.kl.coefficient=0.1", "learner.lora={rank: 4}"], "meshes.reference"),
        (["learner.lora={modules_to_save: [norm]}", "learner.kind=megatron"], "learner.lora.modules_to_save"),
        (["learner.lora={dropout: 1}"], "learner.lora.dropout"),
        (["learner.freeze=['*.gate.*']", "learner.mesh.pipeline=2"], "learner.freeze"),
        (["learner.freeze=['*.gate.*']", "learner.kind=megatron"], "learner.freeze"),
        ([*PPO, "meshes.critic={shard: 3, expert: 2}"], "meshes.critic.expert"),
        ([*PPO, "meshes.critic={tensor: 0}"], "meshes.critic.tensor"),
        ([*PPO, "meshes.critics={shard: 2}"], "meshes.critics"),
        ([*PPO, "meshes.critic={shard: 2}", "cluster.debug=true"], "cluster.debug"),
        (
            [*PPO, "meshes.critic={pipeline: 2}", "learner.gradient_checkpointing=true", "algorithm.expert_balance=1"],
            "meshes.critic.pipeline",
        ),
        (
            ["learner.kind=deepspeed", "learner.mesh.shard=2", "algorithm.kl.coefficient=0.1", "meshes.reference={}"],
            "meshes.reference.shard",
        ),
        (
            ["learner.kind=megatron", "algorithm.kl.coefficient=0.1", "meshes.reference.replicate=2"],
            "meshes.reference.replicate",
        ),
        (["cluster.address=auto"], "cluster.address"),
        (["cluster.kind=ray", "cluster.address=ray://head:10001"], "cluster.address"),
        (["rollout.filter=spred"], "rollout.filter"),
        (["tasks.0.reward=exactmatch"], "tasks.0.reward"),
        (["tasks.0.prompts.source=jsonn"], "tasks.0.prompts.source"),
        (["tasks.0.environment=guess", "rollout.max_turns=3"], "tasks.0.environment"),
        (["cluster.env={CUDA_VISIBLE_DEVICES: '0'}"], "cluster.env"),
        (["cluster.env={'A B': c}"], "cluster.env"),
        ([*REMOTE, "grading.judge_budget=1"], "grading.judge_budget"),
        ([*REMOTE, "tasks.0.grading.judge_budget=1"], "tasks.0.grading.judge_budget"),
        ([*REMOTE, "tasks.0.reward_options.requests_per_minute=300"], "tasks.0.reward_options"),
        (
            [*REMOTE, "tasks.0.reward_options.requests_per_minute=600", "rollout.workers=2", "engine.replicas=2"],
            "tasks.0.reward_options",
        ),
    ],
)
def test_impossible_combinations_are_refused(file, overrides, key):
    assert [mistake.key for mistake in refused(file, *overrides).mistakes] == [key]


@pytest.mark.parametrize("section", ["rollout.sampling", "tasks.0.sampling"])
@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "num_beams"])
def test_penalties_in_training_are_refused_with_their_place(file, section, name):
    error = refused(file, f"{section}.{name}=1")
    assert error.key == f"{section}.{name}" and f"{DRAWN}.{name}" in error.suggestions


def test_engines_that_have_penalties_are_fine(file):
    servers = ["engine={kind: server, options: {urls: ['http://e']}}", "rollout.on_update=drain"]
    for engine in (["engine.kind=vllm"], servers, ["engine.kind=my:Engine"]):
        load(
            file, [f"{DRAWN}={{repetition_penalty: 1.1, presence_penalty: 1, num_beams: 1}}", *engine], model=RunConfig
        )


def test_beams_are_searched_for_one_greedy_sample(file):
    """Samples and temperatures of a command line replace the search."""
    config = load(file, [f"{DRAWN}={{num_beams: 4, length_penalty: 0.5, early_stopping: never}}"], model=RunConfig)
    sampling = config.plan_evaluation()["sums"].sampling
    assert (sampling.num_beams, sampling.length_penalty, sampling.early_stopping) == (4, 0.5, "never")
    for samples, temperature, beams in ((1, None, 4), (1, 0.0, 4), (3, None, 1), (None, 1.0, 1), (2, 0.0, 1)):
        assert config.plan_evaluation(samples, temperature)["sums"].sampling.num_beams == beams


@pytest.mark.parametrize(
    "overrides",
    [
        ["tasks.0.reward_options.requests_per_minute=600"],
        ["tasks.0.reward_options.requests_per_minute=300", "grading.deadline=13"],
        ["tasks.0.reward_options.requests_per_minute=300", "grading.concurrency=50"],
        ["tasks.0.reward_options.output_price=2", "grading.judge_budget=1"],
    ],
)
def test_a_remote_judge_within_its_bounds_is_fine(file, overrides):
    (options,) = load(file, [*REMOTE, *overrides], model=RunConfig).remote_judges
    assert options["model"] == "m"


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algorithm.advantage=gpro", "grpo"),
        ("cluster.kind=rey", "ray"),
        ("rollout.filter=spred", "spread"),
        ("tasks.0.reward=exactmatch", "exact_match"),
        ("tasks.0.prompts.source=jsonn", "jsonl"),
        ("tasks.0.group_reward=duplicate", "duplicates"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest(file, override, nearest):
    key, _, name = override.partition("=")
    error = refused(file, override)
    assert (error.key, error.value, error.suggestions) == (key, name, (nearest,)) and nearest in error.valid


@pytest.mark.parametrize(
    "overrides",
    [
        ["learner.mesh={context: 2, context_attention: keys}"],
        ["learner.kind=megatron", "learner.mesh={tensor: 2, context: 2, pipeline: 2}"],
        ["learner.kind=deepspeed", "learner.mesh.shard=2"],
    ],
)
def test_attention_is_read_on_every_mesh(file, overrides):
    load(file, ["algorithm.rhythm.kind=local", *overrides], model=RunConfig)


def test_a_critic_is_torchs_on_meshes_of_no_other_kind(file):
    zero = ["learner.kind=deepspeed", "learner.options.stage=1", "learner.mesh.shard=2", "learner.cpu_offload=true"]
    config = load(file, [*PPO, *zero, "meshes.critic={tensor: 2}"], model=RunConfig)
    critic = config.learner_of("critic")
    assert (critic.kind, critic.mesh.tensor, critic.mesh.shard, critic.cpu_offload) == ("torch", 2, 1, True)
    assert config.learner_of("reference") == config.learner
    assert load(file, [*PPO, *zero, "meshes.critic={}"], model=RunConfig).learner_of("critic").kind == "torch"
    own = load(file, [*PPO, *zero, "meshes.critic={shard: 3}"], model=RunConfig).learner_of("critic")
    assert (own.kind, own.options, own.mesh.shard) == ("deepspeed", {"stage": 1}, 3)
    assert load(file, [*PPO, *zero], model=RunConfig).learner_of("critic") == config.learner
    assert load(file, [*PPO, *zero, "critic.kind=torch"], model=RunConfig).learner_of("critic").kind == "torch"


def test_a_critic_of_a_learner_of_ones_own_is_torchs(file):
    config = load(file, [*PPO, "learner.kind=mine:Learner", "learner.options.speed=3"], model=RunConfig)
    critic = config.learner_of("critic")
    assert (critic.kind, critic.options) == ("torch", {})


def test_a_world_imported_first_changes_no_loading(file):
    """In a process of its own: what is imported before a configuration is loaded decides nothing."""
    script = (
        "from antiphon_envs.countdown.environment import Countdown\n"
        "from antiphon.core.config import load\n"
        "from antiphon.run.config import RunConfig\n"
        f"print(load({str(file)!r}, ['tasks.0.environment=countdown', 'rollout.max_turns=30'], model=RunConfig).name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "demo\n", done.stderr


@pytest.mark.parametrize(
    "overrides",
    [
        [*TURNS, "algorithm.recipe=gigpo", "algorithm.reward.scale=running"],
        [*TURNS, "algorithm.recipe=grpo", "algorithm.reward={baseline: batch, clip: 5}"],
        [*TURNS, *PPO, "algorithm.reward={baseline: running, clip: 5}"],
        [*PPO, "algorithm.reward={baseline: running, scale: running, clip: 5}"],
    ],
)
def test_shaping_that_turns_can_share_is_fine(file, overrides):
    load(file, overrides, model=RunConfig)


def test_several_turns_without_an_environment_are_fine(file):
    assert load(file, ["rollout.max_turns=3"], model=RunConfig).rollout.max_turns == 3


# --- what a configuration amounts to -----------------------------------------------------------------------------------


def test_derived_numbers(file):
    config = load(
        file,
        ["rollout.async_ratio=1.5", "rollout.extra_groups=2", "rollout.redundancy=1", "learner.minibatches=2"],
        model=RunConfig,
    )
    assert config.derived() == {
        "groups alive": 12,
        "attempts alive": 108,
        "sequences decoded at once": 64,
        "most versions between start and use": 2,
        "samples a step": 32,
        "most sampled tokens a step": 512,
        "optimiser steps a step": 2,
        "optimiser steps in total": 10,
    }


def test_memory_is_counted_per_part(file):
    estimate = memory_estimate(1000, load(file, ["engine.replicas=3", "engine.dtype=bfloat16"], model=RunConfig))
    assert estimate["learner weights"] == 4000 and estimate["optimiser moments"] == 8000
    assert estimate["engine weights"] == 6000 and estimate["reference weights"] == 0
    assert estimate["all"] == sum(size for name, size in estimate.items() if name != "all")
    divided = ["learner.mesh.replicate=2", "learner.mesh.shard=4", "learner.mesh.tensor=2", "learner.dtype=bfloat16"]
    estimate = memory_estimate(1000, load(file, divided, model=RunConfig))
    assert estimate["learner weights"] == 8000, "two copies, in float32 whatever is computed in"
    assert estimate["each learner rank"] == 1000 * 16 // 8
    zero = ["learner.kind=deepspeed", "learner.mesh.shard=4"]
    for stage, weights, gradients in ((1, 5, 4), (2, 5, 1), (3, 2, 1)):
        estimate = memory_estimate(1000, load(file, [*zero, f"learner.options.stage={stage}"], model=RunConfig))
        assert estimate["learner weights"] == 4000 * weights and estimate["learner gradients"] == 4000 * gradients


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ([], ""),
        (["engine.dtype=bfloat16"], "bfloat16"),
        (["engine.dtype=float16", "engine.replicas=2"], "float16"),
        (["engine.dtype=bfloat16", "weights.dtype=float32"], ""),
        (["engine.dtype=bfloat16", "engine.also=[{kind: native}]"], ""),
        (["engine.dtype=bfloat16", "engine.kind=vllm"], ""),  # which keeps some of its weights in more
        (["engine.dtype=float64"], ""),
    ],
)
def test_weights_travel_in_the_dtype_of_native_engines(file, overrides, dtype):
    assert load(file, overrides, model=RunConfig).weights_dtype == dtype


@pytest.mark.parametrize(
    ("overrides", "senders"),
    [
        ([], "first"),
        (["weights.channel=distributed"], "all"),
        (["weights.channel=distributed", "weights.senders=first"], "first"),
        (["weights.channel=distributed", "learner.lora={rank: 4}"], "first"),
        (["weights.channel=distributed", "learner.kind=deepspeed", "learner.mesh.shard=2"], "first"),
        (["weights.senders=all"], "all"),
    ],
)
def test_ranks_that_send_follow_from_channel_and_learner(file, overrides, senders):
    assert load(file, overrides, model=RunConfig).weight_senders == senders


@pytest.mark.parametrize(
    "other",
    ["weights.channel=device_memory", "learner.lora={rank: 4}", "learner.kind=deepspeed", "learner.kind=megatron"],
)
def test_ranks_that_cannot_send_pieces_are_refused(file, other):
    with raises_with(ConfigError, key="weights.senders"):
        load(file, ["weights.senders=all", other], model=RunConfig)


def test_models_on_meshes_of_their_own_are_counted_so(file):
    given = [*PPO, "critic.count=2", "algorithm.kl.coefficient=0.1", "learner.mesh={replicate: 2}"]
    alike, apart = (
        load(file, [*given, *more], model=RunConfig)
        for more in ([], ["meshes={critic: {shard: 3}, reference: {replicate: 4}}"])
    )
    before, after = memory_estimate(1000, alike), memory_estimate(1000, apart)
    assert before["critics"] == 2 * after["critics"] == 64_000, "one copy of each, not two"
    assert after["reference weights"] == 2 * before["reference weights"] == 16_000
    assert after["learner weights"] == before["learner weights"]
    ranks = {name: number for name, number in apart.derived().items() if name.endswith("ranks")}
    assert ranks == {"learner ranks": 2, "reference ranks": 4, "critic ranks": 6}


def test_parameters_are_counted_without_loading_them(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    assert count_parameters(str(tmp_path)) is None
    save_file({"a": np.zeros((3, 4)), "b": np.zeros(())}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"c": np.zeros(7)}, tmp_path / "model-2.safetensors")
    save_file({"c": np.zeros(7)}, tmp_path / "consolidated.safetensors")  # once more, as some models come
    files = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert count_parameters(str(tmp_path)) == 12 + 1 + 7


def test_a_model_path_is_a_directory_an_id_or_a_function(tmp_path):
    for path in (str(tmp_path), "owner/model", "gpt2", "recipe:build"):
        check_model_path(path)
    for path in (str(tmp_path / "no"), "./no", "runs/demo/final", "owner/"):
        with raises_with(DataError, path=path):
            check_model_path(path)


# --- there and back ----------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=20) | st.sampled_from(
    ["on", "1e-6", "1.", "null", "~", "010", "2024-01-01", "<<", "=", "- a", "#"]
)
FLOAT = st.floats(allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
SCALARS = st.builds(
    Scalars,
    text=TEXT,
    number=st.floats(allow_nan=False, allow_infinity=False),
    whole=st.integers(-(2**63), 2**63 - 1),
    flag=st.booleans(),
    pair=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    options=st.dictionaries(TEXT, JSON, max_size=3),
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("round_trip") / "config.yaml"


def returned(config, path):
    path.write_text(dump(config), encoding="utf-8")
    return load(path, model=type(config))


@given(SCALARS)
@example(Scalars(options={"bound": [float("-inf")]}))
def test_dumping_and_loading_gives_an_equal_model(scratch, config):
    assert returned(config, scratch) == config


@given(
    seed=st.integers(0, 2**31),
    system=TEXT | st.none(),
    ratio=st.floats(0, 8),
    rate=st.floats(1e-12, 1, exclude_min=True),
    on_update=st.sampled_from(["keep", "recompute", "restart", "drain"]),
    stop=st.lists(TEXT, max_size=3),
    sft=st.booleans(),
)
@settings(max_examples=30)
def test_a_run_survives_the_trip(scratch, seed, system, ratio, rate, on_update, stop, sft):
    raw = yaml.safe_load(BASE)
    raw |= {"seed": seed, "learner": {"optimizer": {"learning_rate": rate}}}
    raw["tasks"][0]["system"] = system
    raw["rollout"] |= {"async_ratio": ratio, "on_update": on_update}
    raw["rollout"]["sampling"]["stop"] = stop
    raw["sft"] = {"steps": 3} if sft else None
    config = RunConfig.model_validate(raw)
    assert returned(config, scratch) == config


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_loads_and_survives_the_trip(path, scratch):
    config = load(path, model=RunConfig)
    assert returned(config, scratch) == config


# --- lightness ---------------------------------------------------------------------------------------------------------


def test_reading_a_configuration_imports_no_torch():
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("antiphon/*/config.py")]
    script = f"""
import importlib, sys, tempfile
for module in {modules}: importlib.import_module(module)
from antiphon.core.config import load
from antiphon.run.config import RunConfig
from antiphon.run.placement import resolve_placement
with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
    file.write({BASE!r}); file.flush()
    load(file.name, model=RunConfig)
print(*({{"torch", "ray", "transformers", "datasets"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_folder_of_a_file_is_importable(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_yaml.py").write_text("answer = 42\n")
    add_import_folder(tmp_path / "config.yaml")
    add_import_folder(tmp_path / "config.yaml")
    assert sys.path.count(str(tmp_path)) == 1
    from beside_the_yaml import answer

    assert answer == 42


@pytest.mark.parametrize(
    ("given", "samples", "temperature"),
    [(None, 1, 0.0), (None, 2, 1.0), (None, 8, 1.0), (0.0, 8, 0.0), (0.6, 1, 0.6), (0.6, 8, 0.6)],
)
def test_evaluation_temperature_goes_by_the_samples(given, samples, temperature):
    assert EvaluationConfig(temperature=given).resolve_temperature(samples) == temperature


def test_runs_are_written_to_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(None, ["directory=~/runs"], model=RecordConfig).directory == str(tmp_path / "runs")


def test_every_default_is_valid_when_it_is_given():
    """A dumped configuration has all defaults, and is read again."""
    for module in pkgutil.walk_packages(antiphon.__path__, "antiphon."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError, UnsupportedError):  # of an extra
                importlib.import_module(module.name)
    models, found = [Config], []
    for model in models:
        models += model.__subclasses__()
        found += [
            (model, name)
            for name, field in model.model_fields.items()
            if model.__module__.startswith("antiphon") and isinstance(field.default, float | int | tuple)
        ]
    assert len(found) > 200
    for model, name in found:
        field = model.model_fields[name]
        TypeAdapter(Annotated[field.annotation, "default", *field.metadata], config=model.model_config).validate_python(
            field.default
        )


def test_ranks_on_two_nodes_do_not_send_through_the_memory_of_one(file):
    nodes = [Node("a", cores=(0, 1)), Node("b", cores=(0, 1))]
    given = ["learner.mesh.shard=2", "placement.learner='node0.cpu:0-0, node1.cpu:0-0'", "weights.host=10.0.0.1"]
    given += ["placement.engine=node0.cpu:1-1"]
    assert resolve_placement(nodes, load(file, given, model=RunConfig)).places["learner"]
    with raises_with(ConfigError, key="weights.senders"):
        resolve_placement(nodes, load(file, [*given, "weights.senders=all"], model=RunConfig))


def test_groups_of_atropos_are_scored_together(file):
    assert not load(file, model=RunConfig).judged_together
    config = load(file, [ATROPOS, SCORED], model=RunConfig)
    assert config.judged_together == {config.tasks[0].name}

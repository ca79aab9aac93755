"""Each algorithm of the recipes in a whole run, and what is particular to some. Workers are threads here."""

import json
import math
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.recipes import RECIPES
from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import ConfigError, DataError
from antiphon.core.types import VALUES
from antiphon.inspect.audit import audit
from antiphon.inspect.why import why
from antiphon.record.trajectories import read
from antiphon.run import commands
from antiphon.run.config import RunConfig
from tests import warm
from tests.chaos.test_resume import KILLED, last_checkpoint, trained
from tests.raising import raises_with

AGENT = [
    {
        "name": "guess",
        "prompts": {"source": "mytask:problems"},
        "environment": "mytask:Lengths",
        "reward": "environment_return",
    }
]


def sections(project, recipe, **algorithm):
    """What a run with this recipe needs beside it."""
    rollout = {"groups_per_step": 2, "group_size": 4, "async_ratio": 1, "timeout": 180, "sampling": {"max_tokens": 8}}
    found = {"algorithm": {"recipe": recipe, **algorithm}, "rollout": rollout}
    if VALUES in AlgorithmConfig.model_validate({"recipe": recipe}).required_streams:
        found["critic"] = {"count": 2, "disjoint": True, "optimizer": {"learning_rate": 1e-2}}
    if recipe in ("gigpo", "step_reinforce"):
        found |= {"tasks": AGENT, "rollout": rollout | {"max_turns": 4}}
    if recipe == "opd":
        found["teachers"] = [{"path": str(project.model), "tasks": ["digits"]}]
    return found


def train(project, *overrides, **given):
    path = project.config(**given)
    add_import_folder(path)
    config = load(path, ("cluster.debug=true", "record.live=off", "evaluation.limit=1", *overrides), model=RunConfig)
    return commands.train(config, overwrite=True)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_recipe_trains(project, recipe):
    assert train(project, "steps=2", **sections(project, recipe)) == 0
    steps = project.metrics()
    assert len(steps) == 2 and all(math.isfinite(value) for step in steps for value in step.values())
    assert any(step["learner/grad_norm"] > 0 for step in steps)
    assert not audit(project.folder / "runs" / "run").violations


def test_a_penalty_in_the_reward_is_held_at_its_target(project):
    kl = {"coefficient": 0.01, "place": "reward", "target": 1e-6, "horizon": 8, "estimator": "k1"}
    reward = {"baseline": "running", "scale": "running"}
    assert train(project, "steps=4", **sections(project, "reinforce++", kl=kl, reward=reward)) == 0
    steps = project.metrics()
    coefficients = [step["reward/kl_coefficient"] for step in steps]
    for step, now, then in zip(steps, coefficients, coefficients[1:], strict=False):
        assert then == pytest.approx(now * (1 + min(max(step["reward/kl"] / 1e-6 - 1, -0.2), 0.2)))


def test_moe_is_trained_through_the_experts_that_sampled(project, tmp_path):
    mixture = tmp_path / "mixture"
    shutil.copytree(project.model, mixture)
    dense = AutoConfig.from_pretrained(project.model)
    shape = {name: getattr(dense, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id")}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads, **experts)).save_pretrained(mixture)
    recorded = {"model": {"path": str(mixture)}, "engine": {"routed_experts": True, "dtype": "bfloat16"}}
    given = sections(project, "decoupled_ppo")
    assert train(project, "steps=2", "learner.epochs=2", **given | recorded) == 0
    rows = pq.read_table(next((project.folder / "runs" / "run" / "rollouts").glob("*.parquet"))).to_pylist()
    streams = [{stream["name"]: stream for stream in row["streams"]} for row in rows]
    assert streams and all("routed_experts" in found for found in streams)
    assert not audit(project.folder / "runs" / "run").violations


def test_truncated_sampling_is_trained_on_as_it_was_sampled(project):
    """Engine, learner and reference agree about the truncated distribution; one task has a limit of its own."""
    digits = {"name": "digits", "prompts": {"source": "mytask:problems"}, "reward": "mytask:digits"}
    tasks = [digits, digits | {"name": "narrow", "sampling": {"top_k": 3}}]
    given = sections(project, "decoupled_ppo", kl={"coefficient": 0.1})
    given["rollout"] |= {"async_ratio": 0}
    given["rollout"]["sampling"] |= {"top_p": 0.8, "top_k": 6}
    overrides = ["steps=2", "learner.epochs=2", "learner.optimizer.learning_rate=1e-12"]
    assert train(project, *overrides, **given, tasks=tasks) == 0
    for step in project.metrics():
        assert max(abs(step["learner/mismatch_kl"]), abs(step["learner/reference_kl"])) < 1e-8 < step["learner/tokens"]
    run = project.folder / "runs" / "run"
    widths = set()
    for file in (run / "rollouts").glob("*.parquet"):
        for row in pq.read_table(file).to_pylist():
            (stream,) = [each for each in row["streams"] if each["name"] == "sampling_support"]
            widths.add((row["task"], *stream["shape"]))
    assert widths == {("digits", 6), ("narrow", 3)}
    assert not audit(run).violations


def test_critics_are_part_of_the_cut(project):
    """Killed and gone on with, actor and critics are what they would have been, to the last bit; and so in a replay."""

    def config(name):
        given = sections(project, "asyppo", kl={"coefficient": 0.1, "place": "reward", "target": 0.1, "horizon": 50})
        given["rollout"] |= {"async_ratio": 0, "deterministic": True, "max_attempts": 2}
        given["critic"]["warmup_steps"] = 1
        path = project.config(
            name=name, steps=5, checkpoint={"every": 1, "keep_every": 1}, cluster={"debug": True}, **given
        )
        return path.rename(path.with_name(f"{name}.yaml"))

    whole, cut = project.folder / "runs" / "whole", project.folder / "runs" / "cut"
    assert project.run("train", config("whole")).returncode == 0
    path = config("cut")
    assert warm.run("-c", KILLED, "checkpoint.published", 4, "train", path).returncode == -signal.SIGKILL
    assert not audit(cut).violations
    resumed = project.run("train", path, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert list(trained(cut)) == list(trained(whole))
    assert last_checkpoint(cut) == last_checkpoint(whole)
    for number in range(2):
        critics = [max((run / "checkpoints").glob("step_??????")) / "critics" / str(number) for run in (cut, whole)]
        models = [AutoModelForSequenceClassification.from_pretrained(place, num_labels=1) for place in critics]
        ours, theirs = (model.state_dict() for model in models)
        assert all((ours[name] == theirs[name]).all() for name in ours) and ours["score.weight"].abs().max() > 0
    same = project.run("replay", cut, "--code", project.folder, "--weights")
    assert same.returncode == 0 and "no difference" in same.stdout, same.stdout + same.stderr
    blind = project.run("replay", cut, "--code", project.folder)
    assert blind.returncode == 2 and "replay it with --weights" in blind.stderr


def test_fine_tuning_alone_needs_nothing_beside_the_model(project):
    """... though the same configuration has all of it."""
    given = sections(project, "asyppo", kl={"coefficient": 0.1}, teacher_coefficient=1.0)
    path = project.config(
        **given,
        teachers=[{"path": str(project.model)}],
        meshes={"critic": {}, "reference": {}, "teacher": {}},
        sft={"steps": 2, "batch_size": 4},
        cluster={"debug": True},
    )
    done = project.run("sft", path)
    assert done.returncode == 0, done.stderr
    (checkpoint,) = (project.folder / "runs" / "run" / "checkpoints").iterdir()
    assert not (checkpoint / "critics").exists()
    assert load(project.folder / "runs" / "run" / "config.yaml", model=RunConfig).critic is None


@pytest.mark.parametrize("added", [{}, {"quantize": "nf4"}, {"modules_to_save": ["embed_tokens", "norm"]}], ids=str)
def test_adapters_in_a_whole_run(project, added):
    """Engines say what the learner says; the reference is the model without them; what is kept is a model directory."""
    given = sections(project, "grpo", kl={"coefficient": 0.1})
    given["rollout"]["async_ratio"] = 0
    learner = {"lora": {"rank": 4, **added}, "optimizer": {"learning_rate": 1e-2}}
    assert train(project, "steps=3", **given, learner=learner, checkpoint={"every": 1}) == 0
    steps = project.metrics()
    assert all(abs(step["learner/mismatch_kl"]) < 1e-6 for step in steps)
    assert abs(steps[0]["learner/reference_kl"]) < 1e-6 < steps[-1]["learner/reference_kl"]
    assert train_on(project, "steps=5") == 0 and len(project.metrics()) == 5
    place = max((project.folder / "runs" / "run" / "checkpoints").iterdir())
    assert AutoModelForCausalLM.from_pretrained(place) and (place / "adapter" / "adapter_config.json").is_file()


def test_dropout_is_no_fault_of_a_run(project):
    """Updates differ from what engines sampled; the first reference, recorded without dropout, is what they sampled."""
    given = sections(project, "grpo", kl={"coefficient": 0.1})
    learner = {"lora": {"rank": 4, "dropout": 0.2}, "optimizer": {"learning_rate": 1e-2}}
    assert train(project, "steps=3", **given, learner=learner) == 0
    first, *later = project.metrics()
    assert first["learner/mismatch_kl"] < 1e-6 < max(step["learner/mismatch_kl"] for step in later)
    assert audit(project.folder / "runs" / "run").violations == []


def train_on(project, *overrides):
    config = load(
        project.folder / "config.yaml",
        ("cluster.debug=true", "record.live=off", "evaluation.limit=1", *overrides),
        model=RunConfig,
    )
    return commands.train(config, resume=True)


@pytest.mark.parametrize(
    "change, key",
    [
        ({"critic": {"count": 1}}, "critic"),
        ({"algorithm": "asyppo", "critic": {"count": 2}}, "critic.disjoint"),
        ({"algorithm": "ppo", "critic": {"path": "mytask:build"}}, "critic.path"),
        ({"algorithm": "ppo", "critic": {}, "learner": {"stages": ["annotate", "advantages"]}}, "learner.stages"),
        ({"algorithm": "dapo", "learner": {"stages": ["annotate", "advantages"]}}, "learner.stages"),
        (
            {"algorithm": {"reward": {"overlong_tokens": 2}}, "rollout": {"max_turns": 2}},
            "algorithm.reward.overlong_tokens",
        ),
        ({"algorithm": {"recipe": {"a": 1}}}, "algorithm.recipe"),
        ({"algorithm": {"correction": {"proximal": "interpolated"}}}, "algorithm.correction.proximal"),
        ({"algorithm": {"correction": {"level": "token", "keep_low": 3}}}, "algorithm.correction.keep_low"),
        ({"algorithm": {"weight": {"mask_difficulty": [0.9, 0.1]}}}, "algorithm.weight.mask_difficulty"),
        ({"algorithm": {"recipe": "asyppo", "entropy_coefficient": 0}}, "algorithm.disagreement_mask"),
        ({"algorithm": "ppo"}, "critic"),
        ({"algorithm": "asyppo", "critic": {"count": 1}}, "critic.count"),
        ({"algorithm": "ppo", "critic": {"count": 9, "disjoint": True}}, "critic.count"),
        ({"algorithm": "ppo", "critic": {"warmup_steps": 3}}, "critic.warmup_steps"),
        ({"algorithm": "opd"}, "teachers"),
        ({"algorithm": "opd", "teachers": [{"path": "a", "tasks": ["sums"]}]}, "teachers.0.tasks"),
        ({"teachers": [{"path": "a"}]}, "algorithm.teacher_coefficient"),
        ({"algorithm": {"recipe": "gigpo"}, "rollout": {"group_size": 1, "max_turns": 2}}, "rollout.group_size"),
        ({"algorithm": {"recipe": "gspo", "ratio_level": "turn"}}, "algorithm.ratio_level"),
        ({"algorithm": "gigpo"}, "algorithm.advantage"),
    ],
)
def test_unmet_needs_of_an_algorithm_are_reported_early(project, change, key):
    with pytest.raises(ConfigError) as refused:
        load(project.config(**change), model=RunConfig)
    assert [mistake.key for mistake in refused.value.mistakes] == [key]


def test_a_teacher_with_other_tokens_is_refused(project, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(project.model, teacher)
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with raises_with(DataError, match="'a'", path=teacher):
        train(project, algorithm="opd", teachers=[{"path": str(teacher)}])


FAULTY = """
import math
from dataclasses import replace

from antiphon.engines.native.factory import open_engine as open_native

FAULTS = [
    lambda told: told * math.nan,
    lambda told: told - math.inf,
    lambda told: told + math.inf,
    lambda told: 0 * told + 1.5,
    lambda told: 0 * told - 9999.0,
    lambda told: told[1:],
]


class Faulty:
    # Of one request in eight, what it tells first are no log-probs.
    def __init__(self, core):
        self._core, self._count, self._faults = core, 0, {}

    def __getattr__(self, name):
        return getattr(self._core, name)

    def add(self, request):
        self._core.add(request)
        self._count += 1
        if self._count % 8 == 0:
            self._faults[request.id] = FAULTS[self._count // 8 % len(FAULTS)]

    def step(self):
        return [self._spoil(delta) for delta in self._core.step()]

    def _spoil(self, delta):
        fault = self._faults.pop(delta.request, None) if len(delta.tokens) else None
        return replace(delta, logprobs=fault(delta.logprobs)) if fault else delta


def open_engine(model, config, receive):
    return Faulty(open_native(model, config, receive))
"""


@pytest.mark.parametrize("recipe", ["topr", "kimi"])
def test_impossible_logprobs_are_never_trained_on(project, recipe):
    (project.folder / "faulty.py").write_text(FAULTY)
    given = sections(project, recipe)
    given["rollout"] |= {"max_attempts": 50}
    assert train(project, steps=8, engine={"kind": "faulty:open_engine", "device": "cpu"}, **given) == 0
    directory = project.folder / "runs" / "run"
    with closing(sqlite3.connect(directory / "ledger.db")) as ledger:
        failed = ledger.execute("SELECT grp, sibling, try, failure FROM attempts WHERE failure IS NOT NULL").fetchall()
        trained_files = {row[0] for row in ledger.execute("SELECT file FROM attempts WHERE status = 'trained'")}
        names = set(ledger.execute("SELECT grp, sibling, try FROM attempts WHERE status = 'trained'"))
    assert len(failed) >= 6
    assert {failure.partition(":")[0] for *_, failure in failed} == {"engine"}
    for file in trained_files:
        for name, trajectory in read(directory / "rollouts" / file).items():
            if tuple(name) in names:
                told = np.concatenate([segment.logprobs[segment.loss_mask] for segment in trajectory.segments])
                assert np.isfinite(told).all() and told.max() <= 0.01 and told.min() > -1000
    assert all(math.isfinite(line["loss"]) for line in project.metrics() if "loss" in line)
    *identity, failure = failed[0]
    assert dict(why(directory, ".".join(map(str, identity))))["failure"] == failure
    assert not audit(directory).violations


def test_asynchrony_critics_and_rhythm_together_are_resumed(tmp_path):
    """The recipe that has all three, with fewer steps."""
    shutil.copytree(Path(__file__).parents[2] / "recipes" / "tiny_arithmetic", tmp_path, dirs_exist_ok=True)
    small = ["sft.steps=2", "evaluation.limit=8", "evaluation.minimum_accuracy=0", "checkpoint.every=1"]
    for steps, more in ((2, ()), (4, ("--resume",))):
        done = warm.run("-m", "antiphon", "train", "three_a.yaml", f"steps={steps}", *small, *more, directory=tmp_path)
        assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny_arithmetic_three_a"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "step" in step]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert max(step["age/max"] for step in steps) >= 1
    assert all({"critic/1/loss", "critic/spread"} <= step.keys() for step in steps)
    assert not audit(run).violations

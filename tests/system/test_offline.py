"""The offline verbs in whole runs on a tiny model. Workers are threads here."""

import json
import re
import threading
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import antiphon
from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import ConfigError, DataError, StallError
from antiphon.core.types import Message
from antiphon.learning.classifier import Classifier
from antiphon.learning.objectives.distill import Teacher
from antiphon.learning.objectives.pairs import PreferenceLearner, RewardLearner
from antiphon.offline import run as offline
from antiphon.offline.config import DistillConfig, DpoConfig, RewardModelConfig
from antiphon.offline.run import batches
from antiphon.tasks.config import PairsConfig
from antiphon.tasks.prompts import load_examples
from antiphon.tasks.rendering import Renderer
from tests.raising import raises_with

VERBS = {
    "dpo": (DpoConfig, offline.dpo),
    "reward-model": (RewardModelConfig, offline.reward_model),
    "distill": (DistillConfig, offline.distill),
}


@pytest.fixture
def pairs(tmp_path):
    """Pairs of which the better response is the right digit, three times or once, and the other is letters."""
    rows = [
        {"prompt": f"{n % 10}+{n // 10}=", "chosen": str(n % 10) * (1 + 2 * (n % 2)), "rejected": "xy"[: 1 + n % 2]}
        for n in range(40)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(project, verb, **sections):
    given = {
        "name": "run",
        "model": {"path": str(project.model)},
        "batch_size": 8,
        "epochs": 6,
        "learner": {"tokens_per_pack": 40, "optimizer": {"learning_rate": 1e-2}},
        "cluster": {"debug": True},
        "record": {"directory": str(project.folder / "runs"), "live": "off"},
    }
    path = project.folder / f"{verb}.yaml"
    path.write_text(yaml.safe_dump(given | sections))
    add_import_folder(path)
    return path


def run(project, verb, *overrides, **sections):
    model, main = VERBS[verb]
    main(load(config(project, verb, **sections), overrides, model=model), overwrite=True)
    return project.metrics(), project.summary(), project.folder / "runs" / "run" / "model"


def prompts(path, limit=0):
    return {"source": "jsonl", "path": str(path), "limit": limit}


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_a_policy_learns_what_is_preferred(project, pairs, loss):
    steps, summary, model = run(
        project, "dpo", f"dpo.loss={loss}", data=prompts(pairs), validation=prompts(pairs, 8), evaluate_every=10
    )
    assert len(steps) == 30 and steps[0]["learner/margin"] == pytest.approx(0, abs=1e-5)
    assert [s["step"] for s in steps if "evaluation/accuracy" in s] == [10, 20, 30]
    before, after = summary["validation_before"], summary["validation_after"]
    assert after["accuracy"] == 1.0 and after["loss"] < before["loss"] and after["margin"] > 0
    learned, began = (AutoModelForCausalLM.from_pretrained(place) for place in (model, project.model))
    assert any((a != b).any() for a, b in zip(learned.parameters(), began.parameters(), strict=True))
    assert not (model / "training_state").exists() and (model / "tokenizer.json").is_file()


def test_a_reward_model_learns_what_is_preferred_and_grades(project, pairs):
    _, summary, model = run(project, "reward-model", data=prompts(pairs), validation=prompts(pairs, 8))
    assert summary["validation_after"]["accuracy"] == 1.0 and summary["validation_after"]["margin"] > 1
    classifier = Classifier(str(model), "cpu")
    loaded, renderer = AutoModelForSequenceClassification.from_pretrained(model), Renderer(model)
    scores = {}
    for response in ("3", "xy"):
        messages = (Message("user", "3+1="), Message("assistant", response))
        (scores[response],) = classifier.score([classifier.encode(messages)])
        tokens = np.append(renderer.encode_prompt(messages[:1]), renderer.encode_response(response))
        want = loaded(torch.from_numpy(tokens)[None].long()).logits.item()
        assert scores[response] == pytest.approx(want, abs=1e-6)
    assert scores["3"] > scores["xy"] + 1


def test_the_four_models_of_rlhf(project, pairs):
    """A policy, its reference, a critic, and a reward model that was trained here; a profile has them all."""
    _, _, model = run(project, "reward-model", "epochs=3", data=prompts(pairs))
    task = {
        "name": "rlhf",
        "prompts": {"source": "mytask:problems"},
        "reward": "reward_model",
        "reward_options": {"path": str(model)},
    }
    path = project.config(
        name="rlhf",
        steps=3,
        tasks=[task],
        algorithm={"recipe": "ppo", "kl": {"coefficient": 0.05, "place": "reward"}},
        critic={"optimizer": {"learning_rate": 1e-2}},
        grading={"deadline": 60},
        profile={"steps": [2]},
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    traces = (project.folder / "runs" / "rlhf" / "profile" / "step_000002").glob("*.json.gz")
    models = ("critic-0", "engine-0", "learner", "reference", "reward-model-0-0")
    assert sorted(trace.name for trace in traces) == [f"{name}.json.gz" for name in models]
    steps = project.metrics("rlhf")
    assert len(steps) == 3
    for step in steps:
        assert np.isfinite([step[f"{name}"] for name in ("reward/mean", "reward/kl", "critic/0/value")]).all()
        assert step["reward/mean"] != 0 and step["learner/grad_norm"] > 0


TEACHER = """
from mytask import build

def decided(directory, seed):
    from transformers import AutoModelForCausalLM
    build(directory, seed, hidden_size=64)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.lm_head.weight.data *= 20
    model.save_pretrained(directory)
"""


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_student_learns_what_its_teacher_says(project, top_k):
    """The teacher is of another width, and far from the data."""
    (project.folder / "teacher.py").write_text(TEACHER)
    data = {"source": "mytask:problems"}
    steps, summary, model = run(
        project,
        "distill",
        "learner.logits_chunk=7",
        data=data,
        validation={**data, "limit": 8},
        distill={"teacher": "teacher:decided", "top_k": top_k},
    )
    before, after = summary["validation_before"], summary["validation_after"]
    assert after["loss"] == pytest.approx(after["divergence"]) and after["loss"] < before["loss"] / 3
    assert after["accuracy"] > before["accuracy"] + 0.4
    assert steps[-1]["learner/likelihood_loss"] > steps[0]["learner/likelihood_loss"]
    AutoModelForCausalLM.from_pretrained(model)


def test_part_of_it_may_be_the_data_itself(project):
    data, mixed = {"source": "mytask:problems"}, {"teacher": str(project.model), "sft_weight": 0.5}
    steps, _, _ = run(project, "distill", "epochs=2", data=data, distill=mixed)
    assert steps[0]["learner/divergence"] == pytest.approx(0, abs=1e-5)  # it is its own teacher
    for step in steps:
        halves = step["learner/divergence"] + step["learner/likelihood_loss"]
        assert step["learner/loss"] == pytest.approx(halves / 2)
    assert steps[-1]["learner/likelihood_loss"] < steps[0]["learner/likelihood_loss"] - 1


def test_a_run_repeats_itself_in_processes(project, pairs):
    """On the command line, from a model that is built; steps, not epochs; and it does not overwrite what is there."""
    sections = {"data": prompts(pairs), "steps": 3, "model": {"path": "mytask:build"}}
    threads, _, _ = run(project, "dpo", "name=run", **sections)
    path = config(project, "dpo", **sections)
    done = project.run("dpo", path, "cluster.debug=false", "name=again")
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout and str(project.folder / "runs" / "again" / "model") in done.stdout
    first, second = (
        [{k: v for k, v in step.items() if k != "learner/seconds"} for step in steps]
        for steps in (threads, project.metrics("again"))
    )
    assert first == second and len(first) == 3
    with raises_with(ConfigError, match="--overwrite", path=project.folder / "runs" / "run"):
        offline.dpo(load(path, model=DpoConfig))
    result = antiphon.dpo(path, name="python", cluster={"debug": True})
    assert result.exit_code == 0 and result.summary["steps"] == 3 and (result.directory / "model").is_dir()


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is optional: pip install -e '.[peft]'")
@pytest.mark.parametrize("verb", VERBS)
def test_adapters_learn_too(project, pairs, verb):
    """... and what is left behind is a whole model."""
    learner = {"lora": {"rank": 4}, "optimizer": {"learning_rate": 1e-2}}
    given = {"data": {"source": "mytask:problems"}, "distill": {"teacher": "mytask:build_wide"}}
    steps, _, model = run(project, verb, learner=learner, **(given if verb == "distill" else {"data": prompts(pairs)}))
    assert steps[-1]["learner/loss"] < steps[0]["learner/loss"] * 0.9
    kind = AutoModelForSequenceClassification if verb == "reward-model" else AutoModelForCausalLM
    learned, began = (dict(kind.from_pretrained(at).named_parameters()) for at in (model, project.model))
    assert any((learned[name] != began[name]).any() for name in began if "proj" in name)


# --- what users get wrong ------------------------------------------------------------------------------------------------


def test_a_missing_column_is_named(project, pairs):
    with raises_with(DataError, match="chosen_column", column="better"):
        run(project, "dpo", data=prompts(pairs) | {"chosen_column": "better"})
    with raises_with(DataError, match="prompt_column", path=pairs, row=1, column="question"):
        run(project, "dpo", data=prompts(pairs) | {"prompt_column": "question"})
    assert not (project.folder / "runs").exists()


@pytest.mark.parametrize(
    "rows, fields",
    [
        ({"prompt": "", "chosen": "a", "rejected": "b"}, {"row": 1}),
        ({"prompt": "p", "chosen": 3, "rejected": "b"}, {"column": "chosen"}),
        ({"prompt": "p", "chosen": [{"role": "user", "content": "a"}], "rejected": "b"}, {"column": "chosen"}),
    ],
)
def test_a_row_that_is_no_pair_is_named(project, rows, fields):
    (project.folder / "rows.jsonl").write_text(json.dumps(rows))
    with raises_with(DataError, **fields):
        run(project, "dpo", data=prompts(project.folder / "rows.jsonl"))


@pytest.mark.parametrize(
    "verb, override, key, value",
    [
        ("dpo", "dpo.loss=ppo", "dpo.loss", "ppo"),
        ("dpo", "dpo.label_smoothing=0.5", "dpo.label_smoothing", 0.5),
        ("dpo", "dpo={loss: ipo, label_smoothing: 0.1}", "dpo.label_smoothing", 0.1),
        ("dpo", "data.chosen_colum=x", "data.chosen_colum", "x"),
        ("dpo", "learner.epochs=2", "learner.epochs", 2),
        ("dpo", "learner.kind=mine:Learner", "learner.kind", "mine:Learner"),
        ("dpo", "evaluate_every=2", "evaluate_every", 2),
        ("dpo", "name=a/b", "name", "a/b"),
        ("dpo", "data.source=jsonll", "data.source", "jsonll"),
        ("dpo", "record.events=true", "record.events", True),
        ("reward-model", "dpo.beta=1", "dpo", {"beta": 1}),
        ("distill", "distill={teacher: t, skew: 1}", "distill.skew", 1),
    ],
)
def test_an_impossible_configuration_is_one_message(project, pairs, verb, override, key, value):
    with raises_with(ConfigError, key=key, value=value, path=f"override {override!r}"):
        load(config(project, verb, data=prompts(pairs)), [override], model=VERBS[verb][0])


def test_distillation_needs_a_teacher(project, pairs):
    with raises_with(ConfigError, key="distill", value=None):
        load(config(project, "distill", data=prompts(pairs)), model=VERBS["distill"][0])


def test_teacher_with_another_tokenizer_is_refused_early(project):
    teacher = project.folder / "teacher"
    exec(compile("from mytask import build; build(place, 0)", "build", "exec"), {"place": teacher})
    written = json.loads((teacher / "tokenizer.json").read_text())
    words = written["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (teacher / "tokenizer.json").write_text(json.dumps(written))
    (teacher / "model.safetensors").write_bytes(b"")  # that nothing is there is not noticed
    with raises_with(DataError, match="'a'", path=teacher):
        run(project, "distill", data={"source": "mytask:problems"}, distill={"teacher": str(teacher)})


@pytest.mark.parametrize("verb", VERBS)
def test_a_dry_run_prints_a_loadable_configuration(project, pairs, verb):
    sections = {"distill": {"teacher": "no/such/place"}} if verb == "distill" else {}
    path = config(project, verb, data=prompts(pairs), **sections)
    done = project.run(verb, path, "batch_size=5", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"responses an optimiser step{5 if verb == 'distill' else 10:>25}" in done.stdout
    (project.folder / "resolved.yaml").write_text(done.stdout)
    resolved = load(project.folder / "resolved.yaml", model=VERBS[verb][0])
    assert resolved == load(path, ["batch_size=5"], model=VERBS[verb][0])
    assert not (project.folder / "runs").exists()
    wrong = project.run(verb, path, "model.path=no/such/model/here")
    assert (
        wrong.returncode == 2 and wrong.stderr == "antiphon: model 'no/such/model/here': there is no such directory\n"
    )


def test_the_page_shows_what_can_be_loaded(project):
    page = (Path(__file__).parents[2] / "docs" / "offline.md").read_text()
    examples = re.findall(r"```yaml\n# antiphon (\S+)\n(.*?)```", page, re.DOTALL)
    assert [verb for verb, _ in examples] == list(VERBS)
    for verb, text in examples:
        assert len(text.splitlines()) <= 15
        (project.folder / "page.yaml").write_text(text)
        load(project.folder / "page.yaml", model=VERBS[verb][0])


def test_a_response_may_be_the_last_message_of_a_conversation(project):
    said = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (project.folder / "rows.jsonl").write_text(json.dumps({"prompt": said[:1], "chosen": said, "rejected": "7"}))
    ((prompt, responses),) = load_examples("data", PairsConfig(**prompts(project.folder / "rows.jsonl")), 0)
    assert prompt.messages == (Message("user", "1+1="),) and responses == ("2", "7")


@pytest.mark.parametrize(
    "verb, worker, method, on",
    [
        ("dpo", PreferenceLearner, "predict", "the learner"),
        ("reward-model", RewardLearner, "step", "the learner"),
        ("distill", Teacher, "teach", "the teacher"),
    ],
)
def test_a_worker_that_hangs_ends_the_run(project, pairs, monkeypatch, verb, worker, method, on):
    released = threading.Event()
    monkeypatch.setattr(worker, method, lambda *_: released.wait())
    monkeypatch.setattr("antiphon.cluster.local.GRACE", 0.1)
    sections = {"data": prompts(pairs)}
    if verb == "distill":
        sections = {"data": {"source": "mytask:problems"}, "distill": {"teacher": str(project.model)}}
    try:
        # On a machine that is slow enough it is an earlier wait that ends.
        with pytest.raises(StallError, match=on):
            run(project, verb, "timeout=3", **sections)
    finally:
        released.set()
    assert not (project.folder / "runs" / "run" / "model").exists()


def test_every_row_comes_once_an_epoch():
    rows = list(range(10))
    epochs = [[row for batch in islice(draws, 4) for row in batch] for draws in [batches(rows, 3, 7)] for _ in range(3)]
    assert all(sorted(epoch) == rows for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(islice(batches(rows, 3, 7), 12)) == list(islice(batches(rows, 3, 7), 12))
    assert list(islice(batches(rows, 4, None), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]

"""Tasks of lm-eval on engine and learner of a configuration, against lm-eval's own run of the same model by transformers."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from antiphon.core.config import load
from antiphon.core.errors import ConfigError, DataError
from antiphon.run.config import RunConfig
from antiphon.run.suites import measure_suite
from tests.raising import raises_with

pytest.importorskip("lm_eval")

OTHER = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

model, folder, shots = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model)
policy = AutoModelForCausalLM.from_pretrained(model)
for name in ("sums", "long"):  # every second answer is what it says
    path = f"{folder}/{name}.jsonl"
    rows = [json.loads(line) for line in open(path)]
    for row in rows[::2]:
        given = tokenizer(row["question"], return_tensors="pt")["input_ids"][:, -504:]
        said = policy.generate(given, max_new_tokens=8, do_sample=False)[0, given.shape[1]:]
        row["answer"] = tokenizer.decode(said, skip_special_tokens=True).split("5")[0]
    open(path, "w").write("".join(json.dumps(row) + "\\n" for row in rows))
found = lm_eval.simple_evaluate(
    "hf", model_args={"pretrained": model, "dtype": "float32"}, device="cpu", batch_size=4, log_samples=False,
    tasks=["sums", "long", "choice", "text"], task_manager=TaskManager(include_path=folder, include_defaults=False),
    num_fewshot=int(shots) or None,
)
kept = {task: {k: float(v) for k, v in each.items() if isinstance(v, (int, float))} for task, each in found["results"].items()}
print(json.dumps(kept))
"""
COMMON = {"dataset_path": "json", "test_split": "test", "fewshot_split": "test"}
SUMS = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["5"], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
TASKS = {
    "sums": SUMS,
    "long": SUMS,  # questions longer than the model: what is left out is their beginning
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}} ",  # the space goes to the choices
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [
            *({"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")),
            # Of the probabilities, and so of every token that the model reads.
            {"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False},
        ],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "word_perplexity"}],
    },
}
ROWS = {
    "sums": [{"question": f"{n % 10}+{n // 10}=", "answer": "none"} for n in range(12)],
    "long": [{"question": f"{n}+" * 300 + "1=", "answer": "none"} for n in range(4)],
    "choice": [
        {
            "question": f"{n}" + str(7 ** (900 * (n % 2))),
            "choices": ["a", f"{n * 7}", "one", f"{n}x{n}"],
            "label": n % 4,
        }
        for n in range(12)  # every second one is longer than the model
    ],
    "text": [{"text": f"{n} of " * (40 + 60 * n)} for n in range(4)],  # the last are longer than the model
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "suite"
    place.mkdir()
    for name, task in TASKS.items():
        data = {"dataset_kwargs": {"data_files": {"test": str(place / f"{name}.jsonl")}}}
        (place / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **COMMON, **data, **task}))
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    return place


def configured(project):
    path = project.config(cluster={"debug": True}, record={"live": "off"}, learner={"tokens_per_pack": 700})
    return load(path, model=RunConfig)


@pytest.mark.parametrize("shots", [pytest.param(0, marks=pytest.mark.long), 2])
def test_it_measures_what_lm_eval_does_by_transformers(project, folder, shots):
    command = [sys.executable, "-c", OTHER, str(project.model), str(folder), str(shots)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = json.loads(done.stdout.splitlines()[-1])
    found = measure_suite(str(project.model), configured(project), list(TASKS), folder=folder, shots=shots or None)
    assert found.keys() == wanted.keys() == TASKS.keys()
    for task, measures in wanted.items():
        assert found[task] == pytest.approx(measures, rel=1e-5, nan_ok=True), task
    assert shots or found["sums"]["exact_match,none"] == found["long"]["exact_match,none"] == 0.5


def test_the_command_prints_each_task(project, folder):
    path = project.config()
    options = ["--suite", "sums, choice", "--suite-path", folder, "--limit", 3]
    done = project.run("eval", project.model, path, *options)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("sums", "exact_match,none", "choice", "acc_norm,none"))
    refused = project.run("eval", project.model, path, *options, "--samples", 2)
    assert refused.returncode == 2 and "--samples" in refused.stderr


def test_a_task_that_is_not_there_is_named(project, folder):
    with raises_with(ConfigError, key="--suite", value="sum", match="sums"):
        measure_suite(str(project.model), configured(project), ["choice", "sum"], folder=folder)
    (folder / "sums.jsonl").unlink()
    with raises_with(DataError, match="sums"):
        measure_suite(str(project.model), configured(project), ["sums"], folder=folder)

"""`antiphon generate`: samples of a file with their scores, and data for fine-tuning made of the good ones."""

import json
import textwrap
from collections import defaultdict

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from antiphon.core.errors import ConfigError
from antiphon.run.config import RunConfig
from antiphon.run.generate import load_data

REWARD = """
    def letters(prompt, transcript):
        if transcript.response.startswith("0"):
            raise ValueError("a response that cannot be scored")
        return sum(character.isalpha() for character in transcript.response) / prompt.payload["of"]
"""


def configure(project, tasks):
    (project.folder / "letters.py").write_text(textwrap.dedent(REWARD))
    return project.config(tasks=tasks)


def letters(name="letters", **changes):
    return {"name": name, "prompts": {"source": "mytask:problems"}, "reward": "letters:letters"} | changes


def write_rows(project, rows):
    path = project.folder / "data.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def score(row):
    """The reward, counted anew from what the file says."""
    response = row["response"]
    return None if response.startswith("0") else sum(map(str.isalpha, response)) / json.loads(row["row"])["of"]


def test_samples_are_scored_and_the_good_ones_are_data_to_fine_tune_on(project):
    evaluation = {"success_at": 0.9, "sampling": {"max_tokens": 6}}
    config = configure(project, [letters(system="say letters", evaluation=evaluation)])
    data = write_rows(project, [{"id": f"q{n}", "prompt": f"{n}=", "of": 4} for n in range(5)])
    out, best, passed = (project.folder / name for name in ("out.parquet", "best.jsonl", "passed.jsonl"))
    arguments = ("--config", config, "--data", data, "--out", out, "--samples", "6", "--best", best, "--passed", passed)
    done = project.run("generate", project.model, *arguments)
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(out).to_pylist()
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [
        (f"letters/q{n}", k) for n in range(5) for k in range(6)
    ]
    assert len({row["response"] for row in rows}) > 5
    by_prompt = defaultdict(list)
    for row in rows:
        prompt = [{"role": "system", "content": "say letters"}, {"role": "user", "content": f"{row['prompt_id'][-1]}="}]
        assert row["prompt"] == prompt
        assert row["messages"] == [*prompt, {"role": "assistant", "content": row["response"]}]
        assert row["score"] == score(row) and row["success"] == ((score(row) or 0) >= 0.9)
        assert row["status"] == ("ungraded" if score(row) is None else "scored")
        assert row["completion_tokens"] <= 6
        by_prompt[row["prompt_id"]].append(row)
    chosen = [json.loads(line) for line in best.read_text().splitlines()]
    assert [each["score"] for each in chosen] == [max(row["score"] or 0 for row in own) for own in by_prompt.values()]
    good = [json.loads(line) for line in passed.read_text().splitlines()]
    expected = {(row["prompt_id"], row["response"]) for row in rows if row["success"]}
    assert good and len(good) == len(expected) and {(each["id"], each["response"]) for each in good} == expected
    check_fine_tuning(project, passed)


def generated(project, config, data, *overrides):
    """The responses of `antiphon generate`, one for each prompt, and the tokens of the model's answers by transformers."""
    out = project.folder / "out.parquet"
    done = project.run("generate", project.model, "--config", config, "--data", data, "--out", out, *overrides)
    assert done.returncode == 0, done.stderr
    return [row["response"] for row in pq.read_table(out).to_pylist()]


def test_beams_and_penalties_are_those_of_transformers(project):
    """In a deterministic run too, whose engine has fewer slots than there are beams."""
    evaluation = {"sampling": {"max_tokens": 8, "num_beams": 3, "repetition_penalty": 1.2, "length_penalty": 0.7}}
    options = {**evaluation["sampling"], "do_sample": False, "max_new_tokens": evaluation["sampling"]["max_tokens"]}
    options.pop("max_tokens")
    (project.folder / "letters.py").write_text(textwrap.dedent(REWARD))
    config = project.config(tasks=[letters(evaluation=evaluation)], engine={"slots": 2})
    prompts = [f"{number}+{number * 3}=" for number in range(5)]
    data = write_rows(project, [{"prompt": prompt, "of": 4} for prompt in prompts])
    model = LlamaForCausalLM.from_pretrained(project.model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(project.model)
    expected = []
    for prompt in prompts:
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **options)
        expected.append(tokenizer.decode(found[0, tokens.shape[1] :], skip_special_tokens=True))
    assert generated(project, config, data) == expected
    assert generated(project, config, data, "rollout.deterministic=true") == expected
    assert generated(project, config, data, "tasks.0.evaluation.sampling={max_tokens: 8}") != expected


def check_fine_tuning(project, examples):
    """The examples are what `antiphon sft` reads."""
    prompts = {"source": "jsonl", "path": str(examples)}
    sft = {"steps": 1, "batch_size": 2, "prompts": prompts, "optimizer": {"learning_rate": 1e-3}}
    done = project.run(
        "sft", project.config(tasks=[letters(reward="mytask:digits")], sft=sft, name="tuned"), "record.live=off"
    )
    assert done.returncode == 0, done.stderr
    assert project.summary("tuned")["versions"] == 1


def test_the_configuration_is_that_of_the_checkpoints_run_and_rows_name_their_tasks(project):
    mixed = {"name": "mixed", "prompts": {"source": "mytask:problems"}, "test": None}
    config = configure(project, [letters(), letters("other", reward="mytask:digits")])
    (run := project.folder / "runs" / "run").mkdir(parents=True)
    (checkpoint := run / "checkpoints" / "step_000001").mkdir(parents=True)
    (other := run / "models" / "mine").mkdir(parents=True)  # two folders below a configuration, but no checkpoint
    for file in project.model.iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
        (other / file.name).write_bytes(file.read_bytes())
    given = yaml.safe_load(config.read_text())
    given["tasks"] = [mixed | {"route": "kind"}, *given["tasks"]]
    (run / "config.yaml").write_text(yaml.safe_dump(given))
    data = write_rows(project, [{"prompt": "1=", "of": 4, "kind": kind} for kind in ("letters", "other")])
    arguments = ("generate", checkpoint, "--data", data, "--out", project.folder / "out.parquet")
    nobodys = project.run("generate", other, *arguments[2:])
    assert nobodys.returncode == 2 and "the model belongs to no run" in nobodys.stderr
    refused = project.run(*arguments)
    assert refused.returncode == 2 and "--code DIR" in refused.stderr
    done = project.run(*arguments, "--code", project.folder, "--samples", "2")
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(project.folder / "out.parquet").to_pylist()
    assert [row["task"] for row in rows] == ["letters"] * 2 + ["other"] * 2
    assert all(row["score"] == sum(map(str.isdigit, row["response"])) / 8 for row in rows[2:])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "no_such_folder/out.parquet"), "the folder of no_such_folder/out.parquet does not exist"),
        (("--out", "out.parquet", "--best", "best.jsonl"), "needs tasks of one turn; world has an environment"),
    ],
)
def test_what_cannot_be_written_is_refused_before_sampling(project, monkeypatch, arguments, said):
    monkeypatch.chdir(project.folder)
    world = letters("world", environment="mytask:Lengths", reward="environment_return")
    config = project.config(tasks=[world], rollout={"max_turns": 2})
    data = write_rows(project, [{"prompt": "1="}])
    done = project.run("generate", project.model, "--config", config, "--data", data, *arguments)
    assert done.returncode == 2 and said in " ".join(done.stderr.split())
    assert not (project.folder / "out.parquet").exists()


@pytest.mark.parametrize(
    ("name", "task", "said"),
    [
        ("data.csv", "", r"--data: '.*data\.csv' must be a file that ends in \.jsonl or \.parquet"),
        ("data.jsonl", "", "--task: the data may belong to several tasks: name one; tasks are one, two"),
        ("data.jsonl", "tow", "--task: there is no task 'tow'; tasks are one, two"),
    ],
)
def test_data_that_belong_to_no_task_are_refused(project, name, task, said):
    write_rows(project, [{"prompt": "1="}])
    config = RunConfig.model_validate(
        yaml.safe_load(project.config(tasks=[letters("one"), letters("two")]).read_text())
    )
    with pytest.raises(ConfigError, match=said):
        load_data(config, project.folder / name, task)

"""Tasks that are only evaluated, beside one that is trained on: each with its own environment, sampling and success."""

import json
import sqlite3
import textwrap
from contextlib import closing

import pytest

from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import ConfigError
from antiphon.core.rng import derive
from antiphon.run import commands
from antiphon.run.config import RunConfig
from antiphon.tasks.prompts import load_prompts

WORLD = """
    import json
    from pathlib import Path

    class Coin:
        # Pays little; the seed says whether it was a success.
        inline = True

        def __init__(self, sides):
            self.sides = sides

        def reset(self, seed):
            self.success = seed % self.sides == 0
            return "toss", {}

        def step(self, action):
            return "", 0.25, True, False, {"success": self.success}

        def close(self):
            pass

    def noted(prompt, transcript, path):
        score = 0.5 if 0 < len(transcript.response) <= 2 else 0.0
        with Path(path).open("a") as file:
            file.write(json.dumps([len(transcript.response), score]) + "\\n")
        return score
"""
TEST = {"source": "mytask:problems", "split": "test", "limit": 6}


def watched(project):
    """Two tasks of weight 0: coins of three sides, and texts that are a success at half a point."""
    coin = {"environment": "coins:Coin", "environment_options": {"sides": 3}, "reward": "environment_return"}
    coin |= {"evaluation": {"samples": 2, "success_part": "success"}}
    noted = {"reward": "coins:noted", "reward_options": {"path": str(project.folder / "noted.jsonl")}}
    noted |= {"evaluation": {"samples": 3, "success_at": 0.5, "sampling": {"max_tokens": 2, "temperature": 0.5}}}
    return [{"name": name, "weight": 0, "test": TEST} | each for name, each in (("coin", coin), ("noted", noted))]


def configure(project, *others, overrides=(), **evaluation):
    (project.folder / "coins.py").write_text(textwrap.dedent(WORLD))
    trained = {"name": "digits", "prompts": {"source": "mytask:problems"}, "test": TEST, "reward": "mytask:digits"}
    rollout = {"groups_per_step": 2, "group_size": 4, "timeout": 180, "max_turns": 2, "sampling": {"max_tokens": 8}}
    path = project.config(tasks=[trained, *others], rollout=rollout, evaluation={"every": 1, **evaluation}, steps=2)
    add_import_folder(path)
    return load(path, ("cluster.debug=true", "record.live=off", *overrides), model=RunConfig)


def test_watched_tasks_are_measured_as_they_say_and_never_trained_on(project):
    config = configure(project, *watched(project), blocking=True)
    assert commands.train(config) == 0
    prompts = load_prompts(config.tasks[1], config.tasks[1].test, config.seed)
    luck = sum(derive(prompt.seed, "environment") % 3 == 0 for prompt in prompts) / 6
    summary, first = project.summary(), project.metrics()[0]
    tasks = summary["tasks"]
    assert (
        tasks["coin"]["accuracy_before"] == tasks["coin"]["accuracy_after"] == first["evaluation/accuracy/coin"] == luck
    )
    assert first["evaluation/accuracy/coin/low"] <= luck <= first["evaluation/accuracy/coin/high"]
    noted = [json.loads(line) for line in (project.folder / "noted.jsonl").read_text().splitlines()]
    assert all(
        length <= 2 for length, _ in noted[-3 * 18 :]
    )  # three evaluations; those before are checks of the reward
    assert tasks["noted"]["accuracy_after"] == sum(score == 0.5 for _, score in noted[-18:]) / 18 > 0
    low, high = tasks["noted"]["interval_after"]
    assert low <= tasks["noted"]["accuracy_after"] <= high
    assert summary["accuracy_after"] == tasks["digits"]["accuracy_after"] and summary["test_prompts"] == 6
    assert first["evaluation/accuracy"] == first["evaluation/accuracy/digits"]
    assert "evaluation/difficulty/hard" in first and 0 < luck < 1  # coins fall as they fell before
    with closing(sqlite3.connect(project.folder / "runs" / "run" / "ledger.db")) as ledger:
        assert ledger.execute("SELECT DISTINCT task FROM prompts").fetchall() == [("digits",)]


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_beside_training_measures_what_one_alone_does(project, workers):
    """With weights that do not change, greedy samples are those of the evaluations before and after."""
    overrides = ("learner.optimizer.learning_rate=1e-30", f"rollout.workers={workers}", "engine.replicas=2", "steps=3")
    config = configure(project, *watched(project)[:1], overrides=overrides, concurrency=1)
    assert commands.train(config) == 0
    summary, lines = project.summary(), [line for line in project.metrics() if "evaluation/accuracy" in line]
    assert lines and lines[0]["evaluation/first_version"] == 1 and lines[-1]["step"] == 3
    for line in lines:
        assert line["evaluation/first_version"] <= line["evaluation/last_version"] <= 3
        for task, own in summary["tasks"].items():
            assert line[f"evaluation/accuracy/{task}"] == own["accuracy_before"] == own["accuracy_after"]
            low, high = own["interval_after"]
            assert (line[f"evaluation/accuracy/{task}/low"], line[f"evaluation/accuracy/{task}/high"]) == (low, high)
        measures = summary["measures_after"]
        assert {name: line[f"evaluation/{name}"] for name in measures} == pytest.approx(measures)


def test_eval_measures_each_task_by_itself(project):
    config = configure(project, *watched(project))
    found = commands.evaluate_model(str(project.model), config, limit=0)
    assert {task: own["samples"] for task, own in found["tasks"].items()} == {"digits": 1, "coin": 2, "noted": 3}
    assert {task: own["temperature"] for task, own in found["tasks"].items()} == {
        "digits": 0.0,
        "coin": 1.0,
        "noted": 0.5,
    }
    assert 0 < found["tasks"]["noted"]["accuracy"] <= found["tasks"]["noted"]["pass@3"]
    assert "samples" not in found and "temperature" not in found  # they differ
    forced = commands.evaluate_model(str(project.model), config, samples=2, temperature=0.1, limit=0)
    assert {own["samples"] for own in forced["tasks"].values()} == {2} and forced["temperature"] == 0.1


def test_a_part_that_scores_lack_ends_the_run_before_training(project):
    wrong = watched(project)[0] | {"evaluation": {"success_part": "succes"}}
    with pytest.raises(ConfigError, match=r"task 'coin': no score has a part 'succes'; parts are .*success"):
        commands.train(configure(project, wrong))
    assert not project.metrics()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"test": None}, r"tasks\.1\.test: is missing: a task of weight 0 is only evaluated"),
        ({"weight": 1}, r"tasks\.1\.prompts: is missing, .*weight: 0 only evaluates a task"),
        ({"evaluation": {"success": 1}}, r"tasks\.1\.evaluation\.success.*success_at"),
    ],
)
def test_mistakes_are_named(project, change, said):
    with pytest.raises(ConfigError, match=said):
        configure(project, watched(project)[1] | change)

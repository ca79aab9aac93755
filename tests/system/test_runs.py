"""Whole runs in every scheduling mode. Workers are threads here, so that a dozen runs take seconds; one uses processes."""

import math
import re
import sqlite3
import textwrap
from contextlib import closing
from importlib.util import find_spec

import psutil
import pytest
import yaml
from transformers import AutoModelForCausalLM

from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import UserCodeError
from antiphon.inspect.audit import audit
from antiphon.inspect.replay import replay
from antiphon.run import commands
from antiphon.run.config import RunConfig
from antiphon.simulate.planner import predict
from antiphon.simulate.probe import measure
from antiphon.simulate.speeds import Speeds
from tests.span_collector import attributes


def train(project, *overrides, **sections) -> int:
    path = project.config(**sections)
    add_import_folder(path)
    return commands.train(
        load(path, ("cluster.debug=true", "record.live=off", *overrides), model=RunConfig), overwrite=True
    )


def resume(project, *overrides, **sections) -> int:
    overrides = ("cluster.debug=true", "record.live=off", *overrides)
    return commands.train(load(project.config(**sections), overrides, model=RunConfig), resume=True)


def rollout(**changes):
    return {"groups_per_step": 2, "group_size": 4, "timeout": 180, "sampling": {"max_tokens": 8}, **changes}


@pytest.mark.parametrize("ratio", [0, 0.5, 1, 2])
@pytest.mark.parametrize("order", ["fifo", "ready"])
def test_ages_keep_to_the_ratio(project, ratio, order):
    assert train(project, "steps=6", rollout=rollout(async_ratio=ratio, order=order)) == 0
    steps = project.metrics()
    assert len(steps) == 6
    assert all(step["age/max"] <= math.ceil(ratio) for step in steps)
    assert steps[0]["age/max"] == 0
    if order == "fifo":
        assert steps[-1]["age/mean"] == ratio
    assert all(step["groups/live"] <= math.ceil((1 + ratio) * 2) for step in steps)
    assert project.summary()["versions"] == 6


@pytest.mark.parametrize("mode", ["keep", "recompute", "restart", "drain"])
def test_every_way_to_update_weights_in_flight(project, mode):
    assert train(project, "steps=4", rollout=rollout(async_ratio=2, on_update=mode)) == 0
    assert project.summary()["steps"] == 4


def test_a_filter_that_raises_leaves_no_attempt_open(project):
    with pytest.raises(UserCodeError, match=r"KeyError: 'no such column.*mytask\.py:\d+"):
        train(project, rollout=rollout(async_ratio=1, filter="mytask:raises_on"))
    found = audit(project.folder / "runs" / "run")
    assert found.violations == [] and found.open == 0
    assert found.balance[0]["lost"] and "KeyError" in found.ends[0]


def test_run_ends_with_what_was_dropped(project, capsys):
    assert train(project, "steps=4", rollout=rollout(async_ratio=0)) == 0
    assert "attempts in" not in capsys.readouterr().out
    assert train(project, "steps=4", rollout=rollout(async_ratio=1, filter="spread")) == 0
    (balance,) = audit(project.folder / "runs" / "run").balance.values()
    assert (
        f"attempts in this execution: {balance['trained']} trained, {balance['filtered']} filtered; "
        in capsys.readouterr().out
    )


def test_engine_and_learner_differ_by_rounding_only(project):
    """Synchronous and one update a step: the learner's log-probs are the engine's."""
    assert train(project, "steps=3", rollout=rollout(async_ratio=0)) == 0
    assert all(abs(step["learner/mismatch_kl"]) < 1e-6 for step in project.metrics())


def test_a_collector_gets_spans_of_a_run_and_of_its_resume(project, collector):
    sections = {"rollout": rollout(), "record": {"directory": str(project.folder / "runs"), "spans": collector.url}}
    assert train(project, "steps=2", **sections) == 0
    assert resume(project, "steps=3", **sections) == 0
    spans = collector.spans
    assert [span.name for span in spans if span.name.startswith("step ")] == ["step 1", "step 2", "step 3"]
    attempts = {span.span_id: span for span in spans if attributes(span)["antiphon.track"] == "attempts"}
    requests = [span for span in spans if attributes(span)["antiphon.track"].startswith("engine ")]
    of_attempts = [request for request in requests if request.parent_span_id]  # the others are of evaluations
    assert len(requests) > len(of_attempts) >= 24 and len(attempts) >= 24
    for request in of_attempts:
        attempt = attempts[request.parent_span_id]
        assert request.name == f"{attempt.name}/0" and request.trace_id == attempt.trace_id
        assert attempt.start_time_unix_nano <= request.start_time_unix_nano < request.end_time_unix_nano
        assert request.end_time_unix_nano <= attempt.end_time_unix_nano
    assert {attributes(resource)["antiphon.lineage"] for resource in collector.resources} == {0, 1}


def test_a_run_records_the_dtypes_that_it_took(project, capsys):
    auto = {"learner": {"dtype": "auto"}, "engine": {"dtype": "auto"}}
    assert train(project, "steps=1", **auto) == 0
    said = re.findall(
        r"(learner|engine)\.dtype: auto is (\w+): bfloat16 is .* as fast as float32", capsys.readouterr().out
    )
    assert [key for key, _ in said] == ["learner", "engine"]
    recorded = project.folder / "runs" / "run" / "config.yaml"

    def dtypes():
        run = yaml.safe_load(recorded.read_text())
        return [(key, run[key]["dtype"]) for key in ("learner", "engine")]

    assert dtypes() == said
    other = {"float32": "bfloat16", "bfloat16": "float32"}
    recorded.write_text(
        re.sub(r"dtype: (float32|bfloat16)", lambda found: f"dtype: {other[found[1]]}", recorded.read_text())
    )
    again = dtypes()
    assert resume(project, "steps=2", **auto) == 0
    assert dtypes() == again and len(project.metrics()) == 2


def test_a_deterministic_run_repeats_bit_for_bit(project):
    """Two engines in processes of their own, filtered groups, updates in flight, an evaluation on the way; whichever way
    weights come, and in bfloat16 whichever end rounds them. Where nothing is in flight, tests/chaos/test_resume.py sees the
    same."""

    def run(dtype, weights) -> tuple[bytes, list[float], float]:
        schedule = rollout(async_ratio=1.5, deterministic=True, filter="spread", extra_groups=1, groups_per_step=3)
        engine = {"replicas": 2, "slots": 5, "dtype": dtype}
        learner = {"optimizer": {"learning_rate": 1e-5}}  # so small that few weights change in half precision
        sections = {"rollout": schedule, "engine": engine, "learner": learner, "weights": weights}
        path = project.config(**sections, evaluation={"every": 2}, seed=7)
        done = project.run("train", path, "steps=5", "--overwrite")
        assert done.returncode == 0, done.stderr
        checkpoint = max((project.folder / "runs" / "run" / "checkpoints").iterdir())
        steps = project.metrics()
        sent = steps[-1]["weights/megabytes"]  # the first version is sent whole
        return (checkpoint / "model.safetensors").read_bytes(), [step["learner/loss"] for step in steps], sent

    for dtype, first, *others in (
        ("float32", {}, {"channel": "distributed"}, {"channel": "device_memory"}),
        ("bfloat16", {"dtype": "float32"}, {"channel": "distributed", "encoding": "delta"}),
    ):
        trained, losses, whole = run(dtype, first)
        for other in others:
            again, losses_again, sent = run(dtype, other)
            assert sent < 0.4 * whole if "encoding" in other else sent == whole
            assert losses_again == losses
            assert again == trained


def test_siblings_are_judged_together(project):
    """With redundancy, groups that the judge leaves ungraded, a resume and a replay."""
    (task,) = yaml.safe_load(project.config().read_text())["tasks"]
    schedule = rollout(async_ratio=1.5, redundancy=1, order="ready", max_attempts=10)
    path = project.config(tasks=[task | {"group_reward": "mytask:places"}], rollout=schedule, checkpoint={"every": 2})
    add_import_folder(path)
    for steps, how in ((4, {"overwrite": True}), (8, {"resume": True})):
        config = load(path, ("cluster.debug=true", "record.live=off", f"steps={steps}"), model=RunConfig)
        assert commands.train(config, **how) == 0
    run = project.folder / "runs" / "run"
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        trained = db.execute(
            "SELECT lineage, grp, score FROM attempts WHERE status = 'trained' ORDER BY score"
        ).fetchall()
        (ungraded,) = db.execute("SELECT count(*) FROM attempts WHERE failure LIKE '%cannot be judged%'").fetchone()
    groups = {}
    for lineage, group, score in trained:
        groups.setdefault((lineage, group), []).append(score)
    assert len(groups) == 16 and all(scores == [0.0, 0.25, 0.5, 0.75] for scores in groups.values())
    assert ungraded
    assert audit(run).violations == []
    assert replay(run, config) == 8


def test_it_learns(project):
    assert train(project, "steps=25", rollout=rollout(groups_per_step=4, group_size=8)) == 0
    rewards = [step["reward/mean"] for step in project.metrics()]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5


def test_redundancy_filters_and_reference(project):
    assert (
        train(
            project,
            rollout=rollout(redundancy=2, extra_groups=1, order="ready", filter="spread"),
            algorithm={
                "kl": {"coefficient": 0.01},
                "entropy_coefficient": 0.01,
                "advantage": "dr_grpo",
                "rhythm": {"kind": "coupled"},
            },
            learner={"minibatches": 2, "epochs": 2, "tokens_per_pack": 32},
        )
        == 0
    )
    assert all("learner/reference_kl" in step for step in project.metrics())


GUESS = {
    "name": "guess",
    "prompts": {"source": "mytask:problems"},
    "environment": "guess_number",
    "reward": "environment_return",
}


def test_two_turns_in_an_environment(project):
    assert train(project, rollout=rollout(max_turns=2), tasks=[GUESS]) == 0
    assert project.summary()["accuracy_after"] is None


def test_evaluations_tell_of_turns(project):
    tasks = [GUESS | {"test": {"source": "mytask:problems", "limit": 3}}]
    assert train(project, rollout=rollout(max_turns=2), tasks=tasks, evaluation={"every": 1, "blocking": True}) == 0
    summary = project.summary()
    for measures in (summary["measures_before"], summary["measures_after"]):
        assert 1 <= measures["guess/turns"] <= 2 and 0 <= measures["guess/score"] <= 1
    assert all(1 <= step["evaluation/guess/turns"] <= 2 for step in project.metrics()[:-1])


def test_processes_and_a_warm_start(project):
    sft = {"steps": 4, "batch_size": 8, "optimizer": {"learning_rate": 1e-2}}
    model = {"path": "mytask:build"}
    path = project.config(
        model=model, sft=sft, checkpoint={"every": 1, "keep_last": 2}, record={"trackers": ["tensorboard"]}
    )
    done = project.run("train", path, f"record.directory={project.folder}/runs")
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout and "held-out accuracy" in done.stdout
    run = project.folder / "runs" / "run"
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_000002", "step_000003"]
    AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step_000003")
    assert {"accuracy_before", "accuracy_after", "train_seconds", "versions"} <= set(project.summary())
    assert list((run / "tensorboard").glob("events*"))
    scored = project.run("eval", run / "checkpoints" / "step_000003", path, "--samples", "2", "--temperature", "1")
    assert scored.returncode == 0, scored.stderr
    assert "pass@2" in scored.stdout
    tuned = project.run("sft", path, "name=tuned")
    assert tuned.returncode == 0, tuned.stderr
    assert project.summary("tuned")["versions"] == 1


EVEN = """
    def even(prompt, transcript):
        return float(bool(transcript.response) and ord(transcript.response[0]) % 2 == 0)
"""


def evaluated(project, *arguments, **evaluation):
    """The measures that `antiphon eval` prints of the model, which has learned nothing."""
    (project.folder / "parity.py").write_text(textwrap.dedent(EVEN))
    test = {"source": "mytask:problems", "split": "test", "limit": 16}
    tasks = [{"name": "t", "prompts": {"source": "mytask:problems"}, "test": test, "reward": "parity:even"}]
    path = project.config(tasks=tasks, evaluation=evaluation)
    done = project.run("eval", project.model, path, *arguments)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("│┃ ").split("│") for line in done.stdout.splitlines()]
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


@pytest.mark.parametrize(
    ("arguments", "evaluation", "temperature"),
    [
        (("--samples", "8"), {}, 1.0),
        ((), {"samples": 8}, 1.0),
        (("--samples", "8"), {"temperature": 0.0}, 0.0),
        (("--samples", "8", "--temperature", "0"), {}, 0.0),
    ],
    ids=["samples on the command line", "samples in the file", "greedy by the file", "greedy by the command line"],
)
def test_several_samples_are_drawn_unless_greedy_is_asked(project, arguments, evaluation, temperature):
    found = evaluated(project, *arguments, **evaluation)
    first, best = float(found["pass@1"]), float(found["pass@8"])
    assert (best > first + 0.1) if temperature else (best == first)
    assert float(found["temperature"]) == temperature and int(found["samples"]) == 8


def test_one_sample_is_greedy(project):
    found, again = evaluated(project), evaluated(project, "--temperature", "0")
    assert float(found["temperature"]) == 0.0 and found == again


def test_a_run_says_at_which_temperature_it_was_evaluated(project):
    path = project.config(steps=1, evaluation={"samples": 4})
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    assert project.summary()["evaluation"] == {"samples": 4, "temperature": 1.0}
    assert "temperature 1" in done.stdout


def test_a_probe_measures_the_run_and_a_plan_is_made_of_it(project):
    path = project.config(steps=3, rollout=rollout(groups_per_step=4))
    add_import_folder(path)
    config = load(path, ("cluster.debug=true", "record.live=off"), model=RunConfig)
    speeds = measure(config, 3.0)
    assert load(project.folder / "runs" / "run-probe" / "speeds.yaml", model=Speeds) == speeds
    assert speeds.learner.step + speeds.learner.per_token > 0
    assert speeds.engine.iteration + speeds.engine.per_sequence > 0
    assert 1 <= speeds.response_tokens.quantile(0.5) <= 8
    plan = predict(config, speeds)
    assert plan.step_seconds > 0
    assert sum(plan.ages.values()) == pytest.approx(1.0)


def test_a_plan_from_sizes_alone_makes_no_run(project):
    done = project.run("plan", project.config(model={"path": "mytask:build"}), "--devices", "3")
    assert done.returncode == 0, done.stderr
    assert "seconds a step" in done.stdout and "KV caches, at most" in done.stdout
    assert "2 generate, 1 train" in done.stdout and "best: " in done.stdout
    assert not (project.folder / "runs").exists()


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is optional: pip install -e '.[ray]'")
def test_on_ray(project):
    """The same run, by configuration only; what was started for it is gone with it."""
    process = project.start("train", project.config(model={"path": "mytask:build"}), "cluster.kind=ray")
    for line in process.stdout:
        if line.startswith("step 1/3"):
            started = psutil.Process(process.pid).children(recursive=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert started and not psutil.wait_procs(started, timeout=30)[1]
    run = project.folder / "runs" / "run"
    assert {log.name for log in (run / "logs").iterdir()} == {"model.log", "learner.log", "engine-0.log"}
    assert project.summary()["versions"] == 3


def test_fine_tuning_alone_is_not_judged_as_a_run(project):
    """The accuracy that is demanded is that after reinforcement learning, of which there is none."""
    path = project.config(sft={"steps": 1, "batch_size": 2}, evaluation={"minimum_accuracy": 1.0})
    done = project.run("sft", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.summary()["accuracy_after"] < 1.0
    assert project.run("train", path, "steps=1", "--overwrite").returncode == 1

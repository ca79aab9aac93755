"""Whole runs whose engines are vLLM's, in an environment of their own. What one engine must do is in the engine contract."""

import json

import pytest


def train(project, python, rollout, **sections):
    path = project.config(
        model={"path": "mytask:build_wide"},
        engine={"kind": "vllm", "python": python, "max_length": 256, "slots": 4},  # it always has something to do
        rollout={"groups_per_step": 2, "group_size": 4, "timeout": 200, "sampling": {"max_tokens": 8}, **rollout},
        **sections,
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    return project.metrics()


def test_in_step_with_the_learner_log_probs_are_the_learner_s(project, vllm_python):
    """At a learning rate at which one missed update would show."""
    steps = train(project, vllm_python, {"async_ratio": 0})
    assert [step["age/max"] for step in steps] == [0, 0, 0]
    assert all(abs(step["learner/mismatch_kl"]) < 1e-6 for step in steps)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_weights_arrive_in_mid_flight(project, vllm_python, mode):
    rollout = {"async_ratio": 2, "on_update": mode, "sampling": {"max_tokens": 100}}
    learner = {
        "optimizer": {"learning_rate": 1e-3}
    }  # what the policy learns between two versions counts as mismatch too
    steps = train(project, vllm_python, rollout, learner=learner, record={"events": True})
    assert all(abs(step["learner/mismatch_kl"]) < 2e-3 for step in steps)
    events = (project.folder / "runs" / "run" / "events.jsonl").read_text().splitlines()
    spans = [event["versions"] for event in map(json.loads, events) if event.get("versions")]
    assert any(first < last for first, last in spans), "some completion was sampled from several versions"

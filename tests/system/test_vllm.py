"""Whole runs whose engines are vLLM's, in an environment of their own. What one engine must do is in the engine contract."""

import asyncio
import json

import httpx
import pytest

from antiphon.core.errors import UnsupportedError, WorkerDiedError
from antiphon.engines.config import EngineConfig
from antiphon.engines.server import ServerEngine
from tests.servers import vllm
from tests.system.test_bad_input import wait_for_line
from tests.system.test_profile import read_operations


@pytest.fixture(scope="module")
def server(vllm_python, wide_model, tmp_path_factory):
    server = vllm(vllm_python, wide_model, tmp_path_factory.mktemp("server") / "log")
    yield server
    server.kill()


def opened(server, model, **options) -> ServerEngine:
    config = EngineConfig(kind="server", options={"urls": [server.url], **options})
    return ServerEngine(config.server_options, 0, model, config, "shared_memory")


def train(project, python, rollout, **sections):
    usual = {
        "model": {"path": "mytask:build_wide"},
        "engine": {"kind": "vllm", "python": python, "max_length": 256, "slots": 4},  # it always has something to do
    }
    path = project.config(
        rollout={"groups_per_step": 2, "group_size": 4, "timeout": 200, "sampling": {"max_tokens": 8}, **rollout},
        **{**usual, **sections},
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    return project.metrics()


def test_in_step_with_the_learner_log_probs_are_the_learner_s(project, vllm_python):
    """At a learning rate at which one missed update would show, and in a step that is profiled."""
    steps = train(project, vllm_python, {"async_ratio": 0}, profile={"steps": [2]})
    assert read_operations(project.folder / "runs" / "run" / "profile" / "step_000002" / "engine-0.json.gz")
    assert [step["age/max"] for step in steps] == [0, 0, 0]
    assert all(abs(step["learner/mismatch_kl"]) < 1e-6 for step in steps)


def test_an_engine_on_two_devices(project, vllm_python):
    """Here each is a process on cores; both are given the weights, and profiled."""
    options = {"tensor_parallel_size": 2}
    engine = {"kind": "vllm", "python": vllm_python, "max_length": 256, "slots": 4, "options": options}
    steps = train(project, vllm_python, {"async_ratio": 0}, engine=engine, profile={"steps": [2]})
    assert all(abs(step["learner/mismatch_kl"]) < 1e-6 for step in steps)
    folder = project.folder / "runs" / "run" / "profile" / "step_000002"
    assert all(read_operations(folder / f"engine-0-rank-{rank}.json.gz") for rank in (0, 1))


def test_a_pool_of_vllm_s_and_our_own_engine(project, vllm_python):
    theirs = {"kind": "vllm", "python": vllm_python, "max_length": 256, "slots": 4}
    engine = {"slots": 4, "max_length": 256, "also": [theirs]}
    steps = train(project, vllm_python, {"async_ratio": 0}, engine=engine, record={"events": True})
    assert all(abs(step["learner/mismatch_kl"]) < 1e-6 for step in steps)
    events = (project.folder / "runs" / "run" / "events.jsonl").read_text().splitlines()
    assert {event["engine"] for event in map(json.loads, events) if event["event"] == "served"} == {0, 1}


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


@pytest.mark.parametrize(("mode", "ratio"), [("drain", 0), ("recompute", 2)])
def test_vllm_server_trains_and_each_run_reloads_its_model(project, wide_model, server, mode, ratio):
    """Also the second, on what the first has made of the server."""
    engine = {"kind": "server", "options": {"urls": [server.url]}, "slots": 4, "max_length": 256}
    rollout = {"async_ratio": ratio, "on_update": mode, "sampling": {"max_tokens": 200 if ratio else 8}}
    learner = {"optimizer": {"learning_rate": 1e-3 if ratio else 1e-2}}
    sections = {"model": {"path": str(wide_model)}, "engine": engine, "learner": learner, "record": {"events": True}}
    steps = train(project, "", rollout, steps=6, **sections)
    assert all(abs(step["learner/mismatch_kl"]) < (2e-3 if ratio else 1e-6) for step in steps)
    assert max(step["age/max"] for step in steps) == ratio
    events = [*map(json.loads, (project.folder / "runs" / "run" / "events.jsonl").read_text().splitlines())]
    assert {event["version"] for event in events if event["event"] == "load"} >= {1, 2}
    spans = [event["versions"] for event in events if event.get("versions")]
    assert any(first < last for first, last in spans) == (mode == "recompute")


def test_a_server_that_comes_back_is_given_the_weights_of_now(project, wide_model, server):
    engine = {"kind": "server", "options": {"urls": [server.url]}, "slots": 4, "max_length": 256}
    patience = {"on_update": "recompute", "engine_restarts": 100, "timeout": 200}
    rollout = {"groups_per_step": 2, "group_size": 4, "sampling": {"max_tokens": 100}, **patience}
    sections = {"model": {"path": str(wide_model)}, "engine": engine, "rollout": rollout}
    learner = {"optimizer": {"learning_rate": 1e-3}}
    process = project.start("train", project.config(steps=6, learner=learner, **sections))
    wait_for_line(process, "step ")
    server.kill()
    server.start()
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert server.url in out
    assert all(abs(step["learner/mismatch_kl"]) < 2e-3 for step in project.metrics())


def test_a_server_of_any_flavour_is_evaluated(project, wide_model, server):
    engine = {"kind": "server", "options": {"urls": [server.url + "/v1"], "flavour": "openai"}}
    path = project.config(model={"path": str(wide_model)}, engine=engine)
    done = project.run("eval", wide_model, path)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    done = project.run("train", path)
    assert done.returncode == 2 and "engine.options.flavour" in done.stderr


def test_a_server_with_weights_that_are_not_ours_is_given_up(wide_model, server):
    async def main():
        engine = opened(server, wide_model)
        await engine.ready()
        await engine.health()
        httpx.post(f"{server.url}/update_weight_version", json={"new_version": "of another run"})
        with pytest.raises(WorkerDiedError, match="someone else"):
            await engine.health()
        again = opened(server, wide_model)
        await again.ready()
        await again.health()

    asyncio.run(main())


def test_server_with_untempered_logprobs_is_refused(vllm_python, wide_model, tmp_path):
    server = vllm(vllm_python, wide_model, tmp_path / "log", "--logprobs-mode", "raw_logprobs")
    try:
        with pytest.raises(UnsupportedError, match="processed_logprobs"):
            asyncio.run(opened(server, wide_model).ready())
    finally:
        server.kill()

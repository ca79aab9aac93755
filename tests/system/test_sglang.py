"""Whole runs on what stands in for SGLang's servers. What one engine must do is in the engine contract."""

import json
import signal

import pytest

from antiphon.inspect.audit import audit
from tests.servers import sglang
from tests.system.test_bad_input import wait_for_line


@pytest.fixture
def servers(wide_model, tmp_path):
    made = [sglang(wide_model, tmp_path / f"log-{flags}", *flags) for flags in ([], ["--incremental"])]
    yield made
    for server in made:
        server.kill()


def written(events):
    """What there is of a file that is still written to."""
    return [json.loads(line) for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_run_begins_with_one_server_and_the_other_joins(project, wide_model, servers):
    """One tells what is new, the other all there is; what they sampled is what the learner would have."""
    late = servers[1]
    late.kill()
    options = {"urls": [server.url for server in servers], "flavour": "sglang"}
    engine = {"kind": "server", "options": options, "replicas": 2, "minimum": 1, "slots": 4, "max_length": 256}
    rollout = {"groups_per_step": 2, "group_size": 4, "sampling": {"max_tokens": 30}, "on_update": "recompute"}
    learner = {"optimizer": {"learning_rate": 1e-3}}
    path = project.config(
        steps=100_000,
        model={"path": str(wide_model)},
        engine=engine,
        rollout={"async_ratio": 1, "timeout": 200, **rollout},
        learner=learner,
        record={"events": True},
    )
    process = project.start("train", path)
    wait_for_line(process, f"the run begins with 1 of 2 engines: the server at {late.url} is lost")
    wait_for_line(process, "step ")
    late.start()
    events = project.folder / "runs" / "run" / "events.jsonl"
    while not any(event["event"] == "served" and event["engine"] == 1 for event in written(events)):
        wait_for_line(process, "step ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, out + err
    assert all(abs(step["learner/mismatch_kl"]) < 2e-3 for step in project.metrics())
    assert not audit(project.folder / "runs" / "run").violations


@pytest.mark.long
def test_a_pool_of_two_kinds(project, wide_model, servers):
    """A native engine and a server, each with settings of its own: both are given weights, both sample for the learner. The
    protocol of the server is a class of the user's."""
    (project.folder / "own_protocol.py").write_text(
        "from antiphon.engines.server_protocols import SGLangProtocol\n\n\nclass Own(SGLangProtocol):\n    pass\n"
    )
    server = {
        "kind": "server",
        "options": {"urls": [servers[0].url], "flavour": "own_protocol:Own"},
        "slots": 4,
        "max_length": 256,
    }
    rollout = {"groups_per_step": 2, "group_size": 4, "sampling": {"max_tokens": 30}, "on_update": "recompute"}
    path = project.config(
        steps=4,
        model={"path": str(wide_model)},
        engine={"slots": 4, "max_length": 256, "also": [server]},
        rollout={"async_ratio": 1, "timeout": 200, **rollout},
        learner={"optimizer": {"learning_rate": 1e-3}},
        record={"events": True},
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stdout + done.stderr
    events = written(project.folder / "runs" / "run" / "events.jsonl")
    for engine in (0, 1):
        assert any(event["event"] == "served" and event["engine"] == engine for event in events)
        assert [event["version"] for event in events if event["event"] == "load" and event["engine"] == engine][-1] == 4
    assert all(abs(step["learner/mismatch_kl"]) < 2e-3 for step in project.metrics())
    assert not audit(project.folder / "runs" / "run").violations

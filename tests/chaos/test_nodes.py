"""Engines on several nodes of a Ray, which are killed: raylets of their own on this machine, as a cluster's are on many."""

import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from antiphon.inspect.audit import audit
from antiphon.inspect.why import why
from antiphon.record.reader import RunReader
from tests.system.test_bad_input import is_worker, wait_for_line

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is optional: pip install -e '.[ray]'"),
]

# On Linux all of 127/8 is this machine: each node has an address of its own, which no other machine reaches.
HOST = "127.0.0.2"
LOCAL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}


class Nodes:
    """A Ray, node by node: node0 is its head, where the controller is."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []
        self.runs = []
        self.alive = {}  # number -> process
        with socket.create_server(("", 0)) as free:  # on any address: Ray takes it on all
            port = free.getsockname()[1]
        self.address = f"{HOST}:{port}"
        self.start(0, "--head", f"--port={port}", "--include-dashboard=false")

    def start(self, number, *arguments):
        """A node more, up and running. One at a time: Ray loses those that register at once.

        Ray gives up on a node that its head does not answer for half a minute, as on a busy machine: then another is started.
        """
        command = [Path(sys.executable).with_name("ray"), "start", "--block", "--num-cpus=1", "--num-gpus=1"]
        command += [f"--node-ip-address=127.0.0.{2 + number}", *(arguments or [f"--address={self.address}"])]
        for _ in range(3):
            log = self.folder / f"ray-{len(self.started)}.log"
            with log.open("w") as output:
                node = subprocess.Popen(
                    command, stdout=output, stderr=output, start_new_session=True, env={**os.environ, **LOCAL}
                )
            self.started.append(node)
            while "Ray runtime started" not in (said := log.read_text()) and node.poll() is None:
                time.sleep(0.1)
            if "timed out during startup" not in said:
                break
        assert node.poll() is None, said
        self.alive[number] = node

    def kill(self, number):
        """All of a node at once, as when its machine goes down."""
        node = self.alive.pop(number)
        for process in [*psutil.Process(node.pid).children(recursive=True), node]:
            with suppress(psutil.NoSuchProcess):  # workers of a run that was killed end by themselves, too
                process.kill()
        node.wait()

    def running(self, *names):
        """Numbers of the nodes, but the head, that workers of these names run on."""
        found = []
        for number, node in self.alive.items():
            workers = psutil.Process(node.pid).children(recursive=True)
            if number and any(is_worker(worker, name) for worker in workers for name in names):
                found.append(number)
        return found

    def with_engines(self):
        """Numbers of the nodes, but the head, that engines run on."""
        return self.running(*(f"engine-{engine}" for engine in range(20)))


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", uuid4().hex)
    nodes = Nodes(tmp_path)
    nodes.start(1)
    nodes.start(2)
    yield nodes
    for process in nodes.runs:
        process.kill()
        process.communicate()
    for number in sorted(nodes.alive, reverse=True):
        nodes.kill(number)


def start(project, nodes, placement, replicas, channel="object_store", workers=0, minimum=0, turns=1, **sections):
    process = project.start(
        "train",
        project.config(
            steps=100_000,
            cluster={"kind": "ray", "address": nodes.address},
            placement=placement,
            weights={"channel": channel, "host": HOST},
            engine={"replicas": replicas, "minimum": minimum},
            learner={"optimizer": {"learning_rate": 1e-5}},
            rollout={
                "async_ratio": 1,
                "redundancy": 1,
                "engine_restarts": 20,
                "order": "ready",
                "workers": workers,
                "max_turns": turns,
            },
            **sections,
        ),
    )
    nodes.runs.append(process)
    return process


def finish(project, process):
    """It goes on, is told to end, and has lost nothing."""
    wait_for_line(process, "step ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, out + err
    assert project.summary()["steps"] > 2
    assert not audit(project.folder / "runs" / "run").violations


def test_engines_move_when_nodes_are_killed(project, request):
    """Nodes drawn at random; `make chaos` asks for it."""
    kills = request.config.getoption("--kills")
    if not kills:
        pytest.skip("takes a while; --kills says how many kills of processes, a tenth of which are of nodes")
    draw, nodes = random.Random(request.config.getoption("--seed")), request.getfixturevalue("nodes")
    process = start(project, nodes, {"engine": "anywhere"}, replicas=3)
    for _ in range(kills // 10):
        wait_for_line(process, "step ")
        while not (there := nodes.with_engines()):
            wait_for_line(process, "step ")
        victim = draw.choice(there)
        nodes.kill(victim)
        wait_for_line(process, ("worker engine-", "no engine takes"))  # was lost, or did not come up
        nodes.start(victim)
    finish(project, process)


@pytest.mark.long
def test_an_engine_comes_back_with_its_node(project, nodes):
    process = start(project, nodes, {"engine": "node1.gpu:0, node2.gpu:0"}, replicas=2)
    wait_for_line(process, "step ")
    assert nodes.with_engines() == [1, 2]
    nodes.kill(2)
    wait_for_line(process, "no engine takes the place that is free yet: engine-1 has nowhere to run")
    wait_for_line(process, "step ")
    nodes.start(2)
    while nodes.with_engines() != [1, 2]:
        wait_for_line(process, "step ")
    finish(project, process)


@pytest.mark.long
def test_engines_join_with_nodes_and_leave_with_them(project, nodes):
    process = start(project, nodes, {"engine": "node3.gpu:0, node2.gpu:0, node1.gpu:0"}, replicas=3, minimum=1)
    wait_for_line(process, "the run begins with 2 of 3 engines: engine-0 has nowhere to run")
    nodes.start(3)
    while joined(project) < 3:
        wait_for_line(process, "step ")
    assert nodes.with_engines() == [1, 2, 3]
    nodes.kill(1)
    wait_for_line(process, "worker engine-")  # was lost
    finish(project, process)


ROLES = """
    import os

    from antiphon.core.types import Message, Score

    class Asker:
        # It asks the judge, whose answer says nothing.

        def __init__(self, generate):
            self.generate = generate

        async def __call__(self, prompt, transcript):
            await self.generate([Message("user", transcript.response)])
            return Score.of(sum(map(str.isdigit, transcript.response)) / 8)

    class Echo:
        # A world that blocks, and pays for digits.

        def __init__(self, prompt):
            pass

        def reset(self, seed):
            return "1+1=", {}

        def step(self, action):
            return "again", sum(map(str.isdigit, action)) / 8, True, False, {}

        def close(self):
            pass
"""


@pytest.mark.long
def test_other_nodes_run_every_role_and_one_is_lost(project, nodes, classifier, record_property):
    """Graders, judge, reward model, environments and engines are none of them on the controller's node.

    `benchmarks/roles.py` reads the properties.
    """
    nodes.start(3)
    (project.folder / "roles.py").write_text(textwrap.dedent(ROLES))
    source = {"source": "mytask:problems"}
    tasks = [
        {"name": "graded", "prompts": source, "reward": "mytask:digits"},
        {
            "name": "judged",
            "prompts": source,
            "reward": "roles:Asker",
            "judge": {"path": str(project.model), "max_tokens": 2},
        },
        {"name": "modelled", "prompts": source, "reward": "reward_model", "reward_options": {"path": classifier}},
        {
            "name": "played",
            "prompts": source,
            "environment": "roles:Echo",
            "reward": "environment_return",
            "environment_pool": {"workers": 2},
        },
    ]
    placement = {
        "engine": "node1.gpu:0, node3.gpu:0",
        "judge": "node2.gpu:0",
        "reward": "node1.cpu:0-0, node3.cpu:0-0",
        "reward_model": "node2.cpu:0-0",
        "environment": "node2.cpu:0-0, node3.cpu:0-0",
    }
    process = start(project, nodes, placement, replicas=2, turns=2, tasks=tasks, check={"prompts": 0})
    wait_for_line(process, "step ")
    while nodes.running(*WORKERS["environment"]) != [2, 3]:  # they start with the first attempts that play
        wait_for_line(process, "step ")
    there = {name: nodes.running(*names) for name, names in WORKERS.items()}
    assert there == {"reward": [1, 3], "judge": [2], "reward_model": [2], "environment": [2, 3], "engine": [1, 3]}
    nodes.kill(3)
    wait_for_line(process, "worker reward-")
    run, names = project.folder / "runs" / "run", {task["name"] for task in tasks}
    for _ in range(3):
        wait_for_line(process, "step ")
    while trained_tasks(run) != names:
        wait_for_line(process, "step ")
    finish(project, process)
    record_property("nodes", 1 + len({number for numbers in there.values() for number in numbers}))
    record_property("violations", len(audit(run).violations))
    verdicts = {}
    with RunReader.open(run) as reader:
        rows = list(reader.iterate_attempts("trained"))
    for row in rows:
        verdicts.setdefault(row.prompt.task, set()).add(dict(why(run, row.name)).get("graded by"))
    assert {*verdicts} == names
    assert {grader.rpartition(" on ")[2] for grader in verdicts["graded"]} == {"node1", "node3"}


def trained_tasks(run):
    """Names of the tasks that the run has trained on so far."""
    with RunReader.open(run) as reader:
        return {row.prompt.task for row in reader.iterate_attempts("trained")}


WORKERS = {
    "reward": [f"reward-{number}" for number in range(9)],
    "judge": ["judge-judged-0"],
    "reward_model": [f"reward-model-0-{number}" for number in range(9)],
    "environment": [f"environment-played-{number}" for number in range(99)],
    "engine": ["engine-0", "engine-1"],
}


@pytest.fixture
def classifier(project):
    """A reward model: the model of tests with a head that nobody trained."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = project.folder / "classifier"
    AutoModelForSequenceClassification.from_pretrained(project.model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(project.model).save_pretrained(folder)
    return str(folder)


def joined(project):
    """Engines that have, as far as that is durable."""
    ledger = project.folder / "runs" / "run" / "ledger.db"
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        return db.execute("SELECT count(*) FROM events WHERE kind = 'join'").fetchone()[0]


@pytest.mark.long
def test_a_rollout_worker_comes_back_with_its_node(project, nodes):
    """It runs where its engines are, and they come with it."""
    process = start(project, nodes, {"engine": "node1.cpu:0-0, node2.cpu:0-0"}, 2, "distributed", workers=2)
    wait_for_line(process, "step ")
    assert nodes.with_engines() == [1, 2]
    nodes.kill(2)
    wait_for_line(
        process, "none of the rollout workers takes the place of one that was lost yet: rollout worker 1 has "
    )
    wait_for_line(process, "step ")
    nodes.start(2)
    while nodes.with_engines() != [1, 2]:
        wait_for_line(process, "step ")
    finish(project, process)


@pytest.mark.long
def test_a_learner_of_two_nodes_goes_on_when_one_is_back(project, nodes):
    """Its second rank is lost; where that was, there is nothing for a while."""
    told = {
        "steps": 100_000,
        "cluster": {"kind": "ray", "address": nodes.address},
        "placement": {"learner": "node1.gpu:0, node2.gpu:0"},
        "weights": {"channel": "distributed", "host": "127.0.0.3"},  # node1's
        "learner": {"mesh": {"shard": 2}, "optimizer": {"learning_rate": 1e-3}},
        "checkpoint": {"every": 1},
    }
    process = project.start("train", project.config(**told))
    nodes.runs.append(process)
    for _ in range(3):
        wait_for_line(process, "step ")
    assert [nodes.running(f"learner-rank-{rank}") for rank in range(2)] == [[1], [2]]
    nodes.kill(2)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 2, out + err
    assert "goes on at its last checkpoint" in out
    assert "placement" in err and "node2" in err and "Traceback" not in err, (
        err
    )  # Ray may know that it is gone, or not yet
    assert not audit(project.folder / "runs" / "run").violations
    nodes.start(2)
    process = project.start("train", project.config(**told), "--resume")
    nodes.runs.append(process)
    finish(project, process)
    assert all(abs(step["learner/mismatch_kl"]) < 0.05 for step in project.metrics())

"""Whole runs on devices that training and generation have apart, in part together, and in turns: cores of this machine."""

import itertools
import json
import os
from importlib.util import find_spec

import psutil
import pytest

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.config import load
from antiphon.core.errors import ConfigError
from antiphon.inspect.audit import audit
from antiphon.run.config import RunConfig
from antiphon.run.placement import resolve_placement
from tests.raising import raises_with

CORES = sorted(os.sched_getaffinity(0))
FIRST, LAST = (f"cpu:{core}-{core}" for core in (CORES[0], CORES[-1]))
BOTH = FIRST if len(CORES) == 1 else f"{FIRST}, {LAST}"
PLACEMENTS = {
    "co-located": {"learner": BOTH, "engine": "with learner"},
    "overlapping": {"learner": FIRST, "engine": BOTH},
    "disaggregated": {"learner": FIRST, "engine": LAST},
}
SHARED = {"placement": {"learner": FIRST, "engine": "with learner"}}
placements = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)

pytestmark = [pytest.mark.system, pytest.mark.skipif(len(CORES) == 1, reason="one core has nothing to divide")]


def events_of(project):
    lines = (project.folder / "runs" / "run" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@placements
def test_those_who_share_devices_take_turns(project, placement):
    path = project.config(
        model={"path": "mytask:build"},
        steps=6,
        placement=placement,
        engine={"replicas": 2},
        rollout={"async_ratio": 1, "redundancy": 1, "sampling": {"max_tokens": 40}},
        sft={"steps": 4, "batch_size": 8, "stop_accuracy": 1.0, "evaluate_every": 2},
        evaluation={"every": 3},
        record={"events": True},
    )
    path.write_text(path.read_text().replace("reward: mytask:digits", VALIDATED))
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    assert not audit(project.folder / "runs" / "run").violations
    assert all(step["age/max"] <= 1 for step in project.metrics() if "age/max" in step)
    asleep, slept = set(), []
    for event in events_of(project):
        kind = event["event"]
        if kind == "sleep":
            asleep.add(event["engine"])
        elif kind == "wake":
            asleep.remove(event["engine"])
        elif kind == "publish":
            slept.append(len(asleep))
        elif kind == "place":
            assert event["engine"] not in asleep
    shared = {"co-located": 2, "overlapping": 1, "disaggregated": 0}
    shares = shared[next(name for name, found in PLACEMENTS.items() if found is placement)]
    assert set(slept[1:]) == {shares}
    assert len(asleep) == shares, "the models of the last checkpoint are copied from their devices"


VALIDATED = "validation: {source: 'mytask:problems', split: validation, limit: 8}\n  reward: mytask:digits"


def test_placement_changes_no_weight(project):
    """Whoever has which device, and when: the same run, byte for byte."""

    def run(placement):
        schedule = {"async_ratio": 1.5, "deterministic": True, "groups_per_step": 3}
        path = project.config(placement=placement, rollout=schedule, engine={"replicas": 2})
        done = project.run("train", path, "steps=4", "--overwrite")
        assert done.returncode == 0, done.stderr
        checkpoint = max((project.folder / "runs" / "run" / "checkpoints").iterdir())
        return (checkpoint / "model.safetensors").read_bytes()

    found = [run(placement) for placement in ({}, *PLACEMENTS.values())]
    assert all(one == other for one, other in itertools.pairwise(found))


def test_workers_are_held_to_their_devices(project):
    task = {"name": "digits", "prompts": {"source": "mytask:problems"}, "reward": "mytask:digits"}
    placement = {"learner": FIRST, "engine": BOTH, "reference": "with learner", "reward": LAST}
    path = project.config(
        tasks=[task],
        placement=placement,
        engine={"replicas": 2},
        algorithm={"kl": {"coefficient": 0.01}},
        steps=100_000,
    )
    process = project.start("train", path)
    try:
        for line in process.stdout:
            if line.startswith("step "):
                break
        held = {}
        for worker in psutil.Process(process.pid).children(recursive=True):
            grades = "tasks.grading.worker" in " ".join(worker.cmdline())
            if grades or "/logs/" in os.readlink(f"/proc/{worker.pid}/fd/1"):
                held.setdefault("reward" if grades else "worker", []).append(sorted(worker.cpu_affinity()))
    finally:
        process.kill()
        process.communicate()
    assert held["reward"] and all(cores == [CORES[-1]] for cores in held["reward"])
    first, last = [CORES[0]], [CORES[-1]]
    assert sorted(held["worker"]) == sorted([first, first, first, last]), (
        "learner, reference, and an engine on each core"
    )


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is optional: pip install -e '.[ray]'")
def test_a_placement_means_the_same_on_ray(project):
    path = project.config(cluster={"kind": "ray"}, placement=PLACEMENTS["overlapping"], engine={"replicas": 2})
    done = project.run("train", path, "record.events=true")
    assert done.returncode == 0, done.stderr
    slept = sum(event["event"] == "sleep" for event in events_of(project))
    assert slept == 5, "to begin after the first evaluation, for each step, and for the last checkpoint"


@pytest.mark.parametrize(
    ("sections", "key", "value"),
    [
        ({"placement": {"learner": "gpu:0-"}}, "placement.learner", "gpu:0-"),
        ({"placement": {"lerner": "cpu:1"}}, "placement.lerner", "cpu:1"),
        ({"placement": {"engine": "anywhere"}}, "placement.engine", "anywhere"),
        ({"placement": {"learner": "cpu:1"}, "cluster": {"debug": True}}, "cluster.debug", True),
        ({"placement": {"auto": True, "learner": FIRST}}, "placement.auto", True),
        ({"placement": {"engine": "anywhere"}, "cluster": {"kind": "ray"}}, "weights.channel", None),
    ],
)
def test_impossible_placement_is_refused_with_the_config(project, sections, key, value):
    with raises_with(ConfigError, key=key, value=value):
        load(project.config(**sections), model=RunConfig)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"placement": {"learner": "cpu:4000"}}, "placement.learner"),
        ({"placement": {"learner": FIRST}, "learner": {"threads": 2}}, "placement.learner"),
        ({"placement": {"engine": FIRST, "judge": FIRST}}, "placement.judge"),
        (SHARED | {"rollout": {"async_ratio": 1, "on_update": "restart"}}, "rollout.on_update"),
        (SHARED | {"rollout": {"async_ratio": 1, "on_update": "drain"}}, "rollout.on_update"),
    ],
)
def test_placement_beyond_this_machine_is_refused_early(project, sections, key):
    config = load(project.config(**sections), model=RunConfig)
    with raises_with(ConfigError, key=key):
        resolve_placement(LocalCluster(ClusterConfig()).nodes(), config)


def test_a_device_that_is_not_there_is_one_clear_error(project):
    done = project.run("train", project.config(placement={"learner": "gpu:0-70"}))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "placement.learner: gpu:0-70 exceeds the available devices: node0 with" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((project.folder / "runs").glob("run/logs/*.log"))


def test_the_planner_places_a_run(project):
    done = project.run("train", project.config(placement="auto", rollout={"async_ratio": 1}))
    assert done.returncode == 0, done.stderr
    assert "placement: " in done.stdout and "from sizes alone" in done.stdout
    assert project.summary()["steps"] == 3

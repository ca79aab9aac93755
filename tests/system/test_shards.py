"""Whole runs whose episodes, environments and rewards are sharded over rollout workers, and whose models are a trainer's."""

import json
import os
import re
import signal
import sqlite3
import textwrap
from contextlib import closing
from importlib.util import find_spec

import psutil
import pytest
import yaml

from antiphon.cluster.base import Gpu, Node
from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import ConfigError
from antiphon.inspect.audit import audit
from antiphon.inspect.replay import replay
from antiphon.inspect.why import why
from antiphon.run import commands
from antiphon.run.config import RunConfig
from antiphon.run.placement import resolve_placement
from antiphon.simulate.invariants import InvariantChecker
from tests.raising import raises_with
from tests.system.test_bad_input import output_of, wait_for_line
from tests.system.test_placement import PLACEMENTS

pytestmark = pytest.mark.system

TWO = {"engine": {"replicas": 2, "slots": 16}, "record": {"events": True}}
LENGTHS = {"name": "lengths", "prompts": {"source": "mytask:problems"}, "reward": "environment_return"}
LENGTHS |= {"environment": "mytask:Lengths"}


def schedule(**more):
    return {"async_ratio": 1, "redundancy": 1, "order": "ready", "max_attempts": 10, "workers": 2, **more}


def books_of(project, steps):
    """What the run's own record says, held against what it promises; the checker of its events."""
    run = project.folder / "runs" / "run"
    assert audit(run).violations == []
    checker = InvariantChecker(load(run / "config.yaml", model=RunConfig).rollout)
    checker.check((run / "events.jsonl").read_text().splitlines())
    checker.check_end(steps)
    assert list(checker.status.values()).count("trained") == steps * 2 * 4
    assert all(step["age/max"] <= 1 for step in project.metrics())
    return checker


def payloads_of(project, workers):
    """Where the payloads of what was trained on lie: all of them in files of so many workers, none in the controller's."""
    run = project.folder / "runs" / "run"
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        trained = db.execute("SELECT grp, sibling, try, file FROM attempts WHERE status = 'trained'").fetchall()
    assert len({file[: -len("-000000.parquet")] for *_, file in trained}) == workers
    assert not list((run / "rollouts").glob("[0-9]*")), "the controller had tokens to write"
    attempt = ".".join(map(str, trained[0][:3]))
    assert {"trajectory", "segment 0, turn 0", "token 2"} <= dict(why(run, f"{attempt}@2")).keys()


def train(project, *, resume=False, **sections):
    path = project.config(**sections)
    add_import_folder(path)
    config = load(path, ("cluster.debug=true", "record.live=off"), model=RunConfig)
    assert commands.train(config, overwrite=not resume, resume=resume) == 0


def test_environments_and_groups_that_are_judged_together(project):
    """Books and balance are those of any run; siblings share a worker, and both have some."""
    (task,) = yaml.safe_load(project.config().read_text())["tasks"]
    tasks = [task | {"group_reward": "mytask:places"}, LENGTHS]
    train(project, steps=8, tasks=tasks, rollout=schedule(max_turns=3), **TWO)
    assert len(books_of(project, 8).engines) == 2
    payloads_of(project, workers=2)
    assert all(step["engines/live"] == 2 for step in project.metrics())
    workers = {}
    for line in (project.folder / "runs" / "run" / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "place":
            workers.setdefault(event["request"].split(".")[0], set()).add(event["engine"])
    assert all(len(engines) == 1 for engines in workers.values())
    assert set.union(*workers.values()) == {0, 1000}


def test_a_sampler_of_your_own(project):
    (project.folder / "mysampler.py").write_text(
        "async def one_by_one(group):\n"
        "    for _ in range(group.expected):\n"
        "        await group.reward(await group.generate(temperature=0.5))\n"
    )
    train(project, rollout=schedule(sampler="mysampler:one_by_one", redundancy=0), **TWO)
    books_of(project, 3)
    payloads_of(project, workers=2)


def test_a_resumed_run_may_have_other_workers(project):
    warm = {"steps": 2, "batch_size": 4}
    for steps, workers in ((3, 1), (5, 2), (7, 0)):
        train(project, resume=steps > 3, steps=steps, sft=warm, rollout=schedule(workers=workers), **TWO)
    assert audit(project.folder / "runs" / "run").violations == []
    ages = [(step["step"], step["age/max"]) for step in project.metrics() if "age/max" in step]
    assert [step for step, _ in ages] == [*range(1, 8)] and max(age for _, age in ages) <= 1
    run = project.folder / "runs" / "run"
    assert replay(run, load(run / "config.yaml", model=RunConfig)) == 7, "the batches are those that the trainer made"


def kill(process, worker):
    """The process that writes the log of `worker`."""
    logs = {child: output_of(child) for child in psutil.Process(process.pid).children(recursive=True)}
    next(child for child, output in logs.items() if any(path.endswith(f"/{worker}.log") for path in output)).kill()


def steps(process, count):
    """Wait for so many more."""
    for _ in range(count):
        wait_for_line(process, "step ")


@pytest.mark.long
def test_a_worker_and_an_engine_of_another_are_killed(project):
    """Where cores suffice, the one that is killed shares its own with the learner, the other does not."""
    placement = PLACEMENTS["overlapping"] if len(os.sched_getaffinity(0)) > 1 else {}
    slow = {"optimizer": {"learning_rate": 1e-5}}
    config = project.config(steps=100_000, rollout=schedule(), learner=slow, placement=placement, **TWO)
    process = project.start("train", config)
    wait_for_line(process, "step ")
    kill(process, "rollout-0")
    wait_for_line(process, "worker rollout-0 was killed by SIGKILL")
    kill(process, "rollout-1/engine-0")
    wait_for_line(process, "worker engine-0 was killed by SIGKILL")
    steps(process, 2)  # the second began with fewer
    while project.metrics()[-1]["engines/live"] < 2:
        steps(process, 1)
    steps(process, 3)  # the versions of two are loaded everywhere
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    checker = books_of(project, project.summary()["steps"])
    assert checker.engines.keys() == {0, 1000, 1001, 2000} and checker.lost == {0, 1000}
    assert min(checker.engines[1001], checker.engines[2000]) > 0, "they hold newer weights"
    nobody_is_left(project)


def nobody_is_left(project):
    """Processes of workers that were killed end by themselves."""
    left = [child for child in psutil.process_iter() if str(project.folder) in " ".join(output_of(child))]
    assert not psutil.wait_procs(left, timeout=60)[1]


# Orders that are carried out once, by whoever comes to it first: a file is the order.
KILLS = """
    import os
    import signal
    from pathlib import Path

    import mytask
    import psutil
    from antiphon.core import failpoints as points
    from antiphon.learning.torch_learner import TorchLearner

    def ordered(who):
        try:
            Path(__file__).with_name(who).unlink()
            return True
        except FileNotFoundError:
            return False

    class Lengths(mytask.Lengths):
        inline = True  # in the rollout worker

        def reset(self, seed):
            if ordered("rollout"):
                points.arm("rollouts.write", 2)
            return super().reset(seed)

    class Learner(TorchLearner):
        steps = 0

        def step(self, batch):
            self.steps += 1
            if self.steps == 2 and ordered("trainer"):
                parent = psutil.Process(os.getppid())
                (parent.parent() if "forkserver" in str(parent.cmdline()) else parent).kill()
            elif self.steps == 3 and ordered("rank"):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(batch)
"""


def test_killed_worker_trainer_and_rank_are_survived(project):
    """In mid-write and in mid-step. What was not whole is not there, and the run goes on, at a checkpoint where it must."""
    (project.folder / "kills.py").write_text(textwrap.dedent(KILLS))
    for who in ("rollout", "trainer", "rank"):
        (project.folder / who).touch()
    learner = {"kind": "kills:Learner", "mesh": {"shard": 2}}
    path = project.config(
        steps=4,
        tasks=[LENGTHS | {"environment": "kills:Lengths"}],
        rollout=schedule(max_turns=3, workers=1),
        learner=learner,
        checkpoint={"every": 1},
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    for worker in ("rollout-0", "trainer"):
        assert f"worker {worker} was killed by SIGKILL" in done.stdout, done.stdout
    # The other rank loses its connection, and sometimes its error is heard of first.
    assert re.search("worker learner-rank-[01] (was killed by SIGKILL|failed:)", done.stdout), done.stdout
    run = project.folder / "runs" / "run"
    assert audit(run).violations == [] and project.summary()["lineage"] == 2
    assert [file.name[:10] for file in (run / "rollouts").glob(".*")] == [".lineage-0"], "what the worker had begun"
    nobody_is_left(project)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is optional: pip install -e '.[ray]'")
def test_on_ray(project):
    cluster = {"cluster": {"kind": "ray"}, "weights": {"channel": "distributed"}, "placement": {"engine": "anywhere"}}
    done = project.run("train", project.config(rollout=schedule(), **cluster, **TWO))
    assert done.returncode == 0, done.stderr
    assert len(books_of(project, 3).engines) == 2
    assert {"rollout-0", "rollout-1"} <= {log.name for log in (project.folder / "runs" / "run" / "logs").iterdir()}


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"engine": {"replicas": 3}}, "engine.replicas"),
        ({"rollout": {"deterministic": True}}, "rollout.workers"),
        ({"cluster": {"kind": "ray"}, "weights": {"channel": "object_store"}}, "weights.channel"),
        ({"placement": {"reward": "cpu:1"}}, "placement.reward"),
        ({"placement": "auto"}, "placement.auto"),
        ({"placement": {"critic": "anywhere"}, "cluster": {"kind": "ray"}}, "placement.critic"),
    ],
)
def test_what_cannot_be_divided_is_refused(project, sections, key):
    given = {"engine": {"replicas": 2}} | sections
    path = project.config(**(given | {"rollout": {"workers": 2, **given.get("rollout", {})}}))
    with pytest.raises(ConfigError) as refused:
        load(path, model=RunConfig)
    assert key in {mistake.key for mistake in refused.value.mistakes}


class TwoNodes(LocalCluster):
    """As a Ray of two machines would say."""

    def nodes(self):
        return [Node(name, cores=(0, 1), gpus=(Gpu("0", "h800"), Gpu("1", "h800"))) for name in ("a", "b")]


@pytest.mark.parametrize(
    ("learner", "engine", "channel", "key"),
    [
        ("node1.gpu:0", "node1.gpu:1", "shared_memory", "placement.engine"),
        ("node0.gpu:0", "node1.gpu:0", "distributed", "weights.host"),
        ("node0.gpu:0", "node1.gpu:0", "device_memory", "placement.engine"),
        ("node0.gpu:0", "node0.cpu:0-0", "device_memory", "placement.engine"),
    ],
)
def test_weights_must_reach_the_engines(project, learner, engine, channel, key):
    sections = {"placement": {"learner": learner, "engine": engine}, "weights": {"channel": channel}}
    config = load(project.config(**sections), model=RunConfig)
    with raises_with(ConfigError, key=key):
        resolve_placement(TwoNodes(ClusterConfig()).nodes(), config)


@pytest.mark.parametrize("gpus", ["node0.gpu:0", "node0.gpu:0-1, node1.gpu:0-1"])
def test_each_rank_has_a_gpu(project, gpus):
    sections = {"placement": {"learner": gpus}, "learner": {"mesh": {"shard": 2}}, "weights": {"host": "10.0.0.1"}}
    config = load(project.config(**sections), model=RunConfig)
    with raises_with(ConfigError, key="placement.learner"):
        resolve_placement(TwoNodes(ClusterConfig()).nodes(), config)


def ppo(project, meshes, **placement):
    sections = {"algorithm": {"recipe": "ppo"}, "critic": {"count": 2}, "learner": {"mesh": {"shard": 2}}}
    return load(project.config(placement=placement, meshes={"critic": meshes}, **sections), model=RunConfig)


def test_critics_have_the_gpus_of_their_own_mesh(project):
    config = ppo(project, {}, learner="node0.gpu:0-1", critic="node1.gpu:0-1")
    found = resolve_placement(TwoNodes(ClusterConfig()).nodes(), config)
    assert [len(found.known_places(role)) for role in ("learner", "critic")] == [2, 2]
    assert [place.gpus for place in found.known_places("critic")] == [("0",), ("1",)]


@pytest.mark.parametrize("role", ["reference", "critic", "teacher"])
def test_devices_of_a_role_that_has_no_model_are_not_divided(project, role):
    gpus = "node0.gpu:0-1, node1.gpu:0"
    config = load(project.config(placement={"learner": "node0.gpu:0", role: gpus}), model=RunConfig)
    assert resolve_placement(TwoNodes(ClusterConfig()).nodes(), config).known_places(role) == []


@pytest.mark.parametrize(
    ("meshes", "gpus", "key"),
    [
        ({"tensor": 2}, "node0.gpu:0-1", "placement.critic"),
        ({}, "node0.gpu:0-1, node1.gpu:0-1", "placement.critic"),
        ({"shard": 2}, "node0.gpu:0, node1.gpu:0, node0.gpu:1, node1.gpu:1", "weights.host"),
    ],
)
def test_critics_whose_ranks_cannot_be_so_are_refused(project, meshes, gpus, key):
    config = ppo(project, meshes, learner="node0.gpu:0-1", critic=gpus)
    with raises_with(ConfigError, key=key):
        resolve_placement(TwoNodes(ClusterConfig()).nodes(), config)


@pytest.mark.parametrize(
    ("placement", "role"),
    [
        ({"learner": "node0.gpu:0, node1.gpu:0"}, "learner"),
        ({"learner": "node1.gpu:0-1", "critic": "node0.gpu:0-1"}, "critic"),
        ({"teacher": "node1.gpu:0-1"}, "teacher"),
    ],
)
def test_models_are_on_the_node_of_their_trainer(project, placement, role):
    weights = {"channel": "distributed", "host": "10.0.0.1"}
    sections = {"rollout": {"workers": 1}, "learner": {"mesh": {"shard": 2}}, "weights": weights}
    sections |= {"algorithm": {"recipe": "ppo"}, "critic": {"count": 1}} if role == "critic" else {}
    sections |= (
        {"teachers": [{"path": str(project.model)}], "algorithm": {"teacher_coefficient": 1}}
        if role == "teacher"
        else {}
    )
    config = load(project.config(placement=placement, **sections), model=RunConfig)
    with raises_with(ConfigError, match=r"rollout\.workers", key=f"placement.{role}"):
        resolve_placement(TwoNodes(ClusterConfig()).nodes(), config)
    apart = config.model_copy(update={"rollout": config.rollout.model_copy(update={"workers": 0})})
    if role != "learner":
        assert resolve_placement(TwoNodes(ClusterConfig()).nodes(), apart).known_places(role)

"""A reward that asks a model on engines of its own, in a real run."""

import asyncio
import json
import sys
import textwrap

import psutil
import pytest

from antiphon.cluster.base import Gpu, Node
from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.config import load
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError
from antiphon.core.types import Message, Prompt
from antiphon.inspect.audit import audit
from antiphon.record.events import Events
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.graders import start_graders
from antiphon.run.placement import resolve_placement
from antiphon.tasks.base import Transcript
from tests.raising import raises_with
from tests.system.test_bad_input import is_worker, output_of, wait_for_line

pytestmark = pytest.mark.system

ASKER = """
    from antiphon.core.types import Message, Score

    class Asker:
        def __init__(self, generate):
            self.generate = generate

        async def __call__(self, prompt, transcript):
            question = [Message("user", prompt.payload["prompt"])]
            first, again = await self.generate(question), await self.generate(question)
            value = sum(map(str.isdigit, transcript.response)) / 8
            return Score.of(value, same=first == again, asked=len(first) > 0)
"""


def config(project, judge=None, **sections):
    (project.folder / "asker.py").write_text(textwrap.dedent(ASKER))
    judge = {"path": str(project.model), "max_tokens": 4, **(judge or {})}
    task = {"name": "digits", "prompts": {"source": "mytask:problems"}, "reward": "asker:Asker", "judge": judge}
    return project.config(tasks=[task], grading={"deadline": 60}, **sections)


def test_judge_engines_scale_with_load(project):
    sections = {"judge": {"replicas": 2, "minimum": 1}, "engine": {"slots": 2}, "record": {"events": True}}
    done = project.run("train", config(project, steps=2, **sections))
    assert done.returncode == 0, done.stderr
    for line in project.metrics():
        assert line["reward/part/digits/same"] == line["reward/part/digits/asked"] == 1.0
    run = project.folder / "runs" / "run"
    assert (run / "logs" / "judge-digits-0.log").exists()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    of_judges = [event for event in events if event.get("pool") == "judge-digits"]
    began, grew, *_ = of_judges
    assert (began["event"], grew["event"], grew["engines"]) == ("join", "grow", 2)
    assert not {"place", "served"} & {event["event"] for event in of_judges}
    engines = [event["engine"] for event in events if event["event"] == "join"]
    assert len({*engines}) == len(engines) >= 2
    assert not audit(run).violations


def test_rollout_workers_share_the_judges(project):
    """Each has rewards of its own, which ask the same engines; those are the controller's, as a profile shows."""
    sections = {"rollout": {"workers": 2}, "engine": {"replicas": 2, "slots": 2}, "weights": {"channel": "distributed"}}
    sections |= {"profile": {"steps": [2]}}
    done = project.run("train", config(project, steps=2, **sections))
    assert done.returncode == 0, done.stderr
    for line in project.metrics():
        assert line["reward/part/digits/same"] == line["reward/part/digits/asked"] == 1.0
    run = project.folder / "runs" / "run"
    assert len([*run.rglob("judge-digits-*.log")]) == 1
    traces = {file.name for file in (run / "profile" / "step_000002").glob("*.json.gz")}
    assert traces == {
        f"{name}.json.gz" for name in ("judge-digits-0", "learner", "rollout-0-engine-0", "rollout-1-engine-0")
    }
    assert not audit(run).violations


class Heard(Events):
    """Events that can be waited for."""

    def __init__(self):
        super().__init__()
        self.heard = asyncio.Queue()

    def add(self, event, **what):
        super().add(event, **what)
        self.heard.put_nowait((event, what["pool"]))

    async def next(self, event):
        while (await self.heard.get()) != (event, "judge-digits"):
            pass


def test_judge_engines_start_on_demand_and_end_when_idle(project, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(project.folder), *sys.path])
    judge = {"replicas": 2, "minimum": 1, "idle_seconds": 0.5}
    settings = load(config(project, judge=judge, engine={"slots": 1}), model=RunConfig)
    prompt = Prompt(id="digits/0", task="digits", messages=(), payload={"prompt": "1+1="})
    transcript = Transcript([Message("assistant", "2")])

    async def main():
        logs, events, deadlines = project.folder / "logs", Heard(), Deadlines()
        cluster = LocalCluster(ClusterConfig(), logs)
        context = LaunchContext(cluster=cluster, config=settings, deadlines=deadlines, events=events)
        started, ended = [], []
        try:
            async with start_graders(context) as (grading, models):
                (pool,) = models.pools
                watch = asyncio.create_task(pool.watch())
                for _ in range(2):
                    asked = asyncio.gather(*(grading.score(prompt, transcript) for _ in range(6)))
                    await events.next("grow")
                    await events.next("join")
                    started.append(judges())
                    assert {score.value for score in await asyncio.shield(asked)} == {1 / 8}
                    await events.next("retired")
                    while pool.engines != 1 or {"respawn", "close"} & {wait.name for wait in deadlines.open()}:
                        await deadlines.change()
                    ended.append(judges())
                    events.heard = asyncio.Queue()
                watch.cancel()
        finally:
            await cluster.close()
        return started, ended

    assert asyncio.run(asyncio.wait_for(main(), 120)) == ([2, 2], [1, 1])


def judges():
    """Processes."""
    found = psutil.Process().children(recursive=True)
    return sum("/judge-digits-" in path for child in found for path in output_of(child))


def test_rewards_have_gpus_of_their_own_and_see_no_others(project, monkeypatch):
    """Those that a machine would have: processes say what they were given."""
    monkeypatch.setattr(sys, "path", [str(project.folder), *sys.path])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    (project.folder / "sees.py").write_text(textwrap.dedent(SEES))
    nodes = [Node(cores=(0, 1), gpus=tuple(Gpu(str(number), "h200") for number in range(4)))]
    task = {"name": "digits", "prompts": {"source": "mytask:problems"}, "reward": "sees:sees"}
    prompt = Prompt(id="digits/0", task="digits", messages=(), payload={})

    async def seen(config):
        placement = resolve_placement(nodes, config)
        context = LaunchContext(cluster=LocalCluster(ClusterConfig()), config=config, placement=placement)
        async with start_graders(context) as graders:
            return (await graders.router.score(prompt, Transcript([]))).detail

    found = {}
    for reward in ("gpu:3", "gpu:2, cpu:1", "cpu:1", ""):
        placement = {"learner": "gpu:0", "engine": "gpu:1", "reward": reward}
        config = load(project.config(tasks=[task], placement=placement), model=RunConfig)
        found[reward] = asyncio.run(seen(config))
    assert found == {"gpu:3": "3", "gpu:2, cpu:1": "2", "cpu:1": "", "": ""}
    assert asyncio.run(seen(load(project.config(tasks=[task]), model=RunConfig))) == "0,1,2,3"
    config = load(
        project.config(tasks=[task], placement={"reward": "gpu:1-3"}, grading={"max_workers": 2}), model=RunConfig
    )
    with raises_with(ConfigError, match="max_workers", key="placement.reward"):
        resolve_placement(nodes, config)


SEES = """
    import os
    from antiphon.core.types import Score, ScoreStatus

    def sees(prompt, transcript):
        return Score(status=ScoreStatus.SCORED, value=1.0, detail=os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_judge_that_is_killed_is_replaced_as_often_as_allowed(project, restarts):
    """Then the run ends, and says why: not that nothing is graded any more."""
    settings = {"rollout": {"engine_restarts": restarts}, "checkpoint": {"every": 0}}  # nothing to go on from
    process = project.start("train", config(project, steps=60, **settings))
    wait_for_line(process, "step ")
    children = psutil.Process(process.pid).children(recursive=True)
    next(child for child in children if is_worker(child, "judge-digits-0")).kill()
    out, err = process.communicate(timeout=300)
    assert process.returncode == (0 if restarts else 2), err
    assert "worker judge-digits-0 was killed by SIGKILL" in (out if restarts else err)
    assert "could be trained on" not in err
    assert (project.folder / "runs" / "run" / "logs" / "judge-digits-1.log").exists() == bool(restarts)


@pytest.mark.parametrize(
    "task, rollout, key",
    [
        ({"reward": "math"}, {}, "tasks.0.judge"),
        ({"reward": "asker:Asker"}, {"deterministic": True}, "tasks.0.judge"),
        ({"reward": "asker:Asker", "judge": {"path": "mytask:build"}}, {}, "tasks.0.judge.path"),
        ({"reward": "asker:Asker", "judge": {"path": "x", "replicas": 2, "minimum": 3}}, {}, "tasks.0.judge.minimum"),
        ({"reward": "judge", "judge": {"path": "x", "replicas": 9, "minimum": 4}}, {}, "tasks.0.judge.minimum"),
        ({"reward": "asker:Asker", "judge": {"path": "x", "idle_seconds": 0}}, {}, "tasks.0.judge.idle_seconds"),
    ],
)
def test_a_judge_that_cannot_be_is_refused(project, task, rollout, key):
    task = {"name": "t", "prompts": {"source": "mytask:problems"}, "judge": {"path": "somewhere"}, **task}
    with pytest.raises(ConfigError) as refused:
        load(project.config(tasks=[task], rollout=rollout), model=RunConfig)
    assert [mistake.key for mistake in refused.value.mistakes] == [key]

"""Roles of the user's own in whole runs: their workers are called by stages, killed, replaced, saved and restored."""

import json
import os
import signal
import textwrap
from pathlib import Path

import psutil
import pytest
import yaml

from antiphon.inspect.audit import audit
from tests.pages import BLOCK
from tests.system.test_bad_input import is_worker, wait_for_line

pytestmark = pytest.mark.system

CODE = """
    import os

    class Ruler:
        # Measures texts. Any number of workers will do.
        def __init__(self, unit):
            self.unit = unit

        def measure(self, lengths):
            return [length / self.unit for length in lengths], os.getpid()

        async def name(self):
            return f"ruler of {self.unit}"

        def fail(self):
            raise LookupError("no such length")

        def give_a_call(self):
            class Calls:
                def __reduce__(self):
                    return os.system, ("true",)
            return Calls()

    class Memory:
        # Counts the steps that it has seen.
        def __init__(self):
            self.steps = []

        def see(self, number):
            self.steps.append(number)
            return self.steps

        def state(self):
            return bytes(self.steps)

        def restore(self, state):
            self.steps = list(state)

    async def measure(step):
        lengths = [len(sample.segment.tokens) for sample in step.flat]
        measured, first = await step.roles["ruler"].call("measure", lengths)
        assert measured == [length / 4 for length in lengths]
        names = await step.roles["ruler"].call_all("name")
        assert set(names) == {"ruler of 4"}
        step.metrics["rulers"] = float(len(names))

    async def remember(step):
        seen = await step.roles["memory"].call("see", step.number)
        step.metrics["seen"] = float(len(seen))
        step.metrics["in_order"] = float(seen == list(range(1, step.number + 1)))

    async def fail(step):
        await step.roles["ruler"].call("fail")

    async def take_a_call(step):
        await step.roles["ruler"].call("give_a_call")

    async def misspell(step):
        await step.roles["ruler"].call("mesure")
"""
STAGES = ["annotate", "rewards", "advantages", "update_critics", "update_actor"]
RULER = {"factory": "ours:Ruler", "options": {"unit": 4}, "workers": 2}
MEMORY = {"factory": "ours:Memory"}


def config(project, roles, *stages, **sections):
    (project.folder / "ours.py").write_text(textwrap.dedent(CODE))
    learner = {"stages": [*STAGES, *(f"ours:{stage}" for stage in stages)]}
    return project.config(**{"roles": roles, "learner": learner, "evaluation": {}, **sections})


@pytest.mark.parametrize("workers", [0, 2], ids=["in the controller", "in the trainer process"])
def test_stages_call_the_workers_of_a_role(project, workers):
    split = (
        {"rollout": {"workers": workers}, "engine": {"replicas": 2}, "weights": {"channel": "distributed"}}
        if workers
        else {}
    )
    done = project.run("train", config(project, {"ruler": RULER}, "measure", steps=2, record={"events": True}, **split))
    assert done.returncode == 0, done.stderr
    for step in project.metrics(own=("rulers",)):
        assert step["rulers"] == 2.0 and step["role/ruler/seconds"] > 0
    run = project.folder / "runs" / "run"
    trace = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {each["name"] for each in trace if each["pid"] == "role ruler"} == {"measure"}
    assert {path.name for path in run.glob("logs/role-ruler-*")} == {"role-ruler-0.log", "role-ruler-1.log"}


def workers_of(process, role):
    return [child for child in psutil.Process(process.pid).children(recursive=True) if is_worker(child, role)]


def test_worker_without_state_is_replaced(project):
    process = project.start("train", config(project, {"ruler": RULER}, "measure", steps=100_000))
    wait_for_line(process, "step ")
    (victim,) = workers_of(process, "role-ruler-0")
    victim.kill()
    while not workers_of(process, "role-ruler-2"):
        wait_for_line(process, "step ")
    wait_for_line(process, "step ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, out + err


def test_state_is_saved_lost_with_its_worker_and_restored(project):
    path = config(project, {"memory": MEMORY}, "remember", steps=100_000, checkpoint={"every": 1})
    process = project.start("train", path)
    for _ in range(3):
        wait_for_line(process, "step ")
    (victim,) = workers_of(process, "role-memory-0")
    os.kill(victim.pid, signal.SIGKILL)
    wait_for_line(process, "worker role-memory-0 was killed by SIGKILL")
    wait_for_line(process, "the run goes on at its last checkpoint")
    for _ in range(3):
        wait_for_line(process, "step ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130 and "Traceback" not in err, out + err
    for step in project.metrics(own=("seen", "in_order")):
        assert (step["seen"], step["in_order"]) == (step["step"], 1.0)
    assert not audit(project.folder / "runs" / "run").violations


@pytest.mark.parametrize(
    ("roles", "stage", "said"),
    [
        ({"ruler": RULER}, "fail", ("roles.ruler", "LookupError", "no such length", "ours.py")),
        ({"ruler": RULER}, "misspell", ("roles.ruler", "'mesure'", "measure")),
        ({"ruler": RULER}, "take_a_call", ("roles.ruler", "posix.system", "not a class of data", "ours.py")),
        ({"ruler": RULER | {"options": {}}}, "measure", ("roles.ruler", "unit")),
        ({"ruler": RULER | {"factory": "ours:Rulers"}}, "measure", ("roles.ruler.factory", "Rulers")),
        ({"memory": MEMORY | {"workers": 2}}, "remember", ("roles.memory.workers", "state")),
        ({"Ruler": RULER}, "measure", ("roles", "Ruler")),
        ({"ruler": RULER | {"placement": "gpu:0-99"}}, "measure", ("roles.ruler.placement", "gpu:0-99")),
    ],
    ids=["raises", "no such method", "no data", "no options", "no such class", "two with state", "name", "placement"],
)
def test_mistakes_are_one_message(project, roles, stage, said):
    done = project.run("train", config(project, roles, stage, steps=1))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert all(each in done.stderr for each in said), done.stderr


def test_the_guide_trains_and_goes_on(project):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "roles.md").read_text()
    code, settings = (text for _, text in BLOCK.findall(page))
    (project.folder / "my_roles.py").write_text(code)
    path = project.config(**yaml.safe_load(settings), evaluation={}, checkpoint={"every": 1})
    for steps, more in ((2, ()), (4, ("--resume",))):
        done = project.run("train", path, f"steps={steps}", *more)
        assert done.returncode == 0, done.stderr
    assert [0 < step["novelty"] <= 1 for step in project.metrics(own=("novelty",))] == [True] * 4

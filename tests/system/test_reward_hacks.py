"""The code reward pays no program that is not what was asked, whatever it tries, and each that is."""

import contextlib
import shutil
import types
from pathlib import Path

import pytest

from antiphon.core.types import Message, Prompt, ScoreStatus
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation.forked_python import ForkedPython
from antiphon.sandbox.isolation.levels import probe
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.code import programs as code_programs
from antiphon.tasks.rewards.code.reward import Code
from tests.system.process_hacks import PROCESS_HACKS
from tests.system.reward_hacks import HACKS, HOLES, ONE_PROCESS, ONE_PROCESS_PYTEST, TASKS

pytestmark = pytest.mark.skipif(probe().level != Level.ISOLATED, reason="this machine has no level 3")

BY_PROCESS = {cause for cause, *_ in PROCESS_HACKS} | {
    "signals its parent",
    "writes to the memory of others",
    "opens the pipes of others",
}
OPTIONS = {"seconds": 6.0, "case_seconds": 1.0, "sandbox": {"packages": ["pytest"]}}


def grade(reward, task, program):
    prompt = Prompt(id=task, task="t", messages=(), payload=TASKS[task].payload)
    return reward(prompt, Transcript([Message("assistant", f"```python\n{program}\n```")]))


@pytest.fixture(scope="module")
def reward():
    with contextlib.closing(Code(**OPTIONS)) as reward:
        yield reward


def ids(hacks):
    return [hack.cause.replace(" ", "_") for hack in hacks]


@pytest.mark.parametrize("task", TASKS)
def test_honest_programs_are_paid(reward, task):
    score = grade(reward, task, TASKS[task].honest)
    assert (score.status, score.value) == (ScoreStatus.SCORED, 1), score.detail


@pytest.mark.parametrize("hack", HACKS, ids=ids(HACKS))
def test_no_hack_is_paid(reward, hack):
    score = grade(reward, hack.task, hack.program)
    assert (score.status, score.value) == (ScoreStatus.SCORED, 0)


OF_PROCESSES = [hack for hack in HACKS if hack.cause in BY_PROCESS]


@pytest.fixture(scope="module")
def trusting():
    """The reward at the level for trusted code."""
    with contextlib.closing(Code(**OPTIONS)) as reward:
        reward._sandbox.close()
        reward._sandbox = ForkedPython(reward._config, level=Level.LIMITS, modules=code_programs.modules())
        yield reward


@pytest.mark.parametrize("hack", OF_PROCESSES, ids=ids(OF_PROCESSES))
def test_no_process_is_reached_at_level_1(trusting, hack):
    score = grade(trusting, hack.task, hack.program)
    assert (score.status, score.value) == (ScoreStatus.SCORED, 0), score.detail
    assert grade(trusting, hack.task, TASKS[hack.task].honest).value == 1


def test_hacks_have_distinct_causes_and_all_shapes():
    assert len({hack.cause for hack in HACKS}) == len(HACKS) >= 100
    assert {TASKS[hack.task].shape for hack in HACKS} == {"completion", "statements", "class", "pytest", "streams"}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The reward with a hole of `HOLES`."""
    with contextlib.ExitStack() as stack:
        made = {}

        def plant(hole):
            if hole not in made:
                made[hole] = stack.enter_context(contextlib.closing(_with_hole(hole, tmp_path_factory.mktemp("hole"))))
            return made[hole]

        yield plant


def _with_hole(hole, folder):
    for path in code_programs.FOLDER.glob("*.py"):
        shutil.copy(path, folder)
    for file, there, instead in HOLES[hole]:
        text = (folder / f"{file}.py").read_text()
        assert text.count(there) == 1, (file, there)
        (folder / f"{file}.py").write_text(text.replace(there, instead))
    module = types.ModuleType("code_with_hole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_programs, "FOLDER", Path(folder))
        exec(compile((folder / "reward.py").read_text(), "reward.py", "exec"), vars(module))
        return module.Code(**OPTIONS)


@pytest.mark.parametrize("hole", HOLES)
def test_honest_programs_are_paid_with_a_hole(planted, hole):
    for task in TASKS:
        if {*HOLES[hole]} & {*HOLES[ONE_PROCESS], *HOLES[ONE_PROCESS_PYTEST]} or TASKS[task].shape == "streams":
            continue
        assert grade(planted(hole), task, TASKS[task].honest).value == 1, task


@pytest.mark.parametrize("hack", [hack for hack in HACKS if hack.hole], ids=ids([hack for hack in HACKS if hack.hole]))
def test_hacks_are_paid_where_their_hole_is(planted, hack):
    assert grade(planted(hack.hole), hack.task, hack.program).value == 1

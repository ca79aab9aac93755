"""Rewards that keep, and that break, what a run takes for granted of them."""

import asyncio
import itertools
from typing import Any

import pytest

from antiphon.core.types import Message, Prompt, Score, ScoreStatus
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import GradingConfig, PromptsConfig, TaskConfig
from antiphon.tasks.reward_checks.checks import CheckResult, Grade, check_reward, oracles

MATH = [
    Prompt(id=f"t/{n}", task="t", messages=(Message("user", f"{n}+1?"),), payload={"answer": str(n + 1)})
    for n in range(4)
]


def tried(grade: Any, payload: Any = None, reward_range: Any = None, deadline: float = 10.0) -> CheckResult:
    task = TaskConfig(name="t", prompts=PromptsConfig(source="jsonl"), reward="math", reward_range=reward_range)
    prompts = MATH if payload is None else [Prompt(id="t/0", task="t", messages=(), payload=payload)]

    async def score(prompt: Prompt, transcript: Transcript) -> Score:
        verdict = grade(prompt, transcript.response)
        return verdict if isinstance(verdict, Score) else Score.of(verdict)

    seam: Grade = score
    return asyncio.run(check_reward(task, prompts, seam, GradingConfig(deadline=deadline)))


def boxed(prompt: Prompt, response: str) -> Any:
    return response == rf"\boxed{{{prompt.payload['answer']}}}"


def test_a_reward_that_is_right() -> None:
    found = tried(boxed, reward_range=[0, 1])
    assert (found.oracle, found.empty, found.garbage, found.problems) == (1.0, 0.0, 0.0, ())
    assert found.gradings == 20


coin = itertools.cycle([0.0, 1.0])


@pytest.mark.parametrize(
    "grade, message",
    [
        (lambda prompt, response: 0.3, "an answer that is empty scores 0.3, the right one 0.3"),
        (lambda prompt, response: len(response), "an answer that is garbage scores 59, the right one 9"),
        (lambda prompt, response: 2 * boxed(prompt, response), "a score of 2 is outside of reward_range [0.0, 1.0]"),
        (lambda prompt, response: next(coin) * bool(response), "the same answer scored"),
        (lambda prompt, response: Score.ungraded("no key 'answr'"), "nothing could be graded: no key 'answr'"),
        (
            lambda prompt, response: Score(status=ScoreStatus.INFRASTRUCTURE, detail="the sandbox is gone"),
            "gradings were lost: the sandbox is gone",
        ),
    ],
)
def test_what_is_wrong_is_said(grade: Any, message: str) -> None:
    assert any(message in problem for problem in tried(grade, reward_range=[0, 1]).problems)


def test_a_grading_that_takes_most_of_its_deadline() -> None:
    (problem,) = tried(boxed, deadline=1e-9).problems
    assert "grading.deadline" in problem


def test_garbage_must_not_score_most_without_ground_truth() -> None:
    (empty, garbage) = tried(lambda prompt, response: 1.0, payload={"x": 1}, reward_range=[0, 1]).problems
    assert "empty scores 1, the most there is" in empty and "garbage scores 1" in garbage
    found = tried(lambda prompt, response: 0.5, payload="text", reward_range=[0, 1])
    assert found.problems == () and found.oracle is None


def test_an_empty_answer_may_be_left_ungraded() -> None:
    found = tried(lambda prompt, response: Score.of(boxed(prompt, response)) if response else Score.ungraded("empty"))
    assert found.problems == () and found.empty is None


@pytest.mark.parametrize(
    "payload, found",
    [
        ({"response": "So 5.", "answer": "5"}, ["So 5."]),
        ({"answer": 5}, ["5", r"\boxed{5}"]),
        ({"response": [1], "answer": None}, []),
        (None, []),
    ],
)
def test_where_the_right_answer_stands(payload: Any, found: list[str]) -> None:
    assert oracles(Prompt(id="p", task="t", messages=(), payload=payload)) == found

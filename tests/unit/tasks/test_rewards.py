"""The built-in rewards, with the traps that model output sets."""

import asyncio
from typing import Any

import numpy as np
import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError
from antiphon.core.types import Message, Prompt, Sampling, Score, ScoreStatus, Turn
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import GradingConfig, PromptsConfig, TaskConfig
from antiphon.tasks.grading.pool import GradingPool
from antiphon.tasks.grading.worker_process import PoolSettings
from antiphon.tasks.prompts import load_prompts
from antiphon.tasks.rewards import build_reward
from antiphon.tasks.rewards.extract import last_boxed, last_match
from antiphon.tasks.rewards.math.reward import Math


def answer(text: str) -> Transcript:
    return Transcript([Message("user", "?"), Message("assistant", text)])


def ask(payload: Any) -> Prompt:
    return Prompt(id="p", task="t", messages=(Message("user", "?"),), payload=payload)


def judge(reward: str, payload: Any, text: str, **options: Any) -> Score:
    verdict = build_reward(reward, options)(ask(payload), answer(text))
    assert isinstance(verdict, Score)
    return verdict


@pytest.mark.parametrize(
    "right, response, value",
    [
        ("5", r"so \boxed{5}", 1),
        ("5", r"\boxed{7} no wait \boxed{5}", 1),  # the last box counts
        ("5", r"\boxed{5} no wait \boxed{7}", 0),
        ("5", "I think 7 or maybe 5", 0),  # nothing boxed
        ("5", r"\boxed{7 or maybe 5}", 0),
        ("5", r"\boxed{5, 7}", 0),
        ("5", r"\boxed{7 = 5}", 0),
        ("5", r"\boxed{x = 5}", 1),
        ("5", r"\boxed{}", 0),
        ("5", r"\boxed{5", 0),  # never closed
        ("5", r"\boxed{5} and then \boxed{7", 1),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        (r"$\frac{1}{2}$", r"\boxed{\frac{2}{4}}", 1),
        (r"we get \boxed{\sqrt{8}}", r"\boxed{2\sqrt{2}}", 1),
        ("1000", r"\boxed{1{,}000}", 1),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
        ("(1,2)", r"\boxed{(2,1)}", 0),
        ("B", r"\boxed{B}", 1),
        ("B", r"\boxed{A}", 0),
        (7, r"\boxed{7}", 1),
    ],
)
def test_math(right: Any, response: str, value: float) -> None:
    assert judge("math", {"answer": right}, response).value == value


@pytest.mark.parametrize(
    "response, value",
    [
        ("The answer is 5.", 1),
        ("The answer is: $5$\nbecause 2+3=5, or 7", 1),
        ("2 and 3 make 5", 1),
        ("5 then 7", 0),
        (r"5 but \boxed{7}", 0),
        ("none", 0),
    ],
)
def test_math_without_a_box_is_an_option(response: str, value: float) -> None:
    assert judge("math", {"answer": "5"}, response, require_boxed=False).value == value


def hangs_on_seven(prompt: Prompt, transcript: Transcript) -> Score:
    while "7" in transcript.response:
        pass
    return Math()(prompt, transcript)


def test_answer_that_hangs_the_verifier_is_ungraded() -> None:
    responses = ["5", "7", "5.0", "8"]

    async def run() -> list[Score]:
        config = GradingConfig(workers=1, deadline=1.5)
        async with GradingPool(
            PoolSettings(rewards={"t": (f"{__name__}:hangs_on_seven", {})}, config=config), Deadlines()
        ) as pool:
            prompt = ask({"answer": "5"})
            return await asyncio.gather(*(pool.score(prompt, answer(rf"\boxed{{{text}}}")) for text in responses))

    scores = asyncio.run(run())
    assert [score.value for score in scores] == [1.0, None, 1.0, 0.0]
    assert scores[1] == Score.ungraded("timed out after 1.5 s")


def test_a_payload_without_an_answer_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="has no 'answer'"):
        judge("math", {"solution": "5"}, r"\boxed{5}")
    with pytest.raises(ValueError, match="has no 'answer'"):
        judge("exact_match", None, "5")
    with pytest.raises(ValueError, match="cannot be read"):
        judge("math", {"answer": ""}, r"\boxed{5}")


@pytest.mark.parametrize(
    "text, found",
    [
        (r"\boxed{a}", "a"),
        (r"\boxed{\frac{1}{2}} x \boxed{ {b} }", "{b}"),
        (r"\boxed{a} \boxed{b", "a"),
        (r"\boxed a", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


def test_last_match() -> None:
    assert last_match(None, " a b\n") == "a b"
    assert last_match(r"-?\d+", "1 then -22 x") == "-22"
    assert last_match(r"<answer>(.*?)</answer>", "<answer>1</answer><answer> 2\n</answer>") == "2"
    assert last_match(r"\d+", "none") is None
    assert last_match(r"a|(b)", "a") is None


@pytest.mark.parametrize(
    "response, options, value",
    [
        (" 12,8:82\n", {}, 1),
        ("12,8:82 ok", {}, 0),
        ("x 12,8:82 ok", {"pattern": r"\S*:\S*"}, 1),
        ("nothing", {"pattern": r"\S*:\S*"}, 0),
        ("", {}, 0),
    ],
)
def test_exact_match(response: str, options: dict[str, Any], value: float) -> None:
    assert judge("exact_match", {"answer": "12,8:82"}, response, **options).value == value


def test_exact_match_by_key_and_case() -> None:
    assert judge("exact_match", {"capital": "Paris"}, "PARIS", answer="capital", ignore_case=True).value == 1
    assert judge("exact_match", {"capital": "Paris"}, "PARIS", answer="capital").value == 0


@pytest.mark.reasoning_gym
def test_reasoning_gym_asks_the_dataset() -> None:
    options = {"size": 5, "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    config = PromptsConfig(source="reasoning_gym", path="chain_sum", options=options)
    row = load_prompts(TaskConfig(name="t", prompts=config), config, 0)[0].payload
    right, number = row["answer"], r"-?\d+"
    assert judge("reasoning_gym", row, right).value == 1
    assert judge("reasoning_gym", row, f"It is {right}.", pattern=number).value == 1
    assert judge("reasoning_gym", row, "no number", pattern=number).value == 0
    partial = judge("reasoning_gym", row, f"{right}0")
    assert partial.value is not None and 0 < partial.value < 1
    strict = judge("reasoning_gym", row, f"{right}0", partial_credit=False)
    assert strict.value == 0 and strict.parts == {"partial": partial.value}


def test_environment_return_sums_the_turns() -> None:
    sampling = Sampling(max_tokens=1)
    turns = [Turn(start=0, stop=1, sampling=sampling, reward=reward) for reward in (0.25, None, 1.0)]
    reward = build_reward("environment_return", {})
    score = reward(ask(None), Transcript([], turns))
    assert isinstance(score, Score) and score.value == 1.25
    np.testing.assert_array_equal(score.turns, [0.25, 0.0, 1.0])
    silent = reward(ask(None), Transcript([], turns[1:2]))
    assert isinstance(silent, Score) and silent.status is ScoreStatus.UNGRADED


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (2, 2.0),
        (-0.5, -0.5),
        (True, 1.0),
        (" 0.25\n", 0.25),
        (Score.of(3.0), 3.0),
        (None, None),
        ("82 it is", None),
        ([1.0], None),
        (float("nan"), None),
        ("inf", None),
    ],
)
def test_agent_result_is_the_number_it_returned(result: Any, value: float | None) -> None:
    score = build_reward("agent_result", {})(ask(None), Transcript([], result=result))
    assert score.value == value and score.status is (ScoreStatus.UNGRADED if value is None else ScoreStatus.SCORED)


def test_agent_result_passes_a_verdict_on() -> None:
    dropped = Score(status=ScoreStatus.DROPPED, detail="no difference")
    assert build_reward("agent_result", {})(ask(None), Transcript([], result=dropped)) == dropped


def test_options_that_a_reward_does_not_take() -> None:
    with pytest.raises(ConfigError, match=r"reward 'math' is called with .*unexpected keyword argument 'boxed'"):
        build_reward("math", {"boxed": True})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'patern'"):
        build_reward("exact_match", {"patern": "x"})

"""Rewards with TRL's signature that a task names by their import path."""

import asyncio
import sys
import textwrap

import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError
from antiphon.core.objects import name_object
from antiphon.core.types import Message, Prompt, ScoreStatus
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import GradingConfig, TaskConfig
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.rewards import build_reward, is_asynchronous
from antiphon.tasks.rewards.trl import TrlReward, has_trl_signature
from tests.raising import raises_with

MODULE = """
    import functools


    def length(completions, scale=1.0, **kwargs):
        return [scale * len(completion) for completion in completions]


    def correct(prompts, completions, answer, scale=1.0, **columns):
        assert len(prompts) == len(completions) == len(answer) == 1
        return [scale * (completion == right) for completion, right in zip(completions, answer)]


    def chat(prompts, completions, **kwargs):
        (prompt,), (completion,) = prompts, completions
        assert prompt[-1] == {"role": "user", "content": "?"} and completion[0]["role"] == "assistant"
        return [float(completion[0]["content"] == "yes")]


    halved = functools.partial(length, scale=0.5)


    async def waits(completions, **kwargs):
        return [0.5 for _ in completions]


    def nothing(completions, **kwargs):
        return [None]


    def number(completions, **kwargs):
        return 1.0


    def ids(prompts, completions, completion_ids, **kwargs):
        return [0.0]


    def without_columns(completions):
        return [0.0]


    def neither(data_source, solution, truth):
        return 0.0


    class Weighted:
        def __init__(self, weight=1.0):
            self.weight = weight

        def __call__(self, completions, **kwargs):
            return [self.weight * len(completion) for completion in completions]
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "trl_style_rewards.py").write_text(textwrap.dedent(MODULE).lstrip())
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("trl_style_rewards", None)


def line_of(text):
    lines = textwrap.dedent(MODULE).lstrip().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def score(name, response="yes", options=None, **row):
    row = {"question": "?", "answer": "yes", **row}
    prompt = Prompt(id="1", task="task", messages=(Message("user", "?"),), payload=row)
    reward = build_reward(f"trl_style_rewards:{name}", options or {})
    return reward(prompt, Transcript([Message("user", "?"), Message("assistant", response)]))


def test_functions_and_classes_with_trls_signature_are_adapted():
    assert (score("length").value, score("length").parts) == (3.0, {"length": 3.0})
    assert (score("correct").value, score("correct", "no").value) == (1.0, 0.0)
    assert score("Weighted", options={"weight": 2.0}).value == 6.0
    assert (score("halved").value, score("halved").parts) == (1.5, {"length": 1.5})
    assert score("nothing").status is ScoreStatus.UNGRADED


def test_messages_are_given_where_the_data_has_messages():
    messages = [{"role": "user", "content": "?"}]
    assert score("chat", prompt=messages).value == 1.0
    assert score("chat", question=messages).value == 1.0  # the column has another name


def test_options_are_arguments_of_their_own():
    assert score("correct", options={"scale": 3.0}).value == 3.0
    assert score("correct", options={"scale": 3.0}, scale=7.0).value == 3.0  # rather than the column


def test_an_async_function_runs_in_a_grading_process():
    assert not is_asynchronous("trl_style_rewards:waits")
    assert score("waits").value == 0.5


@pytest.mark.parametrize(
    ("name", "named"), [("ids", "completion_ids"), ("without_columns", "columns"), ("neither", "completions")]
)
def test_what_cannot_be_adapted_is_refused_with_the_signature(name, named):
    with raises_with(ConfigError, match=named) as caught:
        build_reward(f"trl_style_rewards:{name}", {})
    assert "(prompts, completions, **columns) -> list[float]" in str(caught.value)


def test_an_option_that_is_not_taken_is_refused():
    with raises_with(ConfigError, match="nonsense"):
        build_reward("trl_style_rewards:without_columns", {"nonsense": 1})
    with raises_with(ConfigError, match="nonsense"):
        build_reward("trl_style_rewards:Weighted", {"nonsense": 1})


def test_a_router_grades_with_them_and_places_errors():
    def task(name, reward, **options):
        prompts = {"source": "unused:source"}
        return TaskConfig.model_validate(
            {"name": name, "prompts": prompts, "reward": f"trl_style_rewards:{reward}", "reward_options": options}
        )

    tasks = [task("async", "waits"), task("wrong", "number"), task("column", "correct", scale=0.5)]
    row = {"question": "?"}

    async def graded():
        async with RewardRouter(tasks, GradingConfig(workers=1), Deadlines()) as router:
            for task in tasks:
                prompt = Prompt(id="1", task=task.name, messages=(Message("user", "?"),), payload=row)
                yield await router.score(prompt, Transcript([Message("user", "?"), Message("assistant", "yes")]))

    async def collected():
        return [score async for score in graded()]

    waited, wrong, column = asyncio.run(collected())
    assert waited.value == 0.5
    assert (
        wrong.raised
        and wrong.detail.startswith("TypeError")
        and f"trl_style_rewards.py:{line_of('def number')})" in wrong.detail
    )
    assert (
        column.raised
        and "'answer'" in column.detail
        and f"trl_style_rewards.py:{line_of('def correct')})" in column.detail
    )


def test_an_adapted_reward_is_not_adapted_again():
    """The trainer with TRL's interface names an adapter, which a task resolves like any reward."""
    adapter = TrlReward([lambda completions, **columns: [1.0]])
    assert not has_trl_signature(adapter)
    name = name_object(adapter, "tasks.0.reward")
    prompt = Prompt(id="1", task="task", messages=(Message("user", "?"),), payload={})
    assert build_reward(name, {})(prompt, Transcript([Message("assistant", "yes")])).value == 1.0

"""What a judge behind an address is sent: each question once, at its rate, and no more than the budget pays."""

import asyncio
import inspect
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from antiphon.core.errors import BudgetError, ConfigError, RecordError
from antiphon.core.types import Message
from antiphon.tasks.base import UnreachableError
from antiphon.tasks.rewards.judge_options import REMOTE_OPTIONS, iterate_remote_judges, remote_judge_key, without_remote
from antiphon.tasks.rewards.remote_judge import RemoteJudge, RemoteJudges
from tests.raising import raises_with

SERVER = Path(__file__).with_name("judge_server.py")
PRICES = {"input_price": 2.0, "output_price": 100.0}  # of 1,000 and of 10 tokens: 0.003 a question
COST = 0.003


@pytest.fixture(scope="module")
def address():
    with subprocess.Popen([sys.executable, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        server.kill()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("antiphon.engines.chat_client.PAUSE", 0.02)


def question(text):
    """What the server does, and a mark for it to repeat."""
    return [Message("system", "VERDICT 0:"), Message("user", text)]


async def answers(judge, *texts):
    """Replies without their mark, asked all at once."""
    try:
        replies = await asyncio.gather(*(judge(question(text)) for text in texts), return_exceptions=True)
    finally:
        await judge.close()
    return [each if isinstance(each, Exception) else each.removeprefix("VERDICT 0: ") for each in replies]


def test_equal_questions_are_asked_once(address):
    async def run():
        judge = RemoteJudge(address, "m")
        first = await asyncio.gather(*(judge(question("once do:count")) for _ in range(5)))
        again = await judge(question("once do:count"))
        other = await judge(question("another do:count"))
        await judge.close()
        return {*first, again, other}, judge.usage

    replies, usage = asyncio.run(run())
    assert replies == {"VERDICT 0: 1"}
    assert (usage.requests, usage.cached) == (2, 5)


def test_without_a_cache_each_is_asked(address):
    judge = RemoteJudge(address, "m", cache=False)
    assert sorted(asyncio.run(answers(judge, *["always do:count"] * 4))) == ["1", "2", "3", "4"]
    assert (judge.usage.requests, judge.usage.cached) == (4, 0)


def test_a_question_that_failed_is_asked_again(address):
    async def run():
        judge = RemoteJudge(address, "m", attempts=1)
        for _ in range(2):
            with pytest.raises(UnreachableError):
                await judge(question("later do:recovers=503"))
        reply = await judge(question("later do:recovers=503"))
        await judge.close()
        return reply

    assert asyncio.run(run()) == "VERDICT 0: 7"


def test_who_gives_up_takes_no_reply_from_others(address):
    async def run():
        judge = RemoteJudge(address, "m")
        leaving, staying = (asyncio.create_task(judge(question("shared do:count"))) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        reply = await staying
        await judge.close()
        return reply, judge.usage.requests

    assert asyncio.run(run()) == ("VERDICT 0: 1", 1)


def test_tokens_and_retries_are_counted(address):
    judge = RemoteJudge(address, "m", **PRICES)
    asyncio.run(answers(judge, "a do:say=1", "b do:say=1", "c do:recovers=429", "d do:uncounted"))
    usage = judge.usage
    assert (usage.requests, usage.retries, usage.uncounted) == (6, 2, 1)
    assert usage.tokens == 3 * 1010 and usage.cost == pytest.approx(3 * COST)


def test_questions_keep_their_distance(address):
    """So many a minute cannot be asked in less time; more time does not tell anything."""
    judge = RemoteJudge(address, "m", requests_per_minute=600)
    began = time.monotonic()
    found = asyncio.run(answers(judge, *(f"{number} do:count" for number in range(6))))
    assert found == ["1"] * 6
    assert time.monotonic() - began >= 5 * 0.1


def test_a_budget_ends_all_judges_that_share_it(address, tmp_path):
    usage_file = tmp_path / "judges.json"
    first, second = ({"address": address, "model": model, **PRICES} for model in "ab")

    async def run():
        judges = RemoteJudges([first, second, dict(first)], budget=4.5 * COST)
        assert len(judges.judges) == 2
        ends = []
        for number in range(8):
            judge = judges.judges[remote_judge_key(second if number % 2 else first)]
            try:
                await judge(question(f"budget {number} do:say=1"))
                ends.append("reply")
            except BudgetError:
                ends.append("spent")
        with pytest.raises(BudgetError, match=r"cost 0\.015"):
            await judge(question("yet another do:say=1"))
        known = await judge(question("budget 1 do:say=1"))
        judges.write_usage(usage_file)
        await judges.close()
        return ends, known

    ends, known = asyncio.run(run())
    assert Counter(ends) == {"reply": 5, "spent": 3} and ends == sorted(ends), "the fifth passes it"
    assert known == "1", "what was asked before costs nothing"
    again = RemoteJudges([first], budget=5.5 * COST)
    again.read_usage(usage_file)
    (judge,) = again.judges.values()
    ends = asyncio.run(answers(judge, "more do:say=1")), asyncio.run(answers(judge, "still more do:say=1"))
    assert ends[0] == ["1"] and isinstance(ends[1][0], BudgetError), "a run that goes on has spent what it had"
    assert again.usage.requests == 6


def test_a_budget_needs_a_server_that_counts(address):
    async def run():
        judges = RemoteJudges([{"address": address, "model": "m", **PRICES}], budget=1.0)
        (judge,) = judges.judges.values()
        await judge(question("first do:uncounted"))
        with pytest.raises(BudgetError, match="how many tokens"):
            await judge(question("second do:say=1"))
        await judges.close()

    asyncio.run(run())


def test_a_damaged_record_of_the_cost_is_no_cost_of_0(tmp_path):
    judges, path = RemoteJudges(), tmp_path / "judges.json"
    judges.read_usage(path)
    judges.write_usage(path)
    assert not path.exists(), "a run without judges has none"
    for content in ("{", "[]", '{"cost": "much"}'):
        path.write_text(content)
        with raises_with(RecordError, path=str(path)):
            judges.read_usage(path)


@pytest.mark.parametrize("name", ["requests_per_minute", "input_price", "output_price"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "5", True])
def test_numbers_that_cannot_be_are_refused(name, value):
    with raises_with(ConfigError, key=f"reward_options.{name}"):
        RemoteJudge("http://127.0.0.1:1/v1", "m", **{name: value})


def test_a_judge_without_a_model_is_refused():
    with raises_with(ConfigError, key="reward_options"):
        RemoteJudges([{"address": "http://127.0.0.1:1/v1"}])


def test_options_of_the_model_are_those_that_it_takes():
    assert inspect.signature(RemoteJudge).parameters.keys() - {"check"} == REMOTE_OPTIONS
    assert without_remote({"address": "a", "scale": [0, 1], "cache": False}) == {"scale": [0, 1]}


def test_judges_are_found_in_rewards_and_their_parts():
    own = {"address": "a", "model": "m"}
    parts = {"one": {"reward": "judge", "options": {**own, "rubric": "r"}}, "two": {"reward": "math"}, "three": "no"}
    assert list(iterate_remote_judges("composed", {"parts": parts})) == [own]
    assert list(iterate_remote_judges("judge", {**own, "scale": [0, 1]})) == [own]
    assert not list(iterate_remote_judges("judge", {"rubric": "r"}))
    assert not list(iterate_remote_judges("mine:judge", own))
    assert remote_judge_key({**own, "rubric": "r"}) == remote_judge_key(own) != remote_judge_key({**own, "model": "n"})

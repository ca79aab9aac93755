"""Episodes on a server of OpenReward's own."""

import asyncio
import json
import logging
import threading
import time

import pytest

from antiphon.core.errors import StallError, UnsupportedError
from antiphon.core.types import Prompt
from antiphon.tasks.environments.adapters.openreward import OpenReward, _parse_events
from antiphon.tasks.environments.base import OptionError
from tests.raising import raises_with
from tests.servers import served

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own

starting, ended = [], []  # environments


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("openreward", reason="openreward pins other versions than constraints.txt")
    from openreward.environments import Environment, ImageBlock, Server, TextBlock, ToolOutput, terminal, tool
    from pydantic import BaseModel

    class Number(BaseModel):
        number: int

    class Text(BaseModel):
        text: str

    def said(text, **fields):
        return ToolOutput(blocks=[TextBlock(text=text)], **fields)

    class Count(Environment):
        """Reach the target, by steps of which each costs a little."""

        @classmethod
        def list_splits(cls):
            return ["train", "test", "none"]

        @classmethod
        def list_tasks(cls, split):
            return [{"target": target} for target in {"train": (3, 5, 7), "test": (9,), "none": ()}[split]]

        def setup(self):
            self.total = 0

        def teardown(self):
            ended.append(self)

        def get_prompt(self):
            return [TextBlock(text="Count."), TextBlock(text=f"Target: {self.task_spec['target']}")]

        @tool
        def add(self, given: Number) -> ToolOutput:
            """Add a number."""
            self.total += given.number
            reached = self.total == self.task_spec["target"]
            return said(f"total {self.total}", reward=1.0 if reached else -0.125, finished=reached)

        @tool
        def repeat(self, given: Text) -> ToolOutput:
            """Say it again."""
            return said(given.text)

        @tool
        def fail(self) -> ToolOutput:
            """Break."""
            raise OSError("the disk is full")

        @tool
        def wait(self) -> ToolOutput:
            """Take a while."""
            over.wait()
            return said("done")

        @tool
        def draw(self) -> ToolOutput:
            """Draw a picture."""
            return ToolOutput(blocks=[ImageBlock(data="", mimeType="image/png")])

    class Answer(Environment):
        """Say the word."""

        @classmethod
        def list_splits(cls):
            return ["train"]

        @classmethod
        def list_tasks(cls, split):
            return [{}]

        def get_prompt(self):
            return [TextBlock(text="Say yes.")]

        @tool
        @terminal
        def answer(self, given: Text) -> ToolOutput:
            """Judge the answer."""
            return said("", reward=float(given.text.strip() == "yes"), finished=True)

    class Slow(Answer):
        """Is not ready at once."""

        def setup(self):
            starting.append(self)
            time.sleep(0.2)

    over = threading.Event()
    logging.getLogger("openreward").setLevel(logging.CRITICAL)
    with served(Server([Count, Answer, Slow]).app) as url:
        yield url
        over.set()


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def episode(server, *actions, seed=0, prompt=None, **options):
    """Follow actions; returns the observation of the reset and the steps."""

    async def follow():
        world = OpenReward(prompt, url=server, **options)
        try:
            first, _ = await world.reset(seed)
            return first, [await world.step(action) for action in actions]
        finally:
            await world.close()

    return asyncio.run(follow())


def test_tools_of_the_server_give_rewards_until_they_end_the_episode(server):
    both = call("add", number=4) + call("add", number=-3)
    first, steps = episode(server, call("add", number=1), both + call("repeat", text="not reached"), call("repeat"))
    assert first.endswith("Count.\nTarget: 3") and '"name": "add"' in first and "Add a number." in first
    assert steps[0][:4] == ("<tool_response>\ntotal 1\n</tool_response>", -0.125, False, False)
    observation, reward, over, truncated, info = steps[1]
    assert reward == -0.25 and not over and not truncated and info["valid"]
    assert [line for line in observation.splitlines() if "<" not in line] == ["total 5", "total 2", "not reached"]
    assert "text" in steps[2][0] and not steps[2][4]["valid"]


def test_an_episode_that_is_over_calls_no_more(server):
    _, ((observation, reward, over, _, info),) = episode(server, call("add", number=3) + call("repeat", text="more"))
    assert (reward, over, info["success"], info["valid"]) == (1.0, True, True, True)
    assert observation == "<tool_response>\ntotal 3\n</tool_response>"


def test_an_episode_ends_its_session(server):
    ended.clear()
    episode(server)
    assert len(ended) == 1


@pytest.mark.parametrize(("seed", "target"), [(0, 3), (1, 5), (2, 7), (3, 3), (10**30 + 1, 7)])
def test_the_seed_draws_the_task(server, seed, target):
    assert episode(server, seed=seed, environment="count")[0].endswith(f"Target: {target}")


def test_a_prompt_may_name_the_task(server):
    prompt = Prompt(id="p", task="t", messages=(), payload={"index": 2})
    assert episode(server, seed=0, prompt=prompt)[0].endswith("Target: 7")
    assert episode(server, seed=5, split="test")[0].endswith("Target: 9")


def test_a_response_without_a_call_ends_the_episode(server):
    _, ((observation, reward, over, _, info),) = episode(server, "I give up")
    assert (observation, reward, over, info["success"]) == ("", 0.0, True, False)
    for response, expected in (("<think>no?</think>yes", 1.0), ("no", 0.0)):
        first, ((_, reward, over, _, info),) = episode(server, response, environment="answer")
        assert first == "Say yes."
        assert (reward, over, info["success"]) == (expected, True, bool(expected))


def test_a_server_that_is_starting_is_waited_for(server, monkeypatch):
    from openreward.environments import server as module

    monkeypatch.setattr(module, "_SETUP_WAIT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(module, "_SETUP_WAIT_RETRY_AFTER_S", 0.02)
    _, ((_, reward, *_),) = episode(server, "yes", environment="slow")
    assert reward == 1 and starting
    with raises_with(StallError, key="seconds"):
        episode(server, "yes", environment="slow", seconds=0.1)


def test_wrong_calls_are_told_and_may_cost(server):
    broken = '<tool_call>{"name": "add"'
    _, steps = episode(
        server, broken, call("nothing"), call("add", number="many"), call("add", number=3), format_penalty=0.5
    )
    assert [step[1] for step in steps] == [-0.5, 0.0, 0.0, 1.0]
    assert [step[4]["valid"] for step in steps] == [False, False, False, True]
    assert "there is no function nothing" in steps[1][0] and "number" in steps[2][0]


def test_an_episode_is_truncated_and_its_results_are_cut(server):
    _, steps = episode(server, call("repeat", text="x" * 50), call("add", number=1), turns=2, output=10)
    assert steps[0][0] == f"<tool_response>\n{'x' * 10}\n[40 characters more]\n</tool_response>"
    assert [step[2:4] for step in steps] == [(False, False), (False, True)] and not steps[1][4]["success"]


@pytest.mark.parametrize("text", ["x" * 9_000, "  two\r\n\r\ndata: lines\u2028 é ☃" * 300])
def test_results_come_as_they_are(server, text):
    assert episode(server, call("repeat", text=text), output=100_000)[1][0][0] == (
        f"<tool_response>\n{text}\n</tool_response>"
    )


def test_what_the_server_cannot_do_fails_the_attempt(server):
    with pytest.raises(RuntimeError, match="the disk is full"):
        episode(server, call("fail"))
    with raises_with(UnsupportedError, match="image"):
        episode(server, call("draw"))
    with raises_with(StallError, key="seconds"):
        episode(server, call("wait"), seconds=2.0)
    with pytest.raises(RuntimeError, match="does not answer"):
        episode("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "valid"),
    [
        ({"environment": "counts"}, ("count", "answer", "slow")),
        ({"split": "validation"}, ("train", "test", "none")),
        ({"split": "none"}, ()),
    ],
)
def test_names_that_the_server_has_not(server, options, valid):
    ((key, value),) = options.items()
    with raises_with(OptionError, environment="openreward", key=key, value=value, valid=valid):
        episode(server, **options)


def test_an_address_that_is_none():
    with raises_with(OptionError, environment="openreward", key="url", value="localhost:8080"):
        OpenReward(url="localhost:8080")


def test_events_are_read_as_the_standard_of_server_sent_events_says():
    stream = ": ping\r\n\r\nevent: chunk\r\ndata:  a\r\n\r\nevent:end\ndata: b\ndata:c\n\ndata: d\n\nevent: empty\n\n"
    assert list(_parse_events(stream)) == [("chunk", " a"), ("end", "b\nc"), ("message", "d")]

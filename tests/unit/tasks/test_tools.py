"""The world of tools: what it is made of, whole episodes, and real MCP servers."""

import asyncio
import json
import math
import operator
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError, DataError, StallError, WorkerDiedError
from antiphon.core.types import Message, Prompt, ToolCall
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.environments import environment_factory, required_options
from antiphon.tasks.environments.tools.calculator import calculator
from antiphon.tasks.environments.tools.environment import ToolUse
from antiphon.tasks.environments.tools.toolbox import Tool, Toolbox, ToolError
from antiphon.tasks.prompts import load_prompts
from antiphon.tasks.tool_calls import Hermes
from tests.raising import raises_with
from tests.unit.tasks.worlds import check_option_error

# --- the calculator --------------------------------------------------------------------------------------------------------

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
NUMBERS = st.integers(0, 99).map(lambda number: (str(number), Fraction(number)))


def _combined(inner):
    def combine(first, sign, second):
        if sign in {"/", "//", "%"} and second[1] == 0:
            return first
        return f"({first[0]} {sign} {second[0]})", Fraction(OPERATORS[sign](first[1], second[1]))

    return st.builds(combine, inner, st.sampled_from(list(OPERATORS)), inner)


@given(st.recursive(NUMBERS, _combined, max_leaves=8))
def test_it_computes_what_fractions_do(drawn):
    text, value = drawn
    said = calculator(text)
    assert Fraction(said) == value if value.denominator == 1 else math.isclose(Fraction(said), value, rel_tol=1e-11)


@given(st.lists(st.tuples(st.sampled_from(list(OPERATORS)), st.integers(1, 99)), min_size=1, max_size=6))
def test_operators_bind_as_they_do_in_python(terms):
    text = "7" + "".join(f" {sign} {number}" for sign, number in terms)
    exact = eval("Fraction(7)" + "".join(f" {sign} Fraction({number})" for sign, number in terms))
    assert math.isclose(Fraction(calculator(text)), exact, rel_tol=1e-11, abs_tol=1e-30)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-2 ** 2", "-4"),
        ("2 ** 3 ** 2", "512"),
        ("2 ** -1", "0.5"),
        ("2^10", "1024"),
        ("--3", "3"),
        ("2 * -3", "-6"),
        ("1.5 + .5", "2"),
        ("1/3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("1 / 10 ** 20", "1e-20"),
        ("0 ** 0", "1"),
        ("999999999999 * 999999999999", "999999999998000000000001"),
    ],
)
def test_results(text, value):
    assert calculator(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("1 // (2 - 2)", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("*".join(["9" * 99] * 3) + " ** 9", "too large"),
        ("4 ** 0.5", "whole number"),
        ("(1", "not closed"),
        ("1)", "no arithmetic"),
        ("1 2", "no arithmetic"),
        ("__import__('os')", "no arithmetic"),
        ("1 +", "no arithmetic"),
        ("(" * 60 + "1" + ")" * 60, "more than 40"),
        ("-" * 60 + "1", "more than 40"),
        ("1" * 401, "401 characters"),
    ],
)
def test_what_is_no_arithmetic_is_said(text, message):
    with pytest.raises(ToolError, match=message):
        calculator(text)


@given(st.text("0123456789.+-*/%()^ e", max_size=60) | st.text(max_size=20))
def test_it_answers_or_says_why_not(text):
    try:
        float(calculator(text))
    except ToolError as error:
        assert str(error)
    except OverflowError:  # of the test's own float
        pass


# --- tools -----------------------------------------------------------------------------------------------------------------


def book(guest: str, nights: int, price: float = 1.0, breakfast: bool = False, wishes: list[str] | None = None) -> dict:
    """Book a room."""
    return {"guest": guest, "bill": nights * price, "breakfast": breakfast, "wishes": wishes}


def test_a_function_becomes_a_tool():
    tool = Tool.of(book)
    assert (tool.name, tool.description) == ("book", "Book a room.")
    assert tool.parameters["required"] == ["guest", "nights"]
    assert tool.parameters["properties"]["wishes"] == {"type": "array", "items": {"type": "string"}}
    box = Toolbox([tool], Hermes)
    assert box.call(ToolCall("book", {"guest": "Ada", "nights": 2, "price": 3}))["bill"] == 6
    with raises_with(ConfigError, key="tools", value=["book", "book"]):
        Toolbox([tool, tool], Hermes)
    with raises_with(ConfigError, value="x"):
        Tool.of(lambda x: x)
    with raises_with(ConfigError, value=bytes):
        Tool.of(operator_of_bytes)


def operator_of_bytes(data: bytes) -> str:
    """Takes what JSON has not."""
    return data.hex()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bok", {}, "there is no function bok, only book"),
        ("book", {"guest": "Ada"}, "book needs the argument nights"),
        ("book", {"guest": "Ada", "nights": "2"}, 'nights is "2", expected integer'),
        ("book", {"guest": "Ada", "nights": True}, "nights is true, expected integer"),
        ("book", {"guest": "Ada", "nights": 2, "dog": 1}, "has no argument dog, only guest"),
    ],
)
def test_wrong_calls_are_told(name, arguments, message):
    with pytest.raises(ToolError, match=message):
        Toolbox([Tool.of(book)], Hermes).call(ToolCall(name, arguments))


# --- episodes --------------------------------------------------------------------------------------------------------------


def prompt_of(question="How many?", **payload):
    return Prompt(id="p", task="t", messages=(Message("user", question),), payload=payload)


def play(world, act):
    """Play to the end in an event loop of its own; the observations and the last step."""

    async def episode():
        said = [(await world.reset(0))[0]]
        while True:
            observation, reward, terminated, truncated, info = await world.step(act(world))
            said.append(observation)
            if terminated or truncated:
                return said, reward, info

    return asyncio.run(episode())


def saying(*texts):
    left = iter(texts)
    return lambda world: next(left)


def hermes(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ONLY = {"tools": ["calculator"]}


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("kind", ["arithmetic", "lookup"])
def test_the_expert_wins_and_has_read_what_it_says(kind, format):
    pytest.importorskip("bm25s")
    prompts = load(kind, limit=60)
    for prompt in prompts:
        world = environment_factory("tools", {"format": format})(prompt)
        said, reward, info = play(world, ToolUse.expert)
        assert reward == 1.0 and info["success"]
        assert prompt.payload["answer"] in said[-2]
        for call, seen in zip(prompt.payload["plan"][1:], said[1:], strict=False):
            if kind == "lookup":  # what is looked up was found, not known
                assert call["arguments"]["query"].split()[0] in seen


def load(kind, limit=60, split="train"):
    prompts = PromptsConfig(source="tools", split=split, limit=limit, options={"kinds": [kind]})
    return load_prompts(TaskConfig(name="t", prompts=prompts), prompts, 0)


def test_chance_wins_nothing():
    pytest.importorskip("bm25s")
    random = np.random.default_rng(0)
    prompts = load("arithmetic") + load("lookup")
    rewards = [play(ToolUse(each), lambda world: str(random.choice(world.actions())))[1] for each in prompts]
    assert np.mean(rewards) <= 0.02


def test_problems_differ_by_split_and_depend_on_the_seed():
    train, test = load("lookup", 300), load("lookup", 60, "test")
    assert train == load("lookup", 300)
    assert not {p.messages for p in train} & {p.messages for p in test}
    with raises_with(ConfigError, key="split", value="dev", valid=("train", "validation", "test")):
        load("lookup", split="dev")
    with raises_with(ConfigError, key="options.kinds", valid=("arithmetic", "lookup")):
        load("poetry")


def test_an_episode_by_hand():
    world = ToolUse(prompt_of(answer=12), **ONLY)
    said, reward, info = play(
        world,
        saying(
            "I work it out. " + hermes("calculator", expression="3 * 4") + hermes("calculator", expression="1/0"),
            hermes("calculator", text="3 * 4"),
            "<think>Is it 13?</think>So it is <answer> 12 </answer>",
        ),
    )
    assert '"name": "calculator"' in said[0] and "<tool_call>" in said[0]
    assert (
        said[1] == "<tool_response>\n12\n</tool_response>\n<tool_response>\nerror: division by zero\n</tool_response>"
    )
    assert "needs the argument expression" in said[2]
    assert reward == 1.0 and info["success"] and info["valid"]


def test_the_state_is_what_was_called():
    async def keys(*actions):
        world = ToolUse(prompt_of(answer=1), **ONLY)
        found = [(await world.reset(0))[1]]
        return found + [(await world.step(action))[4] for action in actions]

    one, two = hermes("calculator", expression="1"), hermes("calculator", expression="2")
    first = asyncio.run(keys(one, "<tool_call>", two))
    second = asyncio.run(keys("Let me see." + one, two))
    assert [each["valid"] for each in first] == [True, True, False, True]
    assert [each["effective"] for each in first] == [True, True, False, True]
    assert first[1]["state_key"] == first[2]["state_key"] == second[1]["state_key"]
    assert first[3]["state_key"] == second[2]["state_key"] != first[0]["state_key"]


def test_malformed_calls_cost_and_run_nothing():
    world = ToolUse(prompt_of(answer=1), format_penalty=0.5, turns=1, **ONLY)
    said, reward, info = play(world, saying(hermes("calculator", expression="1") + "<tool_call>oops</tool_call>"))
    assert reward == -0.5 and said[1].startswith("A call cannot be read")
    assert not info["valid"] and not info["effective"] and not info["success"]


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        ("42", "<answer>42</answer>", 1.0),
        (42, "42", 1.0),
        ("Dan  Cor", "<answer>dan cor\n</answer>", 1.0),
        ("42", "It is 42.", 0.0),
        ("42", "<answer>4</answer><answer>42</answer>", 1.0),
        ("42", "", 0.0),
        ("", "", 1.0),
    ],
)
def test_answers(answer, said, reward):
    assert play(ToolUse(prompt_of(answer=answer), **ONLY), saying(said))[1] == reward


def test_the_tasks_reward_may_judge_instead():
    _, reward, info = play(ToolUse(prompt_of(), answer=None, **ONLY), saying("forty-two"))
    assert reward == 0.0 and "success" not in info
    with raises_with(DataError, column="answer"):
        ToolUse(prompt_of(), **ONLY)


def test_documents_of_the_payload_are_searched():
    pytest.importorskip("bm25s")
    world = ToolUse(prompt_of(answer=1, documents=["The moon is near.", "The sun is far.", "Stars"]), tools=["search"])
    said, *_ = play(world, saying(hermes("search", query="how far is the sun?"), hermes("search", query="zebra"), "1"))
    assert said[1:3] == [
        "<tool_response>\n[1] The sun is far.\n</tool_response>",
        "<tool_response>\nnothing found\n</tool_response>",
    ]


def test_a_long_result_is_cut():
    said, *_ = play(
        ToolUse(prompt_of(answer=1), output=5, **ONLY), saying(hermes("calculator", expression="2**30"), "1")
    )
    assert said[1] == "<tool_response>\n10737\n[5 characters more]\n</tool_response>"


def test_a_tool_of_ones_own_and_that_it_breaks(monkeypatch):
    def halve(number: int) -> float:
        return 1 / number

    monkeypatch.setitem(sys.modules, "tools_of_mine", types.ModuleType("tools_of_mine"))
    sys.modules["tools_of_mine"].halve = halve
    mine = {"tools": ["tools_of_mine:halve"]}
    assert (
        play(ToolUse(prompt_of(answer=1), **mine), saying(hermes("halve", number=2), "1"))[0][1].splitlines()[1]
        == "0.5"
    )
    with pytest.raises(ZeroDivisionError):
        play(ToolUse(prompt_of(answer=1), **mine), saying(hermes("halve", number=0)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=30) | st.text(max_size=20).map("<tool_call>{}</tool_call>".format), max_size=5))
def test_any_text_is_taken(texts):
    world = ToolUse(prompt_of(answer=1), turns=9, **ONLY)
    play(world, saying(*texts, "1"))


def test_options_are_checked():
    assert "prompt" in required_options("tools")
    for options, value, nearest in [
        ({"tools": ["calculater"]}, "calculater", "calculator"),
        ({"format": "hermess"}, "hermess", "hermes"),
    ]:
        with raises_with(ConfigError, value=value, suggestions=(nearest,)):
            ToolUse(prompt_of(answer=1), **ONLY | options)
    check_option_error(lambda: ToolUse(prompt_of(answer=1), turns=0), "turns")
    world = ToolUse(prompt_of(answer=1), **ONLY)
    with pytest.raises(RuntimeError, match="reset"):
        asyncio.run(world.step("1"))


# --- MCP -------------------------------------------------------------------------------------------------------------------

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


@pytest.fixture
def mcp():
    pytest.importorskip("mcp")
    from antiphon.tasks.environments.tools.mcp import stop_servers

    yield {"mcp": SERVER, "tools": [], "seconds": 20.0}
    stop_servers()


def test_tools_of_a_server_that_stays_and_comes_back(mcp):
    def number_of_process():
        said, *_ = play(ToolUse(prompt_of(answer=1), **mcp), saying(hermes("process"), "1"))
        return int(said[1].splitlines()[1])

    world = ToolUse(prompt_of(answer=7), **mcp)
    said, reward, _ = play(world, saying(hermes("add", a=3, b=4) + hermes("fail") + hermes("add", a="x"), "7"))
    assert "Add two numbers." in said[0] and reward == 1.0
    assert said[1].splitlines()[1] == "7" and "error: " in said[1].splitlines()[4] and "needs the argument b" in said[1]
    first = number_of_process()
    assert first != os.getpid() and number_of_process() == first  # another event loop, the same server
    with pytest.raises(WorkerDiedError, match="gone"):
        play(ToolUse(prompt_of(answer=1), **mcp), saying(hermes("die")))
    assert number_of_process() != first
    with raises_with(StallError, key="seconds"):
        play(ToolUse(prompt_of(answer=1), **mcp | {"seconds": 0.2}), saying(hermes("hang")))


def test_a_call_that_takes_too_long_ends_no_other(mcp, tmp_path):
    begun, end = tmp_path / "begun", tmp_path / "end"
    os.mkfifo(begun)
    os.mkfifo(end)
    say = saying(hermes("rendezvous", begun=str(begun), end=str(end)), hermes("process"), "1")
    with ThreadPoolExecutor() as pool:
        patient = pool.submit(play, ToolUse(prompt_of(answer=1), **mcp), say)
        begun.read_text()
        with pytest.raises(StallError):
            play(ToolUse(prompt_of(answer=1), **mcp | {"seconds": 0.2}), saying(hermes("forever")))
        end.write_text("end")
        said, reward, _ = patient.result()
    first, second = (int(text.splitlines()[1]) for text in said[1:3])
    assert reward == 1.0 and first != second  # what follows is for the server that took its place


def test_a_server_that_does_not_start(mcp):
    with pytest.raises(WorkerDiedError, match="no-such-program is gone: FileNotFoundError"):
        play(ToolUse(prompt_of(answer=1), **mcp | {"mcp": ["no-such-program"]}), saying())
    with pytest.raises(WorkerDiedError, match=r"is gone: .*closed"):
        play(ToolUse(prompt_of(answer=1), **mcp | {"mcp": [sys.executable, "-c", ""]}), saying())


def test_a_server_that_hangs_while_it_starts(mcp, monkeypatch):
    from antiphon.tasks.environments.tools import mcp as mcp_tools

    monkeypatch.setattr(mcp_tools, "START_SECONDS", 0.5)
    hanging = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with raises_with(StallError, key=""):
        play(ToolUse(prompt_of(answer=1), **mcp | {"mcp": hanging}), saying())
    mcp_tools.stop_servers()
    assert not mcp_tools._RUNNING

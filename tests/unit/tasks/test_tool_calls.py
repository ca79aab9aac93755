"""Calls of tools as policies write them, whatever they write."""

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError
from antiphon.core.types import ToolCall
from antiphon.tasks.tool_calls import TOOL_FORMATS, Hermes, ParsedResponse, Qwen3Coder, strip_thinking
from tests.raising import raises_with

SCHEMAS = {"write": {"type": "object", "properties": {"text": {"type": "string"}, "times": {"type": "integer"}}}}
FORMATS = {name: TOOL_FORMATS.resolve(name)(SCHEMAS) for name in TOOL_FORMATS.known}

NAMES = st.text(string.ascii_letters + string.digits + "_-.", min_size=1, max_size=12)
TAGS = ("<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "<parameter=p>", "</parameter>")
PIECES = st.sampled_from(
    (*TAGS, "<think>", "</think>", '{"name": "f", "arguments": {', '"a": 1', "}}", "\n", '"', "[" * 3000)
)
TEXTS = st.text(max_size=20) | st.lists(PIECES | st.text(max_size=5), max_size=9).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=3)
CONTENTS = st.text(string.printable.replace("<", ""), max_size=30).map(str.strip)


@pytest.mark.parametrize("name", FORMATS)
@given(content=CONTENTS, calls=CALLS)
def test_what_is_written_is_read_again(name, content, calls):
    assert FORMATS[name].parse(FORMATS[name].render(content, calls)) == ParsedResponse(content, tuple(calls), ())


@pytest.mark.parametrize("name", FORMATS)
def test_the_id_of_a_call_is_not_written(name):
    call = ToolCall("add", {"a": 1})
    assert FORMATS[name].render("", [replace(call, id="c1")]) == FORMATS[name].render("", [call])


@given(st.text(string.printable.replace("<", ""), max_size=30) | st.integers().map(str))
def test_a_string_of_the_schema_is_written_as_it_is(text):
    call = ToolCall("write", {"text": text, "times": 3})
    written = FORMATS["qwen3_coder"].render("", [call])
    assert f"<parameter=text>\n{text}\n</parameter>" in written
    assert FORMATS["qwen3_coder"].parse(written).calls == (call,)


@pytest.mark.parametrize("name", FORMATS)
@given(TEXTS)
def test_anything_can_be_read(name, text):
    parsed = FORMATS[name].parse(text)
    whole = text.lstrip().startswith("<think>")
    assert parsed.problems or parsed.calls or parsed.content == text.strip() or whole
    assert all(isinstance(problem, str) and len(problem) < 300 for problem in parsed.problems)


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
CODER = """<tool_call>
<function=add>
<parameter=a>
1
</parameter>
<parameter=b>
[2]
</parameter>
</function>
</tool_call>"""
ADD = ToolCall("add", {"a": 1, "b": [2]})


@pytest.mark.parametrize(("name", "text"), [("hermes", HERMES), ("qwen3_coder", CODER)])
def test_the_forms_themselves(name, text):
    read = FORMATS[name]
    assert read.render("", [ADD]) == text
    assert read.render("I add.", [ADD, ADD]) == f"I add.\n{text}\n{text}"
    assert read.parse(f"Well.\n{text} and {text}\nDone.") == ParsedResponse("Well.\n and \nDone.", (ADD, ADD), ())
    assert read.parse("No call.") == ParsedResponse("No call.", (), ())
    assert read.parse(f"<think>Perhaps {text}?</think>\n4") == ParsedResponse(
        f"<think>Perhaps {text}?</think>\n4", (), ()
    )
    assert read.parse(f"<think>Never ends {text}").calls == ()
    assert read.parse(f"<think>Yes.</think>{text}").calls == (ADD,)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>", "Expecting value"),
        ("<tool_call>add(1, 2)</tool_call>", "Expecting value"),
        ('<tool_call>{"name": "add", "arguments": {}}', "</tool_call> does not follow"),
        ('<tool_call>{"name": "add", "arguments": {}} <tool_call>', "</tool_call> does not follow"),
        ('<tool_call>{"name": "add"}</tool_call>', 'it is no object with "name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'it is no object with "name"'),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', 'it is no object with "name"'),
        ('<tool_call>["add"]</tool_call>', 'it is no object with "name"'),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no number"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "1e999 is no number"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "limit"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "recursion"),
        ('{"name": "add", "arguments": {}}</tool_call>', "has to begin with <tool_call>"),
    ],
)
def test_problems_of_hermes(text, problem):
    content, calls, problems = Hermes({}).parse(f"So: {text}")
    assert calls == () and len(problems) == 1 and problem in problems[0] and content.startswith("So:")
    assert Hermes({}).parse(f"<tool_call>?</tool_call>{HERMES}").calls == (ADD,)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call><function=add></tool_call>", "has not the form"),
        ("<tool_call><function=add></function>", "has not the form"),
        ("<tool_call><function=></function></tool_call>", "has not the form"),
        ("<tool_call>\n{}\n</tool_call>", "has not the form"),
        ("<tool_call><function=add><parameter=a>1</function></tool_call>", "there is no <parameter=name>"),
        ("<tool_call><function=add>1</function></tool_call>", "there is no <parameter=name>"),
        ("<function=add></function>\n</tool_call>", "has to begin with <tool_call>"),
    ],
)
def test_problems_of_qwen3_coder(text, problem):
    _, calls, problems = Qwen3Coder({}).parse(text)
    assert calls == () and len(problems) == 1 and problem in problems[0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("piece", [" ", "\n", "<tool_call>", "<tool_call></tool_call>", "<parameter=a>", "</function>"])
def test_long_nonsense_is_read_in_no_time(name, piece):
    for begin in ("", "<tool_call>", "<tool_call><function=f>", "<tool_call><function=f><parameter=a>"):
        assert FORMATS[name].parse(begin + piece * 5_000).calls == ()


def test_values_without_a_schema():
    body = (
        "<tool_call><function=f><parameter=a>007</parameter><parameter=b>two\nlines</parameter></function></tool_call>"
    )
    assert Qwen3Coder({}).parse(body).calls == (ToolCall("f", {"a": "007", "b": "two\nlines"}),)


@pytest.mark.parametrize("name", FORMATS)
def test_what_cannot_be_written(name):
    for content, calls in [
        ("<tool_call>", [ADD]),
        (" spaces ", []),
        ("<think>no end", [ADD]),
        ("", [ToolCall("f", {"a": float("nan")})]),
    ]:
        with pytest.raises(ValueError, match=r"cannot be written|not JSON compliant"):
            FORMATS[name].render(content, calls)
    with pytest.raises(ValueError, match="cannot be written"):
        Qwen3Coder(SCHEMAS).render("", [ToolCall("write", {"text": "</parameter>"})])
    with pytest.raises(ValueError, match="cannot be written"):
        Qwen3Coder({}).render("", [ToolCall("a>b", {})])


def test_thoughts_and_names():
    assert strip_thinking("<think>4?</think>\n5") == "5"
    assert strip_thinking("4 <think>") == "4 <think>"
    assert strip_thinking("4?</think>\n5") == "5"  # the template opened it
    assert strip_thinking("4 <think>5</think>") == "4 <think>5</think>"
    assert strip_thinking(" " * 20_000 + "4" * 20_000) == " " * 20_000 + "4" * 20_000


@pytest.mark.parametrize("name", FORMATS)
def test_a_thought_that_the_template_opened_is_not_parsed(name):
    read, call = FORMATS[name], ToolCall("write", {"text": "</think>", "times": 3})
    assert read.parse(f"So </tool_call> it is.</think>{read.render('', [call])}") == ParsedResponse(
        "So </tool_call> it is.</think>", (call,), ()
    )
    assert read.parse(read.render("", [call])) == ParsedResponse("", (call,), ())
    with raises_with(ConfigError, value="herms", suggestions=("hermes",)):
        TOOL_FORMATS.check("herms")

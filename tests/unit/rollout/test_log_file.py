"""The log file through which model calls travel: its format, the program in the sandbox, and an existing client of it."""

import ast
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from antiphon.core.types import FinishReason
from antiphon.rollout.log_file import model_service
from antiphon.rollout.log_file.model_service import REQUEST, RESPONSE, LineSplitter, format_line, parse_line
from antiphon.tasks.config import AgentConfig
from tests.unit.rollout.gateway_support import TEMPLATES, Logger, make, model
from tests.unit.rollout.log_file_support import play_here

MARKERS = [*REQUEST, *RESPONSE, "LLM_REQUEST_CANCELLED", "SESSION_END"]

# --- the format --------------------------------------------------------------------------------------------------------

texts = st.lists(
    st.one_of(st.sampled_from([*MARKERS, "\\", '"', "\n", "\r", "\u2028", "\ud800", "L", "S"]), st.text())
).map("".join)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(texts, inner)),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.dictionaries(texts, values), st.integers(), st.sampled_from([REQUEST, RESPONSE]))
def test_a_line_is_read_as_rock_reads_it(body, index, markers):
    """ROCK's client splits a line at the first markers that it holds, and its service ends at any line with SESSION_END."""
    line = format_line(markers, body, {"index": index, "status": 200})
    assert "SESSION_END" not in line and line.isascii() and len(line.splitlines()) == 1
    before, meta = line.split(markers[1])
    assert json.loads(before.split(markers[0])[1]) == body and json.loads(meta)["index"] == index
    assert parse_line(markers, line) == (body, index, {"index": index, "status": 200})


@settings(max_examples=40)
@given(st.dictionaries(texts, values), st.integers(), st.sampled_from([REQUEST, RESPONSE]))
def test_a_line_of_rock_is_read_with_markers_inside(body, index, markers):
    """ROCK escapes no marker."""
    meta = {"timestamp": 1, "index": index}
    line = f"{markers[0]}{json.dumps(body, ensure_ascii=False)}{markers[1]}{json.dumps(meta)}"
    assert parse_line(markers, line) == (body, index, meta)


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ('LLM_REQUEST_START{"a": 1LLM_REQUEST_END{"index": 3}', (None, 3)),
        (f'LLM_REQUEST_START{"[" * 100_000}LLM_REQUEST_END{{"index": 3}}', (None, 3)),
        (f'LLM_REQUEST_START{{"seed": {"9" * 5000}}}LLM_REQUEST_END{{"index": 3}}', (None, 3)),
        ('LLM_REQUEST_START[]LLM_REQUEST_END{"index": 3}', ([], 3)),
        ('LLM_REQUEST_START{}LLM_REQUEST_END{"index": true}', None),
        ('LLM_REQUEST_START{}LLM_REQUEST_END{"index": "1"}', None),
        ('LLM_REQUEST_START{}LLM_REQUEST_END{"index": 1.0}', None),
        ("LLM_REQUEST_START{}LLM_REQUEST_END[1]", None),
        ("LLM_REQUEST_START{}LLM_REQUEST_END", None),
        ("LLM_REQUEST_START{}", None),
        ('LLM_REQUEST_START{}LLM_REQUEST_ENd{"index": 3}', None),
        (' LLM_REQUEST_START{}LLM_REQUEST_END{"index": 3}', None),
        ('LLM_RESPONSE_START{}LLM_RESPONSE_END{"index": 3}', None),
        ("", None),
    ],
)
def test_lines_that_an_agent_forges(line, read):
    found = parse_line(REQUEST, line)
    assert (found and found[:2]) == read


@given(st.binary(max_size=60).map(lambda content: content.replace(b"\r", b"\n")), st.lists(st.integers(0, 60)))
def test_lines_are_the_same_however_they_arrive(content, cuts):
    cuts = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    splitter = LineSplitter()
    lines = [
        line for a, b in zip(cuts, [*cuts[1:], len(content)], strict=True) for line in splitter.split(content[a:b])
    ]
    assert lines == content.decode("utf-8", "replace").split("\n")[:-1]


def test_a_line_that_is_too_long_is_dropped(monkeypatch):
    monkeypatch.setattr(model_service, "LONGEST_LINE", 4)
    splitter = LineSplitter()
    assert list(splitter.split(b"12345\n1234\n123")) == ["1234"]
    assert list(splitter.split(b"45")) == [] and list(splitter.split(b"6\nab\n")) == ["ab"]


# --- the program -------------------------------------------------------------------------------------------------------


def test_the_program_needs_an_old_python_and_nothing_else():
    tree = ast.parse(Path(model_service.__file__).read_text(encoding="ascii"), feature_version=(3, 8))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert len(imported) > 10 and {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def program(*arguments, **more):
    return subprocess.Popen([sys.executable, "-I", model_service.__file__, *map(str, arguments)], text=True, **more)


def test_reading_waits_for_what_is_appended(tmp_path):
    log = tmp_path / model_service.LOG
    log.write_bytes(b"before")
    (tmp_path / "new").write_text("line\n")
    holder = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", holder, tmp_path / model_service.LOCK], **pipes) as service:
        service.stdout.readline()
        with program("read", tmp_path, 6, 600, stdout=subprocess.PIPE) as reader:
            assert program("append", tmp_path, "new").wait() == 0
            assert json.loads(reader.stdout.read()) == {"begin": 6, "content": "bGluZQo=", "running": True}
        with program("read", tmp_path, 11, 0, stdout=subprocess.PIPE) as reader:
            assert json.loads(reader.stdout.read()) == {"begin": 11, "content": "", "running": True}
        service.communicate(b"\n")
    with program("read", tmp_path, 12, 600, stdout=subprocess.PIPE) as reader:  # ROCK's service has begun a new file
        assert json.loads(reader.stdout.read()) == {"begin": 0, "content": "YmVmb3JlbGluZQo=", "running": False}
    assert not (tmp_path / "new").exists()


# --- an existing client, and the configuration -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chat"), TEMPLATES["plain"])


CLIENT = """
import openai
client = openai.OpenAI(max_retries=0)
parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
hi = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
more = {"tools": tools, "logprobs": True, "stream_options": {"include_usage": True}}
chunks = list(client.chat.completions.create(**hi, **more, stream=True))
deltas = [choice for chunk in chunks for choice in chunk.choices]
call = next(delta.delta.tool_calls[0] for delta in deltas if delta.delta.tool_calls)
print(call.index, call.function.name, call.function.arguments, deltas[-1].finish_reason, chunks[-1].usage.completion_tokens)
print(sum(len(delta.logprobs.content) for delta in deltas if delta.logprobs))
with client.chat.completions.stream(**hi) as stream:
    print(stream.get_final_completion().choices[0].message.content)
for stream in (False, True):
    try:
        list(client.chat.completions.create(**hi, stream=stream))
    except openai.APIError as error:
        print(type(error).__name__, error.code)
"""


def test_the_sdk_of_openai_streams_from_a_log_file(renderer, tmp_path):
    pytest.importorskip("openai")
    (tmp_path / "client.py").write_text(CLIENT)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
    engine = Logger(renderer, (call, FinishReason.STOP), ("42", FinishReason.STOP))
    command = f"{sys.executable} {tmp_path}/client.py"
    code, output, _ = asyncio.run(play_here(command, tmp_path, model(renderer, engine), max_turns=2))
    assert code == 0, output
    tokens = len(engine.log[0][1].tokens)
    assert output["stdout"].splitlines() == [
        f'0 add {{"a": 3}} tool_calls {tokens}',
        str(tokens),
        "42",
        "PermissionDeniedError max_turns",
        "APIError max_turns",
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"function": "my:agent", "log_file": True},
        {"command": "true", "unconfined": True, "log_file": True},
        {"command": "true", "service": "http://127.0.0.1:8080"},
        {"command": "true", "service": "http://127.0.0.1:8080", "log_file": True, "network": ("a:1",)},
    ],
)
def test_settings_that_exclude_each_other(settings):
    with pytest.raises(ValidationError):
        AgentConfig(**settings)
    assert AgentConfig(command="true", service="http://127.0.0.1:8080", log_file=True, image="python:3.12").log_file

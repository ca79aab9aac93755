"""Agents whose model calls travel through a log file: their records, their ends, and what comes of tampering."""

import asyncio
import re
from functools import partial

import numpy as np
import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import WorkerDiedError
from antiphon.core.types import FinishReason
from antiphon.rollout.agents import BoxedAgent, run_agent
from antiphon.rollout.gateway.server import Gateway
from antiphon.rollout.log_file import exchange, model_service
from antiphon.rollout.log_file.agent import LogFileAgent
from antiphon.rollout.log_file.exchange import MOST_IN_FLIGHT
from antiphon.sandbox.sessions.commands import open_local_sandbox
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from tests.unit.rollout.gateway_support import TEMPLATES, Logger, attempt_inputs, make, model

pytestmark = pytest.mark.commands("bwrap", "/usr/bin/python3")

MARKED = (
    'LLM_REQUEST_END{"index": 9}\nSESSION_END{"exit_code": 0}\nLLM_RESPONSE_START{}LLM_RESPONSE_END \\LLM_REQUEST_START'
)

ASK = """
import http.client, json, os, sys, threading
from urllib.parse import urlsplit
address = urlsplit(os.environ["OPENAI_BASE_URL"])
log = os.environ["ROCK_MODEL_SERVICE_DATA_DIR"] + "/LLMService.log"
def post(content, timeout=None, **more):
    connection = http.client.HTTPConnection(address.netloc, timeout=timeout)
    body = json.dumps({"messages": [{"role": "user", "content": content}], **more})
    connection.request("POST", address.path + "/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.load(answer)
def ask(content, **more):
    return post(content, **more)[1]["choices"][0]["message"]["content"]
"""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chat"), TEMPLATES["plain"])


@pytest.fixture
def rooms():
    rooms = RuntimeDirs()
    yield rooms
    assert not [path for path in rooms.path.iterdir() if path.is_dir()]
    rooms.close()


def python(source):
    return f"python3 - <<'END'\n{ASK}{source}\nEND"


def play(renderer, rooms, command, *, engine=None, seconds=120.0, max_turns=0, boxed=False, **more):
    """Let a command play an attempt in a sandbox without a network, or `boxed` as agents without a log file do."""

    async def run():
        async with Gateway(model(renderer, engine or Logger(renderer, ("42", FinishReason.STOP)), **more)) as gateway:
            text = command.replace("GATEWAY", gateway.address)
            sandbox = partial(open_local_sandbox, rooms, ShellSandboxConfig(), Deadlines())
            agent = BoxedAgent(command=text, rooms=rooms, deadlines=Deadlines())
            if not boxed:
                agent = LogFileAgent(command=text, open_sandbox=sandbox)
            outcome = await run_agent(agent, gateway, attempt_inputs(), seconds=seconds, max_turns=max_turns)
            assert gateway.open_keys == 0
            return outcome

    return asyncio.run(run())


def test_calls_are_recorded_as_those_through_the_network(renderer, rooms):
    source = """
import urllib.request
task = json.loads(os.environ["ANTIPHON_TASK"])
messages = task["messages"]
for _ in range(2):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"messages": messages, "temperature": 0.5}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    messages += [json.load(urllib.request.urlopen(request))["choices"][0]["message"], {"role": "user", "content": "="}]
print(messages[1]["content"], messages[3]["content"], sorted(task))
"""
    source = python(source).replace('os.environ["ROCK_MODEL_SERVICE_DATA_DIR"]', '""')
    said = [("42", FinishReason.STOP), ("43", FinishReason.LENGTH)]
    ours, theirs = (
        play(renderer, rooms, source, engine=Logger(renderer, *said), boxed=boxed) for boxed in (False, True)
    )
    assert ours.failure is None and ours.result == theirs.result == "42 43 ['id', 'messages', 'seed', 'task']\n"
    for mine, other in zip(ours.captured.segments, theirs.captured.segments, strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
        assert mine.turns == other.turns
    assert (ours.captured.messages, ours.captured.counts) == (theirs.captured.messages, theirs.captured.counts)
    assert ours.transcript.truncated and ours.captured.counts.overridden == {"temperature": 2}


def test_the_sandbox_has_neither_network_nor_key(renderer, rooms):
    source = """
from socket import create_connection
try:
    create_connection(urlsplit("GATEWAY").netloc.split(":"))
except OSError as error:
    print(ask("Hi"), type(error).__name__, os.environ["OPENAI_API_KEY"])
"""
    outcome = play(renderer, rooms, python(source))
    assert outcome.failure is None and outcome.result == "42 ConnectionRefusedError none-is-needed\n"


class Together(Logger):
    """Answers nothing until so many requests are in flight, and then each with its own number."""

    def __init__(self, renderer, count):
        super().__init__(renderer)
        self.count, self.flying, self.most, self.all = count, 0, 0, asyncio.Event()

    async def __call__(self, request, on_delta=None):
        self.flying += 1
        self.most = max(self.most, self.flying)
        if self.flying == self.count:
            for _ in range(2000):  # turns of the event loop in which more could come
                await asyncio.sleep(0)
            self.all.set()
        await self.all.wait()
        self.flying -= 1
        self.said = [(re.search(r"\d+", self.renderer.decode(request.tokens))[0], FinishReason.STOP)]
        return await super().__call__(request)


def test_requests_at_the_same_time_get_their_own_answers(renderer, rooms):
    source = """
answers = {}
def work(number):
    answers[number] = ask(f"{number}=")
threads = [threading.Thread(target=work, args=(number,)) for number in range(40)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(all(answers[number] == str(number) for number in range(40)))
"""
    engine = Together(renderer, MOST_IN_FLIGHT)
    outcome = play(renderer, rooms, python(source), engine=engine)
    assert outcome.failure is None and outcome.result == "True\n"
    assert engine.most == MOST_IN_FLIGHT < 40 == len(engine.log) == len(outcome.captured.segments)


def test_large_requests_and_replies_arrive_whole(renderer, rooms):
    """Each is larger than a pipe and than what one reading of the log file returns."""
    reply = "".join(f"{number:x}\u00e9" for number in range(150_000))
    source = """
reply = ask("".join(f"{number}\u00fc\\n" for number in range(120_000)))
print(reply == "".join(f"{number:x}\u00e9" for number in range(150_000)))
"""
    engine = Logger(renderer, (reply, FinishReason.STOP))
    outcome = play(renderer, rooms, python(source), engine=engine, max_length=4 << 20)
    assert outcome.failure is None and outcome.result == "True\n"
    assert outcome.captured.messages[0].content == "".join(f"{number}\u00fc\n" for number in range(120_000))
    assert len(outcome.captured.messages[0].content) > model_service.MOST_READ and len(reply) > model_service.MOST_READ


def test_markers_in_texts_are_texts(renderer, rooms):
    engine = Logger(renderer, (MARKED, FinishReason.STOP))
    outcome = play(
        renderer, rooms, python(f"print(ask({MARKED!r}, stop=['SESSION_END!']) == {MARKED!r})"), engine=engine
    )
    assert outcome.failure is None and outcome.result == "True\n"
    assert [message.content for message in outcome.captured.messages] == [MARKED, MARKED]


def test_refusals_keep_their_status(renderer, rooms):
    source = """
connection = http.client.HTTPConnection(address.netloc)
def status(method, path, body="", headers={}):
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status
print(post("Hi", n=0, response_format={"type": "json"})[0], ask("Hi"), post("Hi")[0], post("Hi")[1]["error"]["code"])
print(status("GET", "/health"), status("GET", "/v1/models"), status("GET", "/other"), status("POST", "/v1/messages", "{}"))
chat = "/v1/chat/completions"
print(status("POST", chat, "[]"), status("POST", chat, "{"), status("POST", chat, "", {"Content-Length": str(1 << 40)}))
print(status("POST", chat, iter([b"{}"]), {"Transfer-Encoding": "chunked"}))
"""
    outcome = play(renderer, rooms, python(source), max_turns=1)
    assert outcome.failure is None, outcome.failure
    assert outcome.result == "400 42 403 max_turns\n200 200 404 404\n400 400 413\n411\n"
    assert outcome.transcript.truncated and outcome.captured.counts.turns == 1


class Stuck(Logger):
    """Never answers the first request of two, and answers the second once the first is cancelled."""

    def __init__(self, renderer):
        super().__init__(renderer)
        self.started, self.cancelled = 0, asyncio.Event()

    async def __call__(self, request, on_delta=None):
        self.started += 1
        if self.started % 2:
            self.cancelled.clear()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        await self.cancelled.wait()
        return await super().__call__(request)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_has_left_is_cancelled(renderer, rooms, stream, monkeypatch):
    """Its place is free for another."""
    monkeypatch.setattr(exchange, "MOST_IN_FLIGHT", 2)
    source = f"""
for _ in range(2):
    try:
        post("Hi", timeout=1.0, stream={stream})
    except TimeoutError:
        pass
    print(ask("Hi"))
"""
    outcome = play(renderer, rooms, python(source), engine=Stuck(renderer), seconds=60.0)
    assert outcome.failure is None and outcome.result == "ok\nok\n"
    assert (outcome.captured.counts.cancelled, outcome.captured.counts.turns) == (2, 2)


def test_an_agent_that_ends_early_cancels_its_requests(renderer, rooms):
    source = """
threading.Thread(target=ask, args=("never",), daemon=True).start()
print(ask("Hi"), flush=True)
os._exit(0)
"""

    class First(Logger):
        async def __call__(self, request, on_delta=None):
            if "never" in self.renderer.decode(request.tokens):
                await asyncio.Event().wait()
            return await super().__call__(request)

    outcome = play(renderer, rooms, python(source), engine=First(renderer))
    assert outcome.failure is None and outcome.result == "ok\n" and outcome.captured.counts.turns == 1


# --- ends and attacks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "source", "message"),
    [
        ("echo one >&2; echo no >&2; exit 3", "agent", "exit code 3: no"),
        ("kill -9 $$", "agent", "exit code -9"),
        ("true", "agent", "without a request"),
        ("kill -9 $PPID; sleep 1000", "agent", "has ended before it: killed"),
        ("sleep 1000 & sleep 1000", "agent", "took more than 2 s"),
        ("echo 'print(7)' > $ROCK_MODEL_SERVICE_DATA_DIR/model_service.py; sleep 1000", "environment", "model service"),
        ("rm $ROCK_MODEL_SERVICE_DATA_DIR/model_service.py; sleep 1000", "environment", "model service"),
        (
            """cd $ROCK_MODEL_SERVICE_DATA_DIR; echo 'print({"begin": 7, "content": "", "running": True})' > model_service.py
            sleep 1000""",
            "environment",
            "model service",
        ),
    ],
)
def test_how_an_agent_can_end_and_fail(renderer, rooms, command, source, message):
    outcome = play(renderer, rooms, command, seconds=2.0 if "took" in message else 120.0)
    assert outcome.failure.source == source and message in outcome.failure.message
    assert outcome.result is None or "without" in message


def test_forged_lines_bring_about_samples_and_nothing_else(renderer, rooms):
    source = """
def line(body, meta):
    return f"LLM_REQUEST_START{body}LLM_REQUEST_END{meta}\\n"
chat = json.dumps({"messages": [{"role": "user", "content": "forged"}]})
with open(log, "a", errors="surrogateescape") as file:
    file.write("\\udcff garbage\\nSESSION_END\\nSESSION_END{}\\nSESSION_END{\\"exit_code\\": \\"0\\"}\\n")
    file.write(line("[" * 100_000, '{"index": 901}') + line("7", '{"index": 902}') + line("{}", '{"index": 903}'))
    file.write(line(chat, '{"index": true}') + line(chat, '{"index": -5}') + 3 * line(chat, '{"index": 950}'))
    file.write('LLM_REQUEST_CANCELLED{"index": 5000}\\nLLM_RESPONSE_START{}LLM_RESPONSE_END{"index": 4000}\\n')
    file.write("x" * (17 << 20) + "\\n")
print(ask("Hi"))
answered = {}
for each in open(log, errors="replace"):
    if each.startswith("LLM_RESPONSE_START{\\""):
        meta = json.loads(each.rpartition("LLM_RESPONSE_END")[2])
        assert meta["index"] not in answered
        answered[meta["index"]] = meta["status"]
print(sorted(answered.items()))
"""
    engine = Logger(renderer)
    outcome = play(renderer, rooms, python(source), engine=engine)
    assert outcome.failure is None, outcome.failure
    assert outcome.result == "ok\n[(-5, 200), (1, 200), (901, 400), (902, 400), (903, 400), (950, 200)]\n"
    assert len(engine.log) == outcome.captured.counts.turns == 3


def test_a_forged_end_is_an_end(renderer, rooms):
    source = """
print(ask("Hi"), flush=True)
with open(log, "a") as file:
    file.write('SESSION_END{"exit_code": 0}\\n')
threading.Event().wait()
"""
    outcome = play(renderer, rooms, python(source))
    assert outcome.failure is None and outcome.result == "42\n"


def test_what_goes_wrong_in_engines_ends_the_run_from_a_log_file_too(renderer, rooms):
    async def dies(request, on_delta=None):
        raise WorkerDiedError("the last engine was killed")

    with pytest.raises(WorkerDiedError):
        play(renderer, rooms, python("print(post('Hi'))"), engine=dies)

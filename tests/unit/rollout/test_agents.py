"""Agents that know nothing of us: functions, commands and boxes; their ends, and what goes wrong in them."""

import asyncio
import json
import shutil
import sys
import threading
import urllib.error
import urllib.request
from queue import Queue

import httpx
import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, WorkerDiedError
from antiphon.core.types import AttemptId, FinishReason, Message, Prompt
from antiphon.rollout.agents import (
    Access,
    AgentError,
    BoxedAgent,
    FunctionAgent,
    UnconfinedAgent,
    command_agent,
    run_agent,
)
from antiphon.rollout.attempt import AttemptInputs
from antiphon.rollout.gateway.server import Gateway
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from tests.unit.rollout.gateway_support import PROMPT, SAMPLING, STARTED, TEMPLATES, Logger, make, model

ASK = """
import json, os, sys, urllib.request
task = json.loads(os.environ["ANTIPHON_TASK"])
body = json.dumps({"model": "m", "messages": task["messages"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(asked))
print(answer["choices"][0]["message"]["content"], sorted(task), os.environ.get("SECRET"))
"""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chat"), TEMPLATES["plain"])


def played(renderer, agent, *, seconds=60.0, engine=None, max_turns=0, **more):
    async def run():
        async with Gateway(model(renderer, engine or Logger(renderer, ("42", FinishReason.STOP)), **more)) as gateway:
            limits = {"seconds": seconds, "max_turns": max_turns}
            outcome = await run_agent(
                agent,
                gateway,
                AttemptInputs(prompt=PROMPT, attempt=AttemptId(0, 0, 0), started=STARTED, sampling=SAMPLING),
                **limits,
            )
            assert gateway.open_keys == 0
            return outcome

    return asyncio.run(run())


def ask(base_url, key, prompt):
    body = json.dumps({"messages": [{"role": m.role, "content": m.content} for m in prompt.messages]}).encode()
    asked = urllib.request.Request(f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


async def ask_async(base_url, key, prompt):
    messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
    async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=None) as client:
        answer = await client.post(f"{base_url}/chat/completions", json={"messages": messages})
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("function", [ask, ask_async])
def test_a_function(renderer, function):
    outcome = played(renderer, FunctionAgent(function))
    assert outcome.result == "42" and outcome.failure is None
    (segment,) = outcome.captured.segments
    assert renderer.decode(segment.tokens[segment.loss_mask]) == "42"
    assert outcome.transcript.response == "42" and not outcome.transcript.truncated


def talker(turns, more=()):
    """An agent that goes on with its conversation for so many turns, or until it is refused, then asks `more`."""

    async def talk(base_url, key, prompt):
        async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=None) as client:
            messages = [{"role": "user", "content": "Hi"}]
            for _ in range(turns):
                answer = await client.post(f"{base_url}/chat/completions", json={"messages": messages})
                if answer.status_code != 200:
                    break
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "o" * 30}]
            for content in more:
                body = {"messages": [{"role": "user", "content": content}]}
                await client.post(f"{base_url}/chat/completions", json=body)

    return FunctionAgent(talk)


@pytest.mark.parametrize(
    ("agent", "limits", "truncated"),
    [
        (talker(2), {}, False),
        (talker(20), {"max_length": 200}, True),
        (talker(20, more=["In short?"]), {"max_length": 200}, False),
        (talker(3), {"max_turns": 2}, True),
        (talker(2), {"max_turns": 2}, False),
    ],
    ids=["its end", "length", "goes on in short", "turns", "as many turns as it may"],
)
def test_conversation_that_a_limit_ends_is_truncated(renderer, agent, limits, truncated):
    outcome = played(renderer, agent, **limits)
    assert outcome.failure is None, outcome.failure
    assert outcome.transcript.truncated is truncated
    assert all(len(segment.tokens) <= limits.get("max_length", 4096) for segment in outcome.captured.segments)
    assert all(segment.loss_mask[-1] for segment in outcome.captured.segments)


def test_reply_at_its_limit_makes_a_conversation_truncated(renderer):
    engine = Logger(renderer, ("4", FinishReason.STOP), ("2", FinishReason.LENGTH))
    assert played(renderer, talker(2), engine=engine).transcript.truncated


def test_a_command_gets_the_task_and_nothing_that_is_secret(renderer, monkeypatch):
    monkeypatch.setenv("SECRET", "token")
    with pytest.raises(ConfigError, match="unconfined"):
        command_agent("true")
    outcome = played(renderer, command_agent(f"{sys.executable} -c '{ASK}'", unconfined=True))
    assert outcome.failure is None, outcome.failure
    assert outcome.result == "42 ['id', 'messages', 'seed', 'task'] None\n"
    assert outcome.captured.counts.turns == 1


def test_task_too_long_for_a_variable_is_a_failure():
    message = Message("user", "<image>", images=(bytes(100_000),))
    with pytest.raises(AgentError):
        Access("http://127.0.0.1:9", "key").environment(Prompt(id="p", task="t", messages=(message,)))


@pytest.mark.commands("bwrap")
def test_sandboxed_command_reaches_only_the_gateway(renderer):
    rooms = RuntimeDirs()
    try:
        elsewhere = (
            "; curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:9/ || true" if shutil.which("curl") else ""
        )
        agent = BoxedAgent(command=f"python3 -c '{ASK}'{elsewhere}", rooms=rooms, deadlines=Deadlines())
        outcome = played(renderer, agent)
        assert outcome.failure is None, outcome.failure
        assert outcome.result.startswith("42 [") and (not elsewhere or outcome.result.endswith("403"))
        crashed = played(renderer, BoxedAgent(command="echo no >&2; exit 3", rooms=rooms, deadlines=Deadlines()))
        assert crashed.failure.source == "agent" and "exit code 3: no" in crashed.failure.message
        late = played(renderer, BoxedAgent(command="sleep 1000", rooms=rooms, deadlines=Deadlines()), seconds=1.0)
        assert late.failure.source == "agent" and "took more than 1 s" in late.failure.message
        assert not [path for path in rooms.path.iterdir() if path.is_dir()]
    finally:
        rooms.close()


def crash(base_url, key, prompt):
    raise KeyError("no such file")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (FunctionAgent(crash), "KeyError: 'no such file'"),
        (FunctionAgent(lambda *_: None), "without a request"),
        (UnconfinedAgent(command="echo why >&2; exit 7"), "exit code 7: why"),
        (UnconfinedAgent(command="sleep 1000 & sleep 1000"), "took more than 0.3 s"),
    ],
)
def test_what_goes_wrong_in_an_agent_is_a_failure_of_it(renderer, agent, message):
    outcome = played(renderer, agent, seconds=0.3 if "took" in message else 60.0)
    assert outcome.failure.source == "agent" and message in outcome.failure.message
    assert outcome.result is None or "asked" in message


def test_a_function_that_is_late_goes_on_without_a_key(renderer):
    go, ended = threading.Event(), Queue()

    def late(base_url, key, prompt):
        go.wait()
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(base_url, key, prompt)
        refused.value.close()
        ended.put(refused.value.code)

    async def run():
        async with Gateway(model(renderer, Logger(renderer))) as gateway:
            attempt = AttemptId(0, 0, 0)
            outcome = await run_agent(
                FunctionAgent(late),
                gateway,
                AttemptInputs(prompt=PROMPT, attempt=attempt, started=STARTED, sampling=SAMPLING),
                seconds=0.3,
            )
            go.set()
            return outcome, await asyncio.to_thread(ended.get)

    outcome, code = asyncio.run(run())
    assert outcome.failure.message == "took more than 0.3 s" and code == 401
    assert outcome.captured.counts.turns == 0


def test_what_goes_wrong_in_engines_ends_the_run(renderer):
    async def dies(request, on_delta=None):
        raise WorkerDiedError("the last engine was killed")

    with pytest.raises(WorkerDiedError):
        played(renderer, FunctionAgent(ask_async), engine=dies)

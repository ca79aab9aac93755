"""The server over real connections: both protocols, keys, clients that leave, and a thousand attempts at once."""

import asyncio
import gc
import json
import re
import resource
from dataclasses import replace

import httpx
import numpy as np
import pytest

from antiphon.core.errors import REFUSALS, RequestError, UnsupportedError, WorkerDiedError
from antiphon.core.types import AttemptId, FinishReason
from antiphon.engines.deltas import Delta
from antiphon.rollout.attempt import AttemptInputs
from antiphon.rollout.gateway import responses
from antiphon.rollout.gateway.attempt_session import AttemptSession
from antiphon.rollout.gateway.server import Gateway
from tests.unit.rollout.gateway_support import (
    PROMPT,
    SAMPLING,
    STARTED,
    TEMPLATES,
    Logger,
    attempt_inputs,
    make,
    model,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
MESSAGES = CHAT | {"max_tokens": 9}
OPENAI = CHAT | {"tools": [{"type": "function", "function": FUNCTION}]}
ANTHROPIC = MESSAGES | {"tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chat"), TEMPLATES["plain"])


def open_attempt(gateway, number=0):
    return gateway.open_attempt(
        AttemptInputs(prompt=PROMPT, attempt=AttemptId(0, number, 0), started=STARTED, sampling=SAMPLING)
    )


def serving(renderer, test, engine=None):
    """Run `test(gateway, client, key, engine)`."""
    engine = engine or Logger(renderer)

    async def run():
        async with (
            Gateway(model(renderer, engine)) as gateway,
            httpx.AsyncClient(base_url=gateway.address, timeout=None) as client,
        ):
            key = open_attempt(gateway)
            client.headers["authorization"] = f"Bearer {key}"
            return await test(gateway, client, key, engine)

    return asyncio.run(run())


def events(text):
    """The data of server-sent events."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]


def test_openai_whole_and_streamed(renderer):
    async def test(gateway, client, key, engine):
        engine.said += [("I look. " + CALL, FinishReason.STOP)] * 2
        whole = (await client.post("/v1/chat/completions", json=OPENAI | {"logprobs": True})).json()
        more = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
        streamed = events((await client.post("/v1/chat/completions", json=OPENAI | more)).text)
        return whole, streamed, engine.log

    whole, streamed, log = serving(renderer, test)
    message = whole["choices"][0]["message"]
    assert message["content"] == "I look." and whole["choices"][0]["finish_reason"] == "tool_calls"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": "é"}
    told = [item["logprob"] for item in whole["choices"][0]["logprobs"]["content"]]
    assert told == log[0][1].logprobs.tolist()
    assert whole["usage"]["completion_tokens"] == len(log[0][1].tokens)

    *chunks, usage = streamed
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert call["index"] == 0 and json.loads(call["function"]["arguments"]) == {"a": "é"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens"] == len(log[1][0].tokens)


def test_anthropic_whole_and_streamed(renderer):
    async def test(gateway, client, key, engine):
        engine.said += [("I look. " + CALL, FinishReason.STOP)] * 2 + [("a~b", FinishReason.STOP)]
        whole = (await client.post("/v1/messages", json=ANTHROPIC)).json()
        streamed = events((await client.post("/v1/messages", json=ANTHROPIC | {"stream": True})).text)
        stopped = (await client.post("/v1/messages", json=MESSAGES | {"stop_sequences": ["~"]})).json()
        counted = (await client.post("/v1/messages/count_tokens", json=ANTHROPIC)).json()
        return whole, streamed, stopped, counted, engine.log

    whole, streamed, stopped, counted, log = serving(renderer, test)
    text, call = whole["content"]
    assert text == {"type": "text", "text": "I look."} and call["input"] == {"a": "é"}
    assert whole["stop_reason"] == "tool_use" and whole["usage"]["input_tokens"] == counted["input_tokens"]
    assert counted["input_tokens"] == len(log[0][0].tokens)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "~")
    assert stopped["content"] == [{"type": "text", "text": "a"}]

    kinds = [event["type"] for event in streamed]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert streamed[2]["delta"]["text"] == "I look."
    assert json.loads(streamed[5]["delta"]["partial_json"]) == {"a": "é"}
    assert streamed[7]["delta"]["stop_reason"] == "tool_use"


def test_who_may_ask(renderer):
    async def test(gateway, client, key, engine):
        path, codes = "/v1/chat/completions", []
        for headers in (
            {"authorization": f"Bearer {key}"},
            {"authorization": "", "x-api-key": key},
            {"authorization": "Bearer wrong"},
            {"authorization": ""},
        ):
            codes.append((await client.post(path, json=CHAT, headers=headers)).status_code)
        in_path = await client.post(f"/attempts/{key}{path}", json=CHAT, headers={"authorization": ""})
        models = await client.get("/v1/models")
        captured = gateway.close_attempt(key)
        ended = await client.post(path, json=CHAT), await client.post("/v1/messages", json=MESSAGES)
        return codes, in_path.status_code, models.json(), captured, ended

    codes, in_path, models, captured, ended = serving(renderer, test)
    assert codes == [200, 200, 401, 401] and in_path == 200
    assert models["data"][0]["id"] == "policy"
    assert captured.counts.turns == 3 and captured.counts.retries == 2
    assert [answer.status_code for answer in ended] == [401, 401]
    assert ended[0].json()["error"]["code"] == "invalid_api_key"
    assert ended[1].json()["error"]["type"] == "authentication_error"


DEEP = '{"a": ' + "[" * 500 + "]" * 500 + "}"
BAD = {
    "no JSON": b"{",
    "no object": b"[]",
    "half a surrogate": rb'{"messages": [{"role": "user", "content": "\ud83d"}]}',
    "no messages": {},
    "messages.*no list": {"messages": "Hi"},
    "role.*'judge'": {"messages": [{"role": "judge", "content": ""}]},
    "image_url": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "the assistant's": {"messages": [{"role": "assistant", "content": "I"}]},
    "temperature": CHAT | {"temperature": 3},
    "max_tokens": CHAT | {"max_tokens": 0},
    "stop": CHAT | {"stop": 1},
    "logit_bias": CHAT | {"logit_bias": {"1": 1}},
    "response_format": CHAT | {"response_format": {"type": "json_object"}},
    "among the tools": CHAT | {"tool_choice": {"type": "function", "function": {"name": "g"}}},
    "arguments": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            *CHAT["messages"],
        ]
    },
    "nested": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]},
            *CHAT["messages"],
        ]
    },
}


def test_what_cannot_be_answered_is_said_to_be_so(renderer):
    async def test(gateway, client, key, engine):
        found = {}
        for what, body in BAD.items():
            content = body if isinstance(body, bytes) else json.dumps(body)
            found[what] = await client.post("/v1/chat/completions", content=content)
        kind = {"type": "bash_20250124", "name": "bash"}
        found["only the client's own"] = await client.post("/v1/messages", json=MESSAGES | {"tools": [kind]})
        return found, gateway.close_attempt(key), engine.log

    found, captured, log = serving(renderer, test)
    for what, answer in found.items():
        assert answer.status_code == 400, (what, answer.text)
        assert re.search(what, answer.json()["error"]["message"]) or what.startswith(("no ", "half")), answer.text
    assert captured.counts.turns == 0 and log == []


@pytest.mark.parametrize(("error", "status"), [(RequestError, 400), (UnsupportedError, 400), (WorkerDiedError, 503)])
def test_refusal_of_an_engine_is_a_400_to_guests(renderer, error, status):
    async def refuses(request, on_delta=None):
        raise error("no")

    async def test(gateway, client, key, engine):
        gateway.issue_key("sesame")
        whole = await client.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer sesame"})
        more = MESSAGES | {"stream": True}
        streamed = await client.post("/v1/messages", json=more, headers={"authorization": "Bearer sesame"})
        return whole, events(streamed.text)[-1]["error"]["type"]

    whole, streamed = serving(renderer, test, refuses)
    assert whole.status_code == status
    assert streamed == ("invalid_request_error" if status == 400 else "overloaded_error")


@pytest.mark.parametrize("error", REFUSALS)
def test_refused_request_of_an_agent_is_no_error_of_engines(renderer, error):
    async def refuses(request, on_delta=None):
        raise error("no")

    async def test(gateway, client, key, engine):
        answer = await client.post("/v1/chat/completions", json=CHAT)
        return answer.status_code, gateway.close_attempt(key)

    status, captured = serving(renderer, test, refuses)
    assert status == 400 and captured.error is None and captured.segments == ()


def test_guests_never_share_the_id_of_a_request(renderer):
    async def test(gateway, client, key, engine):
        for token in ("one", "two"):
            gateway.issue_key(token)
            await client.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {token}"})
        return {request.id for request, _ in engine.log}

    assert len(serving(renderer, test)) == 2


class Waiting(Logger):
    """An engine that waits until it is told, and knows how many have stopped waiting."""

    def __init__(self, renderer):
        super().__init__(renderer)
        self.asked, self.go, self.left = asyncio.Queue(), asyncio.Event(), asyncio.Queue()

    async def __call__(self, request, on_delta=None):
        self.asked.put_nowait(request)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.left.put_nowait(request)
            raise
        return await super().__call__(request, on_delta)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_not_answered_and_its_retry_is(renderer, stream):
    async def test(gateway, client, key, engine):
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": stream}))
        await engine.asked.get()
        asking.cancel()
        await engine.left.get()
        again = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await engine.asked.get()
        engine.go.set()
        assert (await again).status_code == 200
        return gateway.close_attempt(key), engine.log

    captured, log = serving(renderer, test, Waiting(renderer))
    counts = captured.counts
    assert (counts.turns, counts.cancelled, counts.retries, len(log)) == (1, 1, 0, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_in_flight_when_an_attempt_ends_is_cancelled(renderer, stream):
    async def test(gateway, client, key, engine):
        asking = asyncio.create_task(client.post("/v1/messages", json=MESSAGES | {"stream": stream}))
        await engine.asked.get()
        captured = gateway.close_attempt(key)
        await engine.left.get()
        return captured, await asking

    captured, answer = serving(renderer, test, Waiting(renderer))
    assert captured.counts.cancelled == 0 and captured.segments == ()
    error = events(answer.text)[-1]["error"] if stream else answer.json()["error"]
    assert error["type"] == "authentication_error"
    assert answer.status_code == (200 if stream else 401)


def test_signs_of_life_while_a_reply_is_made(renderer, monkeypatch):
    monkeypatch.setattr(responses, "PING_SECONDS", 0.001)

    async def test(gateway, client, key, engine):
        async with client.stream("POST", "/v1/messages", json=MESSAGES | {"stream": True}) as answer:
            seen = ""
            async for text in answer.aiter_text():
                seen += text
                if "ping" in seen:
                    engine.go.set()
        return events(seen)

    kinds = [event["type"] for event in serving(renderer, test, Waiting(renderer))]
    assert kinds[0] == "message_start" and "ping" in kinds and kinds[-1] == "message_stop"


def test_engines_that_die_are_no_fault_of_the_agent(renderer):
    async def dies(request, on_delta=None):
        raise WorkerDiedError("engine 0 was killed")

    async def test(gateway, client, key, engine):
        answer = await client.post("/v1/chat/completions", json=CHAT | {"n": 2})
        return answer, gateway.close_attempt(key)

    answer, captured = serving(renderer, test, dies)
    assert answer.status_code == 503 and "was killed" in answer.json()["error"]["message"]
    assert isinstance(captured.error, WorkerDiedError)


PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1}


def test_unrecorded_clients_choose_sampling_and_stream_tokens(renderer):
    class Dripping(Logger):
        async def __call__(self, request, on_delta=None):
            completion = await super().__call__(request, on_delta)
            for token in completion.tokens if on_delta is not None else ():
                on_delta(replace(Delta.empty(request.id), tokens=token.reshape(1)))
            return completion

    async def test(gateway, client, key, engine):
        gateway.issue_key("sesame")
        engine.said += [("Hé! 1..2", FinishReason.STOP)] * 2
        headers = {"authorization": "Bearer sesame"}
        more = {"stream": True, "temperature": 0.3, "seed": 7, "stop": [".2"], "top_k": 5, "max_tokens": 11}
        more |= PENALTIES
        streamed = await client.post("/v1/chat/completions", json=CHAT | more, headers=headers)
        await client.post("/v1/chat/completions", json=CHAT | more, headers=headers)
        return events(streamed.text), engine.log

    streamed, log = serving(renderer, test, Dripping(renderer))
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in streamed]
    assert [piece for piece in pieces if piece] == ["H", "é", "!", " ", "1", "."]
    first, second = (request.sampling for request, _ in log)
    assert first == second  # the same seed
    assert (first.temperature, first.top_k, first.stop, first.max_tokens) == (0.3, 5, (".2",), 11)
    assert {name: getattr(first, name) for name in PENALTIES} == PENALTIES


def test_texts_are_tokenized_once_and_completed(renderer):
    async def test(gateway, client, key, engine):
        gateway.issue_key("sesame")
        headers = {"authorization": "Bearer sesame"}
        engine.said += [("one", FinishReason.STOP), ("two.x", FinishReason.STOP), ("three", FinishReason.LENGTH)]
        tokens = renderer.encode("é<|user|>").tolist()
        body = {"prompt": ["a", "é<|user|>", "b"], "stop": ".", "echo": True, "seed": 5}
        texts = await client.post("/v1/completions", json=body, headers=headers)
        ids = await client.post("/v1/completions", json={"prompt": tokens, "logprobs": 0}, headers=headers)
        return texts.json(), ids.json(), tokens, engine.log

    texts, ids, tokens, log = serving(renderer, test)
    assert [(choice["text"], choice["finish_reason"]) for choice in texts["choices"]] == [
        ("aone", "stop"),
        ("é<|user|>two", "stop"),
        ("bthree", "length"),
    ]
    assert [request.tokens.tolist() for request, _ in log] == [
        renderer.encode("a").tolist(),
        tokens,
        renderer.encode("b").tolist(),
        tokens,
    ]
    assert len({request.sampling.seed for request, _ in log}) == 4 and log[0][0].sampling.max_tokens == 16
    assert texts["object"] == ids["object"] == "text_completion"
    found = ids["choices"][0]["logprobs"]
    assert found["token_logprobs"] == log[3][1].logprobs.tolist()
    assert found["tokens"] == ["o", "k", ""] and found["text_offset"] == [0, 1, 2] and found["top_logprobs"] is None
    assert texts["usage"]["prompt_tokens"] == 2 + len(tokens)


def test_texts_that_an_attempt_completes_are_recorded(renderer):
    """A prompt that begins with the tokens of a completion goes on as its segment; another one begins a segment."""

    async def test(gateway, client, key, engine):
        async def complete(prompt, n=1):
            answer = await client.post("/v1/completions", json={"prompt": prompt, "n": n, "max_tokens": 64})
            assert answer.status_code == 200, answer.text
            return [choice["text"] for choice in answer.json()["choices"]]

        def whole(turn):
            return np.concatenate([engine.log[turn][0].tokens, engine.log[turn][1].tokens]).tolist()

        assert await complete("ab") == ["one"]
        for turn, text in enumerate(("two", "three")):
            assert await complete([*whole(turn), *renderer.encode("go").tolist()]) == [text]
        for count in (2, 1):
            assert await complete("a longer text", n=count) == ["ok"] * count
        return gateway.close_attempt(key), [whole(turn) for turn in range(6)], engine.log

    said = [(text, FinishReason.STOP) for text in ("one", "two", "three")]
    captured, whole, log = serving(renderer, test, Logger(renderer, *said))
    assert [segment.tokens.tolist() for segment in captured.segments] == whole[2:]
    sampled = [segment.logprobs[segment.loss_mask].tolist() for segment in captured.segments]
    names = [completion.logprobs.tolist() for _, completion in log]
    assert sampled == [names[0] + names[1] + names[2], *names[3:]]
    counts = captured.counts
    assert (counts.turns, counts.appended, counts.forks, counts.retries) == (6, 2, 1, 1)
    assert [(message.role, message.content) for message in captured.messages] == [
        ("user", "a longer text"),
        ("assistant", "ok"),
    ]


def test_an_attempt_completes_one_text_a_request(renderer):
    async def test(gateway, client, key, engine):
        answer = await client.post("/v1/completions", json={"prompt": ["a", "b"]})
        return answer, gateway.close_attempt(key), engine.log

    answer, captured, log = serving(renderer, test)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_parameter"
    assert captured.counts.turns == 0 and log == []


def test_texts_count_as_turns_and_as_room(renderer):
    async def test(gateway, client, key, engine):
        key = gateway.open_attempt(attempt_inputs(), max_turns=1)
        headers = {"authorization": f"Bearer {key}"}
        codes = []
        for prompt in ("a" * 5000, "a", "a"):
            answer = await client.post("/v1/completions", json={"prompt": prompt}, headers=headers)
            codes.append(answer.status_code)
        return codes, gateway.close_attempt(key)

    codes, captured = serving(renderer, test)
    assert codes == [400, 200, 403] and captured.truncated and captured.counts.turns == 1


async def post(address, key, body):
    """What a client asks that has a connection of its own; httpx is slow with a thousand."""
    reader, writer = await asyncio.open_connection(*address)
    content = json.dumps(body).encode()
    head = f"POST /attempts/{key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_attempts_at_once_leave_nothing(renderer, many_files):
    async def play(gateway, number):
        key = open_attempt(gateway, number)
        body, address = CHAT, httpx.URL(gateway.address)
        for turn in ("1", "2"):
            answer = await post((address.host, address.port), key, body)
            said = [answer["choices"][0]["message"], {"role": "user", "content": turn}]
            body = CHAT | {"messages": [*body["messages"], *said]}
        return gateway.close_attempt(key)

    async def run():
        engine = Waiting(renderer)
        async with Gateway(model(renderer, engine)) as gateway:
            before = asyncio.all_tasks()
            async with asyncio.TaskGroup() as players:
                playing = [players.create_task(play(gateway, number)) for number in range(1000)]
                for _ in playing:
                    await engine.asked.get()
                engine.go.set()  # all are under way
            assert gateway.open_keys == 0
            assert asyncio.all_tasks() <= before
            return [player.result() for player in playing]

    there = attempts()
    ended = asyncio.run(run())
    assert all(len(captured.segments) == 1 and captured.counts.turns == 2 for captured in ended)
    del ended
    assert attempts() <= there


def attempts():
    """How many are held by anything."""
    gc.collect()
    return sum(type(one) is AttemptSession for one in gc.get_objects())

"""The official clients of OpenAI and Anthropic against engines of ours: a model that is served, attempts that are captured."""

import asyncio
import json
import os
import re
import shutil
import signal
import string
import threading

import httpx
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, DataError
from antiphon.core.types import AttemptId, Message, PolicyVersion, Prompt, Sampling
from antiphon.engines.config import EngineConfig
from antiphon.record.events import Events
from antiphon.rollout.agents import FunctionAgent, run_agent
from antiphon.rollout.attempt import AttemptInputs
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.rollout.gateway.server import Gateway
from antiphon.run.launch.engines import EngineStarter, start_engines
from antiphon.service.model_server import load_serving_config, serve
from antiphon.tasks.rendering import Renderer
from tests.raising import raises_with
from tests.system.parrot import CALL, serving, write_parrot

pytestmark = pytest.mark.system

PROMPT = Prompt(id="p", task="t", messages=(Message("user", "Look!"),))
SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A parrot."""
    return write_parrot(tmp_path_factory.mktemp("parrot"))


# --- a model that is served --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(directory, tmp_path_factory):
    """Address and token of `antiphon serve`."""
    yield from serving(directory, tmp_path_factory.mktemp("token"))


def test_a_served_model_speaks_to_any_client_that_has_the_token(served):
    address, token = served
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "stop": ["k"]}
    assert httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).status_code == 401
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, headers={"x-api-key": token}, timeout=60)
    choice = answer.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abcdefghij", "stop")


@pytest.fixture(scope="module")
def narrow(model, tmp_path_factory):
    """A served model without a chat template, whose vocabulary has two letters and nothing for all others."""
    directory = tmp_path_factory.mktemp("narrow") / "model"
    shutil.copytree(model, directory)
    letters = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, "<unknown>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>").save_pretrained(directory)
    yield from serving(directory, tmp_path_factory.mktemp("token"))


ANSWERED = {"max_tokens": 3, "messages": [{"role": "user", "content": "ab"}]}
REFUSED = {
    "empty": {"messages": [{"role": "user", "content": ""}]},
    "null": {"messages": [{"role": "user", "content": None}]},
    "no parts": {"messages": [{"role": "user", "content": []}]},
    "no content": {"messages": [{"role": "user"}]},
    "empty parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
    "no messages": {"messages": []},
    "outside of the vocabulary": {"messages": [{"role": "user", "content": "é"}]},
    "stop that is no text": {"stop": [7], "stop_sequences": [7]},
    "too long": {"messages": [{"role": "user", "content": "ab" * 600}]},
    "no tokens": {"max_tokens": 0},
    "negative tokens": {"max_tokens": -1},
    "temperature below 0": {"temperature": -1},
    "temperature nan": {"temperature": float("nan")},
    "temperature that makes logits infinite": {"temperature": 1e-40},
    "top_p above 1": {"top_p": 2},
    "top_k": {"top_k": -2},
    "presence_penalty above 2": {"presence_penalty": 3, "temperature": -1},  # which the other protocol refuses
    "repetition_penalty 0": {"repetition_penalty": 0, "temperature": -1},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "other"), [("chat/completions", "messages"), ("messages", "chat/completions")])
def test_an_invalid_request_leaves_the_server(narrow, path, other, stream):
    address, token = narrow
    with httpx.Client(base_url=f"{address}/v1/", headers={"x-api-key": token}, timeout=60) as client:
        for name, changes in REFUSED.items():
            body = json.dumps(ANSWERED | {"stream": stream} | changes)
            answer = client.post(path, content=body)
            assert answer.status_code == 400, (name, answer.text)
            assert answer.json()["error"]["type"] == "invalid_request_error", name
        surrogate = b'{"max_tokens": 3, "messages": [{"role": "user", "content": "\xed\xa0\xbd"}]}'
        assert client.post(path, content=surrogate).status_code == 400
        answers = [client.post(each, json=ANSWERED | {"stream": stream}) for each in (path, other)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert all("error" not in answer.text for answer in answers)


def test_openai_on_a_served_model(served):
    openai = pytest.importorskip("openai")
    address, token = served
    with openai.OpenAI(base_url=address, api_key=token, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        converse_openai(client)
        with pytest.raises(openai.BadRequestError, match="too long"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 2000}])
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_text_completions_on_a_served_model(served):
    openai = pytest.importorskip("openai")
    address, token = served
    mark = 1 + len(string.printable)  # the token of "<|alphabet|>"
    asked = {"model": "m", "temperature": 0}
    with openai.OpenAI(base_url=address, api_key=token, max_retries=0) as client:
        complete = client.completions.create
        for prompt in ("x<|alphabet|>", [mark], [[mark]]):
            (choice,) = complete(**asked, prompt=prompt, max_tokens=5).choices
            assert (choice.text, choice.finish_reason, choice.logprobs) == ("abcde", "length", None)
        done = complete(**asked, prompt=["a", "<|alphabet|>", "xy"], n=2, max_tokens=40, stop=["f", "z"], echo=True)
        assert [choice.index for choice in done.choices] == [*range(6)]
        assert [choice.text for choice in done.choices[::2]] == ["abcde", "<|alphabet|>abcde", "xy"]
        assert {choice.finish_reason for choice in done.choices} == {"stop"}
        assert done.usage.prompt_tokens == 4 and done.usage.total_tokens == 4 + done.usage.completion_tokens
        assert len(complete(**asked, prompt="<|alphabet|>").choices[0].text) == 16  # OpenAI's default
        whole = complete(**asked, prompt="<|alphabet|>", max_tokens=3, logprobs=1, top_p=0.5)
        found = whole.choices[0].logprobs
        assert found.tokens == ["a", "b", "c"] and found.text_offset == [0, 1, 2]
        assert len(found.token_logprobs) == 3 and all(-5 < value <= 0 for value in found.token_logprobs)

        more = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4}
        chunks = list(complete(**asked, **more, prompt="q<|alphabet|>", echo=True))
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "q<|alphabet|>abcd"
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
        assert chunks[-1].usage.completion_tokens == 4 and len(chunks) >= 3
        texts = {}
        for chunk in complete(**asked, **more, prompt=["<|alphabet|>", "x<|alphabet|>"], n=2):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
        assert texts == dict.fromkeys(range(4), "abcd")

        for refused in (
            {"best_of": 3},
            {"suffix": "z"},
            {"logit_bias": {"5": 1}},
            {"logprobs": 5},
            {"logprobs": 0, "echo": True},
            {"presence_penalty": 3.0},
            {"prompt": []},
            {"prompt": ""},
            {"prompt": [mark + 10_000]},
            {"prompt": [["x"]]},
            {"n": 1000},
        ):
            name = next(iter(refused))
            with pytest.raises(openai.BadRequestError) as error:
                complete(**{**asked, "prompt": "a", **refused})
            assert error.value.type == "invalid_request_error"
            if refused != {"prompt": [mark + 10_000]}:  # which the engine refuses, as one of tokens
                assert ("echo" if "echo" in refused else name) in error.value.message
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").completions.create(**asked, prompt="a")


def test_anthropic_on_a_served_model(served):
    anthropic = pytest.importorskip("anthropic")
    address, token = served
    with anthropic.Anthropic(base_url=address, api_key=token, max_retries=0) as client:
        converse_anthropic(client)
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").messages.create(**ASKED)


def converse_openai(client):
    """Two turns with a tool, the first streamed, and one without."""
    tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}]
    messages = [{"role": "user", "content": "Look!"}]
    asked = {"model": "m", "temperature": 0, "tools": tools}
    with client.chat.completions.stream(**asked, messages=messages) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_completion()
    assert "content.done" in kinds and "tool_calls.function.arguments.done" in kinds
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert (message.content, call.function.name) == ("I will.", "look")
    assert json.loads(call.function.arguments) == {"where": "é"} and first.choices[0].finish_reason == "tool_calls"
    messages += [
        {"role": "assistant", "content": message.content, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
    ]
    second = client.chat.completions.create(**asked, messages=messages, logprobs=True)
    assert second.choices[0].message.content == "It is 42."
    assert second.usage.completion_tokens == len(second.choices[0].logprobs.content) == 2

    plain = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "Hi"}], "stop": "x"}
    chunks = list(client.chat.completions.create(**plain, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == string.ascii_lowercase[:23] and chunks[-1].usage.completion_tokens == 24


GREEDY = {"temperature": 0}
ASKED = {"model": "m", "max_tokens": 40, "messages": [{"role": "user", "content": "Look!"}], "extra_body": GREEDY}


def converse_anthropic(client):
    """Two turns with a tool, the first streamed, and one without."""
    tools = [{"name": "look", "description": "d", "input_schema": SCHEMA}]
    asked = ASKED | {"tools": tools, "system": [{"type": "text", "text": "Be brief."}]}
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_message()
    assert {"text", "input_json", "message_stop"} <= set(kinds)
    text, call = first.content
    assert (text.text, call.name, call.input, first.stop_reason) == ("I will.", "look", {"where": "é"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}]}
    history = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**asked | {"messages": [*asked["messages"], *history]})
    assert second.content[0].text == "It is 42." and second.stop_reason == "end_turn"
    assert second.usage.output_tokens == 2

    cut = client.messages.create(**ASKED | {"max_tokens": 3})
    assert (cut.content[0].text, cut.stop_reason) == ("abc", "max_tokens")
    stopped = client.messages.create(**ASKED, stop_sequences=["e"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("abcd", "stop_sequence", "e")
    counted = client.messages.count_tokens(**{key: asked[key] for key in ("model", "messages", "tools", "system")})
    assert counted.input_tokens == first.usage.input_tokens


# --- attempts that are captured ----------------------------------------------------------------------------------------


def openai_agent(base_url, key, prompt):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        converse_openai(client)


def anthropic_agent(base_url, key, prompt):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=base_url, api_key=key, max_retries=0) as client:
        converse_anthropic(client)


def captured(directory, agents):
    """What comes of agents that play at the same time, on an engine of ours."""

    async def run():
        deadlines, cluster = Deadlines(), LocalCluster(ClusterConfig())
        rollout = RolloutConfig.model_validate({"groups_per_step": 1, "sampling": {"max_tokens": 40}})
        starter = EngineStarter(cluster, "engine", directory, EngineConfig(slots=4, device="cpu"))
        try:
            pool, longest = await start_engines(starter, rollout, deadlines, Events(), print)
            model = ServedModel(generate=pool.generate, tokenizer=Renderer(directory), max_length=longest)
            async with Gateway(model) as gateway:
                sampling, started = Sampling(max_tokens=40, temperature=0.0), PolicyVersion(0, 0)
                playing = [
                    run_agent(
                        FunctionAgent(agent),
                        gateway,
                        AttemptInputs(prompt=PROMPT, attempt=AttemptId(0, n, 0), started=started, sampling=sampling),
                        seconds=60,
                    )
                    for n, agent in enumerate(agents)
                ]
                return await asyncio.gather(*playing)
        finally:
            await cluster.close()

    return asyncio.run(run())


def test_attempts_of_both_clients_are_captured_exactly(directory):
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    renderer = Renderer(directory)
    for outcome, turns, segments in zip(
        captured(directory, [openai_agent, anthropic_agent]), (3, 4), (2, 3), strict=True
    ):
        assert outcome.failure is None, outcome.failure
        counts = outcome.captured.counts
        assert (counts.turns, counts.segments, counts.rerendered) == (turns, segments, 0)
        first = outcome.captured.segments[0]  # the two turns with the tool, the second on the tokens of the first
        spoken = [renderer.decode(first.tokens[turn.start : turn.stop]) for turn in first.turns]
        assert spoken == ["I will. " + CALL, "It is 42."]
        assert first.turns[0].tool_calls == ({"name": "look", "arguments": {"where": "é"}},)
        between = renderer._tokenizer.decode(first.tokens[first.turns[0].stop : first.turns[1].start].tolist())
        assert between == "tool:42<eos><|told|>"
        sampled = sum(len(s.tokens[s.loss_mask]) for s in outcome.captured.segments)
        assert sampled == sum(turn.stop - turn.start for s in outcome.captured.segments for turn in s.turns)
        assert all(np.isfinite(s.logprobs).all() for s in outcome.captured.segments)


# --- a run that is served ----------------------------------------------------------------------------------------------


def test_run_is_served_from_its_newest_checkpoint(project):
    config = project.config(
        steps=1, engine={"slots": 3, "device": "cpu"}, checkpoint={"every": 1}, cluster={"debug": True}
    )
    done = project.run("train", config)
    assert done.returncode == 0, done.stderr
    target, settings = load_serving_config(str(project.folder / "runs" / "run"), None, ["port=0", "engine.threads=2"])
    assert target.endswith("step_000001")
    assert (settings.engine.slots, settings.engine.threads, settings.engine.device) == (3, 2, "cpu")
    announced = []

    def ask(told):
        address = told.splitlines()[0]
        announced.append(told)
        body = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
        headers = {"authorization": "Bearer sesame-1"}
        answer = httpx.post(f"{address}/chat/completions", json=body, headers=headers, timeout=60)
        os.kill(os.getpid(), signal.SIGTERM)
        announced.append(answer.json()["usage"]["completion_tokens"])

    serve(target, settings, "sesame-1", lambda address: threading.Thread(target=ask, args=(address,)).start())
    assert 1 <= announced[1] <= 4
    url, model, endpoints = announced[0].splitlines()
    assert url.endswith("/v1") and settings.name in model.split()
    assert {"/v1/chat/completions", "/v1/completions"} <= {*re.split(r"[ ,]+", endpoints)}


def test_what_cannot_be_served_is_said(tmp_path):
    with raises_with(ConfigError, value="mytask:build"):
        load_serving_config("mytask:build", None, [])
    with raises_with(DataError, path=tmp_path / "tokenizer.json"):
        serve(str(tmp_path), load_serving_config(str(tmp_path), None, ["port=0"])[1], "sesame-1", print)

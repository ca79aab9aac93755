"""What clients may do to a conversation, and chat templates too: what is kept is what the engine was given and said."""

import asyncio
import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from antiphon.core.errors import DataError
from antiphon.core.types import FinishReason, Message
from antiphon.rollout.gateway import anthropic, openai
from antiphon.rollout.gateway.chat import ApiError
from tests.unit.rollout.gateway_support import SAMPLING, TEMPLATES, Logger, attempt, make

TOOLS = [{"name": "f", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module", params=TEMPLATES)
def renderer(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp("chat"), TEMPLATES[request.param])


def run(coroutine):
    """What a coroutine that waits for nobody returns, without a loop of its own for each."""
    return LOOP.run(coroutine)


LOOP = asyncio.Runner()


# --- a client of its own mind ------------------------------------------------------------------------------------------


@dataclass
class Said:
    """A message as a client keeps it. `theirs`: the policy said it, and the client has not touched it."""

    role: str
    text: str
    calls: list = field(default_factory=list)  # (id, name, arguments)
    answers: str = ""
    theirs: bool = False
    style: int = 0  # how it is written when it is sent


def senses(conversation):
    """What messages say, which is the test's own idea of when they are the same."""
    ids, found = [], []
    for said in conversation:
        ids += [i for i, _, _ in said.calls]
        calls = [(name, json.dumps(arguments, sort_keys=True)) for _, name, arguments in said.calls]
        which = [at for at, i in enumerate(ids) if i == said.answers]
        found.append((said.role, said.text.strip() if said.theirs else said.text, calls, said.answers, which))
    return found


def turned(value):
    """The same JSON with its keys in another order."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in sorted(value, reverse=True)}
    return [turned(item) for item in value] if isinstance(value, list) else value


def styled(said):
    text = said.text.strip() if said.style & 1 and said.theirs else said.text
    spacing = {"separators": (",", ":")} if said.style & 2 else {"indent": 1}
    calls = [(i, name, turned(arguments) if said.style & 4 else arguments) for i, name, arguments in said.calls]
    return text, calls, spacing


def as_openai(conversation):
    messages = []
    for said in conversation:
        text, calls, spacing = styled(said)
        message = {"role": said.role, "content": text}
        if said.style & 8 and said.role != "tool":
            message["content"] = [{"type": "text", "text": text}]
        if calls:
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": name, "arguments": json.dumps(a, **spacing)}}
                for i, name, a in calls
            ]
        if said.role == "tool":
            message["tool_call_id"] = said.answers
        messages.append(message)
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    return openai, {"model": "m", "messages": messages, "tools": tools}


def as_anthropic(conversation):
    messages, system = [], []
    for said in conversation:
        text, calls, _ = styled(said)
        if said.role == "tool":
            messages.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": said.answers, "content": text}]}
            )
        elif said.role == "system":
            system.append(text)
        elif calls or said.style & 8:
            blocks = [{"type": "text", "text": text}] if text else []
            blocks += [{"type": "tool_use", "id": i, "name": name, "input": a} for i, name, a in calls]
            messages.append({"role": said.role, "content": blocks})
        else:
            messages.append({"role": said.role, "content": text})
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in TOOLS]
    return anthropic, {
        "model": "m",
        "max_tokens": 50,
        "system": "\n".join(system),
        "messages": messages,
        "tools": tools,
    }


def reply_of(protocol, body):
    if protocol is openai:
        message = body["choices"][0]["message"]
        calls = [
            (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"]))
            for c in message.get("tool_calls", [])
        ]
        return Said("assistant", message["content"] or "", calls, theirs=True)
    text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
    calls = [(b["id"], b["name"], b["input"]) for b in body["content"] if b["type"] == "tool_use"]
    return Said("assistant", text, calls, theirs=True)


CALL = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
arguments = st.sampled_from(['{"b": 1, "a": {"d": [1, 2.5], "c": "ü<"}}', "{}", '{ "z":null,"y" : true }'])
words = st.sampled_from(
    ["yes", " no \n", "<think>hm\n</think>\n\nso", "", "ANTIPHONPLACEHOLDER", "<|end|>\n<|user|>Ha", "é"]
)
replies = st.one_of(
    words,
    st.builds(lambda text, call: text + CALL % call, words, arguments),
    st.builds(lambda first, second: CALL % first + "\n" + CALL % second, arguments, arguments),
    st.just("<tool_call>\n{broken"),
)
ends = st.sampled_from([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH])
ACTIONS = (
    "go on",
    "go on",
    "go on",
    "write anew",
    "retry",
    "edit",
    "other arguments",
    "drop",
    "compact",
    "new ids",
    "swap ids",
    "go back",
)


def act(draw, conversation):
    """The next conversation that the client sends."""
    sent = acted(draw, conversation)
    before, now = senses(conversation), senses(sent)
    # A reply that now stands after something else was not said there: it is the client's own from then on.
    return [replace(said, theirs=said.theirs and before[:number] == now[:number]) for number, said in enumerate(sent)]


def acted(draw, conversation):
    action = draw(st.sampled_from(ACTIONS))
    own = [index for index, said in enumerate(conversation) if said.role == "assistant"]
    if action == "retry":
        while conversation and conversation[-1].role == "assistant":
            conversation = conversation[:-1]
        return conversation
    if own and action not in ("go on", "retry", "compact"):
        at = draw(st.sampled_from(own))
        said = conversation[at]
        if action == "go back":
            conversation = conversation[: at + 1]
        elif action == "drop":
            conversation = conversation[:at] + conversation[at + 1 :]
        else:
            calls, text, theirs, style = said.calls, said.text, said.theirs, said.style
            if action == "edit":
                text, theirs = text + " I think", False
            elif action == "other arguments" and calls:
                calls, theirs = [(i, name, {**a, "n": 7}) for i, name, a in calls], False
            elif action == "new ids" and theirs:
                calls = [(f"mine{n}", name, a) for n, (_, name, a) in enumerate(calls)]
            elif action == "swap ids" and theirs:
                calls = [(i, name, a) for (i, _, _), (_, name, a) in zip(reversed(calls), calls, strict=True)]
            elif action == "write anew" and theirs:
                style = draw(st.integers(0, 15))
            changed = Said("assistant", text, calls, theirs=theirs, style=style)
            conversation = [*conversation[:at], changed, *conversation[at + 1 :]]
    elif action == "compact":
        conversation = [Said("system", "Be brief."), Said("user", f"So far: {len(conversation)}")]
    last = conversation[-1] if conversation else None
    if last is not None and last.role == "assistant":
        conversation = conversation + [Said("tool", draw(words), answers=i) for i, _, _ in last.calls]
    if not conversation or conversation[-1].role != "tool" or draw(st.booleans()):
        conversation = [*conversation, Said("user", draw(words) or "go")]
    return conversation


@settings(max_examples=25, phases=[Phase.generate])  # to shrink a whole conversation takes minutes
@given(st.data())
def test_what_is_kept_is_what_the_engine_was_given_and_said(renderer, data):
    converse(renderer, data.draw)


def converse(renderer, draw):
    """Check a conversation that is drawn; return each request as the client sent it and as the engine got it."""
    spoken = as_anthropic if draw(st.booleans()) else as_openai
    engine = Logger(renderer)
    session = attempt(renderer, engine)
    conversation = [Said("user", "Hi")]
    known = []  # (what was said, reply included; the tokens up to there)
    appended = rendered = 0
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        engine.said.append((draw(replies), draw(ends)))
        protocol, body = spoken(conversation)
        chat = protocol.parse_request(json.loads(json.dumps(body)))
        asked = session.prepare(chat)
        given = run(session.answer(asked))
        request, completion = engine.log[-1]
        requests.append((chat, request))

        # The prompt goes on from the longest conversation that it begins with, if the template can; else it is rendered.
        now = senses(conversation)
        before = [(sense, tokens) for sense, tokens in known if sense == now[: len(sense)]]
        longest = max((len(sense) for sense, _ in before), default=0)
        tail = tail_of(renderer, chat, longest, before)
        if tail is not None:
            appended += 1
            assert any(
                request.tokens.tolist() == [*tokens, *tail[tokens[-1] in renderer.eos_ids]]
                for sense, tokens in before
                if len(sense) == longest
            )
        else:
            rendered += 1
            assert request.tokens.tolist() == renderer.encode_prompt(chat.messages, chat.tools).tolist()

        reply = reply_of(
            protocol,
            json.loads(json.dumps(protocol.completion_response(chat, "id", 1, given, session.model.token_texts))),
        )
        known.append((senses([*conversation, reply]), [*request.tokens.tolist(), *completion.tokens.tolist()]))
        conversation = act(draw, [*conversation, reply])

    captured = session.captured()
    check_segments(captured.segments, engine.log)
    counts = captured.counts
    assert counts.turns == len(engine.log) == appended + rendered
    assert counts.appended == appended
    assert counts.segments == len(captured.segments) <= 1 + counts.forks + counts.retries
    return requests


def tail_of(renderer, chat, longest, before):
    """What the template adds after the longest known conversation, by whether that ended with an end token."""
    if not before:
        return None
    # The messages of the request: one of Anthropic's may be several of ours, but both number them alike here.
    said, new = chat.messages[:longest], chat.messages[longest:]
    try:
        return {
            closed: renderer.encode_observations(said, new, tools=chat.tools, closed=closed).tolist()
            for closed in (True, False)
        }
    except DataError:
        return None


def check_segments(segments, log):
    """Each token that was sampled is trained once, where its prompt is what it was sampled after."""
    by_name = {float(completion.logprobs[0]): (request, completion) for request, completion in log}
    trained = []
    for index, segment in enumerate(segments):
        assert segment.parent is None or segment.parent < index
        assert segment.turns
        covered = np.zeros(len(segment.tokens), np.bool_)
        for turn in segment.turns:
            request, completion = by_name[float(segment.logprobs[turn.start])]
            assert segment.tokens[: turn.start].tolist() == request.tokens.tolist()
            assert segment.tokens[turn.start : turn.stop].tolist() == completion.tokens.tolist()
            assert segment.logprobs[turn.start : turn.stop].tolist() == completion.logprobs.tolist()
            assert segment.versions[turn.start : turn.stop].tolist() == completion.versions.tolist()
            assert turn.sampling == request.sampling and turn.finish is completion.finish
            covered[turn.start : turn.stop] = True
        assert (covered == segment.loss_mask).all()
        trained += segment.logprobs[segment.loss_mask].tolist()
        if segment.parent is not None:  # what they share is trained there
            other, shared = segments[segment.parent], segment.turns[0].start
            stops = [turn.stop for turn in other.turns if turn.stop <= shared]
            assert any((segment.tokens[:stop] == other.tokens[:stop]).all() for stop in stops)
    assert sorted(trained) == sorted(float(name) for _, completion in log for name in completion.logprobs)


# --- single cases ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make(tmp_path_factory.mktemp("plain"), TEMPLATES["plain"])


def ask(session, *messages, **more):
    body = {"model": "m", "messages": [{"role": role, "content": content} for role, content in messages], **more}
    asked = session.prepare(openai.parse_request(body))
    return asked, run(session.answer(asked))


def test_retries_forks_and_side_questions_are_counted(plain):
    session = attempt(plain, Logger(plain))
    hi, ok = ("user", "Hi"), ("assistant", "ok")
    ask(session, hi)
    ask(session, hi, ok, ("user", "1"))
    ask(session, hi, ok, ("user", "1"))  # again
    ask(session, hi, ok, ("user", "2"))  # instead
    ask(session, ("system", "Name this talk."), hi)  # aside
    counts = session.captured().counts
    assert (counts.turns, counts.segments, counts.retries, counts.forks) == (5, 4, 1, 2)
    parents = [segment.parent for segment in session.captured().segments]
    assert parents == [None, 0, 0, None]


def test_several_choices_are_branches_of_one_prompt(plain):
    engine = Logger(plain, ("a", FinishReason.STOP), ("b", FinishReason.STOP))
    session = attempt(plain, engine)
    _, given = ask(session, ("user", "Hi"), n=2)
    assert [reply.message.content for reply in given] == ["a", "b"]
    assert len({request.sampling.seed for request, _ in engine.log}) == 2
    ask(session, ("user", "Hi"), ("assistant", "b"), ("user", "go"))
    first, second = session.captured().segments
    assert len(first.turns) == 1 and len(second.turns) == 2
    assert session.captured().counts.retries == 0
    check_segments((first, second), engine.log)


def test_ids_of_calls_tell_which_of_two_equal_replies_is_meant(plain):
    call = CALL % "{}"
    engine = Logger(plain, (call, FinishReason.STOP), (call + " ", FinishReason.STOP))
    session = attempt(plain, engine)
    tools = [{"type": "function", "function": TOOLS[0]}]
    (_, [first]), (_, _) = (ask(session, ("user", "Hi"), tools=tools) for _ in range(2))
    (made,) = first.message.tool_calls
    function = {"name": made.name, "arguments": "{}"}
    body = {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [{"id": made.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": made.id, "content": "42"},
        ],
        "tools": tools,
    }
    asked = session.prepare(openai.parse_request(body))
    request, completion = engine.log[0]
    said = [*request.tokens.tolist(), *completion.tokens.tolist()]
    assert asked.prompt.tolist()[: len(said)] == said


def sent_back(said, calls):
    """A request that goes on from a reply with these calls, each (id, arguments), and answers both in one order."""
    return {
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": said,
                "tool_calls": [{"id": i, "function": {"name": "f", "arguments": text}} for i, text in calls],
            },
            {"role": "tool", "tool_call_id": "c00001000", "content": "one"},
            {"role": "tool", "tool_call_id": "c00001001", "content": "two"},
        ],
        "tools": [{"type": "function", "function": TOOLS[0]}],
    }


@pytest.mark.parametrize(
    ("said", "calls", "same"),
    [
        (" So. ", [("c00001000", '{"a": 1.0, "b": [2]}'), ("c00001001", "{}")], True),
        ("So.", [("c00001000", '{"b":[2],"a":1}'), ("c00001001", "")], True),  # in its own way
        ("So!", [("c00001000", '{"a": 1.0, "b": [2]}'), ("c00001001", "{}")], False),  # other words
        ("So.", [("c00001000", '{"a": 1.5, "b": [2]}'), ("c00001001", "{}")], False),  # another value
        ("So.", [("c00001000", '{"a": 1.0, "b": [2]}')], False),  # a call less
    ],
)
def test_what_clients_make_of_a_reply_without_changing_it(plain, said, calls, same):
    first, second = CALL % '{"a": 1.0, "b": [2]}', CALL % "{}"
    session = attempt(plain, Logger(plain, (f"  So. {first}{second}", FinishReason.STOP)))
    tools = sent_back("", [])["tools"]
    ask(session, ("user", "Hi"), tools=tools)
    run(session.answer(session.prepare(openai.parse_request(sent_back(said, calls)))))
    assert session.captured().counts.appended == same
    assert session.captured().counts.forks == (not same)


def test_results_of_other_calls_are_another_conversation(plain):
    first, second = CALL % '{"a": 1}', CALL % "{}"
    session = attempt(plain, Logger(plain, (first + second, FinishReason.STOP)))
    right, swapped = ([(i, "{}" if n else '{"a": 1}') for n, i in enumerate(ids)] for ids in (IDS, IDS[::-1]))
    ask(session, ("user", "Hi"), tools=sent_back("", [])["tools"])
    for calls in (right, swapped):
        run(session.answer(session.prepare(openai.parse_request(sent_back("", calls)))))
    counts = session.captured().counts
    assert (counts.turns, counts.forks, counts.retries) == (3, 1, 0)


IDS = ("c00001000", "c00001001")


def test_configured_sampling_wins_and_overrides_are_counted(plain):
    engine = Logger(plain)
    session = attempt(plain, engine, replace(SAMPLING, stop=("END",)))
    ask(session, ("user", "Hi"), temperature=0.0, top_p=1.0, seed=5, max_tokens=1000, presence_penalty=0, stop="!")
    ask(session, ("user", "Hi"), temperature=0.7, max_tokens=3, frequency_penalty=1.0, repetition_penalty=1.0)
    first, second = (request.sampling for request, _ in engine.log)
    assert not first.penalized and not second.penalized
    assert (first.temperature, first.max_tokens, first.stop) == (0.7, 64, ("END", "!"))
    assert (second.max_tokens, second.stop) == (3, ("END",)) and first.seed != second.seed
    assert session.captured().counts.overridden == {
        "temperature": 1,
        "seed": 1,
        "max_tokens": 1,
        "frequency_penalty": 1,
    }


def test_a_stop_string_is_sampled_and_not_told(plain):
    engine = Logger(plain, ("I think.\nObservation:", FinishReason.STOP))
    session = attempt(plain, engine)
    _, [reply] = ask(session, ("user", "Hi"), stop=["Observation:"])
    assert (reply.message.content, reply.reason, reply.stop) == ("I think.\n", "stop_string", "Observation:")
    asked, _ = ask(session, ("user", "Hi"), ("assistant", "I think."), ("user", "Observation: 4"))
    request, completion = engine.log[0]
    said = [*request.tokens.tolist(), *completion.tokens.tolist()]
    assert asked.prompt.tolist()[: len(said)] == said


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder"])
def test_forced_call_prefix_is_not_trained(plain, format):
    rest = {"hermes": '", "arguments": {"a": 1}}\n</tool_call>', "qwen3_coder": ">\n</function>\n</tool_call>"}[format]
    engine = Logger(plain, (rest, FinishReason.STOP))
    session = attempt(plain, engine, tools=format)
    choice = {"type": "function", "function": {"name": "f"}}
    tools = [{"type": "function", "function": TOOLS[0]}]
    _, [reply] = ask(session, ("user", "Hi"), tools=tools, tool_choice=choice)
    assert [call.name for call in reply.message.tool_calls] == ["f"] and reply.reason == "tool_calls"
    (segment,) = session.captured().segments
    assert plain.decode(segment.tokens[segment.loss_mask]) == rest


def test_prompt_that_fills_the_context_has_the_standard_error(plain):
    session = attempt(plain, Logger(plain), max_length=20)
    with pytest.raises(ApiError, match="prompt is too long: 59 tokens > 19") as refused:
        ask(session, ("user", "x" * 55))
    assert refused.value.code == "context_length_exceeded"
    assert session.captured().segments == ()


def test_an_attempt_has_so_many_turns(plain):
    session = attempt(plain, Logger(plain), max_turns=2)
    ask(session, ("user", "Hi"), n=2)
    with pytest.raises(ApiError, match="its 2 turns"):
        ask(session, ("user", "Hi"))
    assert session.captured().counts.turns == 2


def test_an_attempt_that_has_ended_begins_no_answer(plain):
    engine = Logger(plain)
    session = attempt(plain, engine)
    asked = session.prepare(openai.parse_request({"messages": [{"role": "user", "content": "Hi"}]}))
    session.end()
    with pytest.raises(ApiError, match="has ended"):
        run(session.answer(asked))
    assert engine.log == [] and session.captured().segments == ()


def test_tool_messages_reach_the_template(plain):
    tokens = plain.encode_prompt([Message("user", "Hi"), Message("tool", "42", tool_call_id="c")], [TOOLS[0]])
    assert '"name": "f"' in plain.decode(tokens) and "42" in plain.decode(tokens)

"""Images that clients send to the gateway: what engines get, and what is recorded."""

import asyncio
import base64
import sys

import numpy as np
import pytest

from antiphon.core.types import FinishReason, Message
from antiphon.rollout.gateway import anthropic, completions, openai
from antiphon.rollout.gateway.capture import PromptDraft
from antiphon.rollout.gateway.chat import ApiError
from antiphon.tasks.rendering import Renderer
from tests.unit.rollout.gateway_support import SAMPLING, TEMPLATES, Logger, attempt, make
from tests.vision_models import picture, write_vision_model

RED, GREEN = picture((255, 0, 0)), picture((0, 255, 0), (50, 30))


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    place = tmp_path_factory.mktemp("vision")
    write_vision_model(place, "qwen2_5_vl")
    return Renderer(place)


def data_url(image):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(image).decode()}}


def source(image):
    data = base64.b64encode(image).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def text(words):
    return {"type": "text", "text": words}


def ask(session, protocol, *messages):
    body = {"model": "policy", "max_tokens": 8, "messages": list(messages)}
    (reply,) = asyncio.run(session.answer(session.prepare(protocol.parse_request(body))))
    return {"role": "assistant", "content": reply.message.content}


@pytest.mark.parametrize(("protocol", "block"), [(openai, data_url), (anthropic, source)], ids=["openai", "anthropic"])
def test_conversation_with_images_is_one_segment(renderer, protocol, block):
    engine = Logger(renderer, ("no", FinishReason.STOP), ("yes", FinishReason.STOP))
    session = attempt(renderer, engine)
    first = {"role": "user", "content": [text("is "), block(RED), text("green?")]}
    reply = ask(session, protocol, first)
    ask(session, protocol, first, reply, {"role": "user", "content": [block(GREEN), text("is?")]})
    whole, _ = renderer.encode_images([Message("user", "is <image>green?", images=(RED,))])
    (one, _), (two, _) = engine.log
    assert one.tokens.tolist() == whole.tolist()
    assert [image.data for image in one.attachments] == [RED]
    assert [image.data for image in two.attachments] == [RED, GREEN]
    token = renderer.vocabulary()["<|image_pad|>"]
    for request in (one, two):
        inside = [at for image in request.attachments for at in range(image.start, image.stop)]
        assert inside == np.flatnonzero(request.tokens == token).tolist()
    (segment,) = session.captured().segments
    assert segment.images == two.attachments and segment.tokens[: len(two.tokens)].tolist() == two.tokens.tolist()


def test_same_words_with_another_image_are_another_conversation(renderer):
    engine = Logger(renderer)
    session = attempt(renderer, engine)
    for image in (RED, GREEN):
        question = {"role": "user", "content": [data_url(image), text("color?")]}
        reply = ask(session, openai, question)
        ask(session, openai, question, reply, {"role": "user", "content": "sure?"})
    assert [[image.data for image in segment.images] for segment in session.captured().segments] == [[RED], [GREEN]]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/secret.png"}}],
        [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}],
        [{"type": "image_url"}],
        [data_url(RED), text("<image>")],
        [data_url(b"no image at all")],
        [data_url(RED[:60])],
    ],
    ids=str,
)
def test_what_is_no_image_is_refused(renderer, content):
    session = attempt(renderer, Logger(renderer))
    with pytest.raises(ApiError) as raised:
        ask(session, openai, {"role": "user", "content": content})
    assert raised.value.status == 400


def test_model_that_reads_text_refuses_images(tmp_path):
    session = attempt(blind := make(tmp_path, TEMPLATES["plain"]), Logger(blind))
    with pytest.raises(ApiError):
        ask(session, openai, {"role": "user", "content": [data_url(RED)]})


def test_tools_answer_with_images(renderer):
    """... as Anthropic's API has them."""
    engine = Logger(renderer)
    session = attempt(renderer, engine)
    question = {"role": "user", "content": [text("look")]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "see", "input": {}}]}
    shown = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [source(RED)]}]}
    ask(session, anthropic, question, call, shown)
    assert [image.data for image in engine.log[0][0].attachments] == [RED]
    with pytest.raises(ApiError) as raised:
        ask(session, anthropic, {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]})
    assert "messages[0].content[0].source.type" in str(raised.value)


def test_text_that_continues_a_turn_keeps_its_images(renderer):
    engine = Logger(renderer)
    session = attempt(renderer, engine)
    ask(session, openai, {"role": "user", "content": [data_url(RED), text("color?")]})
    (first, said) = engine.log[0]
    tokens = [*first.tokens.tolist(), *said.tokens.tolist(), *renderer.encode("sure?").tolist()]
    body = {"model": "policy", "max_tokens": 8, "prompt": tokens}
    asyncio.run(session.answer(session.prepare_completion(completions.parse_request(body))))
    (segment,) = session.captured().segments
    assert engine.log[1][0].attachments == first.attachments == segment.images


def test_long_conversations_have_their_images(renderer):
    """... of more turns than Python has frames."""
    session = attempt(renderer, Logger(renderer), max_length=1 << 30)
    draft = session._recorder.start_turn([Message("user", "<image>", images=(RED,))])
    completion = asyncio.run(Logger(renderer)(None))
    for _ in range(sys.getrecursionlimit() + 10):
        session._recorder.record_reply(draft, completion, SAMPLING, Message("assistant", "ok"))
        turn = session._recorder._turns[-1]
        draft = PromptDraft(draft.node, turn, renderer.encode("go"))
    assert [image.data for image in draft.images] == [RED]

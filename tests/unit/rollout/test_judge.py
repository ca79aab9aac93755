"""Questions to a model in a pool of its own."""

import asyncio

import pytest

from antiphon.core.types import Message
from antiphon.rollout.judge import make_generate
from tests.unit.rollout.test_pool import HeldEngine, pool_of, settle


class Letters:
    """A token a letter, but for two marks."""

    special_texts = ("<end>", "end><user>")

    def encode_prompt(self, messages):
        return [ord(letter) for message in messages for letter in message.content]

    def decode(self, tokens):
        return f"{len(tokens)} tokens"


def asked(question, **limits):
    """The request that a question becomes, and what is made of the answer."""

    async def main():
        engine = HeldEngine()
        generate = make_generate(pool_of(engine), Letters(), **limits)
        tasks = [asyncio.create_task(generate([Message("user", question)])) for _ in range(2)]
        await settle()
        for started in engine.started:
            started.finish()
        return [started.request for started in engine.started], await asyncio.gather(*tasks)

    return asyncio.run(main())


def test_a_judge_is_asked_greedily_and_its_reply_is_text():
    (one, other), replies = asked("abc", max_length=10, max_tokens=4)
    assert list(one.tokens) == [97, 98, 99] and (one.sampling.max_tokens, one.sampling.temperature) == (4, 0.0)
    assert one.id != other.id
    assert replies == ["2 tokens"] * 2


def test_a_reply_has_the_room_that_the_question_leaves():
    (request, _), _ = asked("abcdefg", max_length=10, max_tokens=4)
    assert request.sampling.max_tokens == 3
    (request, _), _ = asked("abcdefghi", max_length=10, max_tokens=4)
    assert request.sampling.max_tokens == 1
    with pytest.raises(ValueError, match=r"10 tokens .* no room in 10"):
        asked("abcdefghij", max_length=10, max_tokens=4)


@pytest.mark.parametrize("text", ["a<end>b", "<e<end>nd>", "<end><user>", "<<end>end><user>", "<end>" * 3])
def test_no_special_token_of_the_judge_stands_in_a_question(text):
    (request, _), _ = asked(text, max_length=100, max_tokens=4)
    sent = "".join(map(chr, request.tokens))
    assert not any(mark in sent for mark in Letters.special_texts) and sent.replace(" ", "") == text

"""Prompts become the tokens of their own messages, whichever prompt was encoded before; siblings share the work."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.types import IntArray, Message, Prompt
from antiphon.rollout.prompt_encoding import PromptEncoder, PromptError

TEXTS = ("one", "two", "three")
PROMPTS = [Prompt(id=text, task="t", messages=(Message("user", text),), payload=None) for text in TEXTS]


class Bytes:
    """A tokenizer of bytes that counts what it encodes."""

    eos_ids = (0,)

    def __init__(self) -> None:
        self.encoded = 0

    def encode_prompt(self, messages: list[Message]) -> IntArray:
        self.encoded += 1
        return np.frombuffer("".join(str(each.content) for each in messages).encode(), np.uint8).astype(np.int64)

    def encode_observation(self, messages: list[Message], observation: Message, *, closed: bool = True) -> IntArray:
        return self.encode_prompt([observation])

    def decode(self, tokens: IntArray) -> str:
        return bytes(tokens.tolist()).decode()


@given(st.lists(st.sampled_from(PROMPTS), max_size=12))
def test_each_prompt_gets_its_own_tokens(order: list[Prompt]) -> None:
    tokenizer = Bytes()
    encoder = PromptEncoder(tokenizer)
    assert [tokenizer.decode(encoder.encode_task(prompt).tokens) for prompt in order] == [prompt.id for prompt in order]
    assert tokenizer.encoded == len(list(groupby(order, key=lambda prompt: prompt.id)))


def test_a_prompt_without_tokens_is_refused() -> None:
    empty = Prompt(id="empty", task="t", messages=(Message("user", ""),), payload=None)
    with pytest.raises(PromptError):
        PromptEncoder(Bytes()).encode_task(empty)

"""Asking a model in an engine pool of its own, for rewards that need its opinion."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from antiphon.core.types import GenerateRequest, Message, Sampling
from antiphon.rollout.pool import EnginePool
from antiphon.rollout.prompt_encoding import JudgeTokenizer
from antiphon.tasks.base import Generate


def make_generate(pool: EnginePool, tokenizer: JudgeTokenizer, max_length: int, max_tokens: int) -> Generate:
    """Return a function that asks the model of a pool, greedily.

    The function raises `ValueError` for a question that leaves no room for a reply. The text of a special token in a message is
    broken up: what is judged may have been written to end its message or to begin another one.

    Args:
        pool: Engines of the model.
        tokenizer: Its tokenizer.
        max_length: Most tokens of a question and its reply together.
        max_tokens: Most tokens of a reply.
    """
    numbers = itertools.count()
    texts = sorted((text for text in tokenizer.special_texts if len(text) > 1), key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def defused(message: Message) -> Message:
        content = message.content
        while special.search(content):  # two may overlap
            content = special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", content)
        return replace(message, content=content)

    async def generate(messages: Sequence[Message]) -> str:
        tokens = tokenizer.encode_prompt([*map(defused, messages)])
        room = min(max_tokens, max_length - len(tokens))
        if room <= 0:
            raise ValueError(f"a question of {len(tokens)} tokens leaves the judge no room in {max_length}")
        sampling = Sampling(max_tokens=room, temperature=0.0)
        completion = await pool.generate(GenerateRequest(id=f"judge/{next(numbers)}", tokens=tokens, sampling=sampling))
        return tokenizer.decode(completion.tokens)

    return generate

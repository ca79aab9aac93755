"""Asking a model in an engine pool of its own, for rewards that need its opinion."""

import itertools
from collections.abc import Sequence

from antiphon.core.types import GenerateRequest, Message, Sampling
from antiphon.rollout.pool import EnginePool
from antiphon.rollout.prompt_encoding import Tokenizer
from antiphon.tasks.base import Generate


def make_generate(pool: EnginePool, tokenizer: Tokenizer, max_length: int, max_tokens: int) -> Generate:
    """Return a function that asks the model of a pool, greedily.

    The function raises `ValueError` for a question that leaves no room for a reply.

    Args:
        pool: Engines of the model.
        tokenizer: Its tokenizer.
        max_length: Most tokens of a question and its reply together.
        max_tokens: Most tokens of a reply.
    """
    numbers = itertools.count()

    async def generate(messages: Sequence[Message]) -> str:
        tokens = tokenizer.encode_prompt(list(messages))
        room = min(max_tokens, max_length - len(tokens))
        if room <= 0:
            raise ValueError(f"a question of {len(tokens)} tokens leaves the judge no room in {max_length}")
        sampling = Sampling(max_tokens=room, temperature=0.0)
        completion = await pool.generate(GenerateRequest(id=f"judge/{next(numbers)}", tokens=tokens, sampling=sampling))
        return tokenizer.decode(completion.tokens)

    return generate

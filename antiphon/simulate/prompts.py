"""Simulated prompts, their tokenizer and their judge.

All answers are drawn from named streams, so that they depend on what is asked and not on when.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from antiphon.core.errors import DataError
from antiphon.core.types import IntArray, Message, Prompt, Score, ScoreStatus
from antiphon.simulate.faults import Faults
from antiphon.simulate.workloads import DistributionConfig
from antiphon.tasks.base import Transcript

FIRST_NUMBER = 2  # added to a prompt's number in its first token: 0 stands for prompt tokens, 1 for sampled ones
_VERDICT = DistributionConfig(kind="uniform", mean=0.5, spread=0.5)


class SimulatedTokenizer:
    """Encodes a prompt as the number of tokens that its messages say; completions have no text."""

    eos_ids: tuple[int, ...] = ()

    def encode_prompt(self, messages: Sequence[Message]) -> IntArray:
        """Encode messages that hold their number of tokens; the first token is the prompt's number."""
        sizes = [message.content.split("/") for message in messages]
        tokens = np.zeros(sum(int(size[-1]) for size in sizes), np.int32)
        tokens[0] = FIRST_NUMBER + int(sizes[0][0])
        return tokens

    def encode_observation(self, messages: Sequence[Message], observation: Message, *, closed: bool = True) -> IntArray:
        """Encode an observation that holds its number of tokens."""
        return np.zeros(int(observation.content), np.int32)

    def encode_images(self, messages: Sequence[Message], *_: Any, **__: Any) -> NoReturn:
        """Raise `DataError`: simulated prompts have no images."""
        raise DataError("simulated prompts have no images")

    def decode(self, tokens: IntArray) -> str:
        """Return no text."""
        return ""


class SimulatedJudge:
    """Scores 1 with the prompt's probability of success, after a latency; both are drawn with the attempt's seed."""

    def __init__(self, latency: DistributionConfig, success: DistributionConfig, seed: int, faults: Faults) -> None:
        self._latency = latency
        self._success = success
        self._seed = seed
        self._faults = faults

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Return the score; an infrastructure failure if a fault loses the grader."""
        seed = transcript.turns[-1].sampling.seed
        await asyncio.sleep(self._latency.draw(seed, "latency"))
        if self._faults.should_fail("reward.lost"):
            return Score(status=ScoreStatus.INFRASTRUCTURE, detail="the simulated grader was lost")
        chance = self._success.draw(self._seed, "success", prompt.id)
        return Score.of(float(_VERDICT.draw(seed, "verdict") < chance))


def make_prompts(count: int, tokens: DistributionConfig, seed: int, task: str) -> list[Prompt]:
    """Make `count` prompts whose numbers of tokens are drawn from `tokens`."""
    lengths = (max(1, round(tokens.draw(seed, "prompt", number))) for number in range(count))
    return [
        Prompt(id=f"{task}/{n}", task=task, messages=(Message("user", f"{n}/{size}"),))
        for n, size in enumerate(lengths)
    ]

"""The parts of a run that a simulation puts in the place of models: a learner, prompts, a tokenizer, a judge.

Everything they answer is drawn from named streams, so that it depends on what is asked and not on when.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.config import Config
from antiphon.learning.config import OptimizerConfig
from antiphon.seeds import generator
from antiphon.simulate.workloads import DistributionConfig
from antiphon.tasks.base import Transcript
from antiphon.types import FloatArray, IntArray, Message, Pack, Prompt, Score, TrainBatch, WeightsUpdate


class LearnerSpeed(Config):
    """How fast a simulated learner is, in seconds."""

    step: float = Field(0.0, ge=0.0)
    """Of a training step, whatever is in it."""
    per_token: float = Field(0.0, ge=0.0)
    """Of a token that is trained on."""
    publish: float = Field(0.0, ge=0.0)


class SimulatedLearner:
    """A `Learner` that takes its time and learns nothing."""

    def __init__(self, speed: LearnerSpeed) -> None:
        self.speed = speed

    async def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """See `Learner.begin`."""
        return 0

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        """See `Learner.step`."""
        tokens = sum(len(pack.tokens) for update in batch.updates for rank in update.packs for pack in rank)
        seconds = self.speed.step + self.speed.per_token * tokens
        await asyncio.sleep(seconds)
        return {"seconds": seconds, "tokens": float(tokens)}

    async def score(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """See `Learner.score`: a third of a step's time, as it has no backward pass."""
        await asyncio.sleep(self.speed.per_token * sum(len(pack.tokens) for pack in packs) / 3)
        return [np.zeros(len(pack.tokens), np.float32) for pack in packs]

    async def publish(self, version: int, directory: Path) -> WeightsUpdate:
        """See `Learner.publish`; nothing is written."""
        await asyncio.sleep(self.speed.publish)
        return WeightsUpdate(version=version, location=str(directory / f"{version}"), manifest=None)

    async def save(self, directory: Path, progress: Mapping[str, Any]) -> None:
        """See `Learner.save`; nothing is written."""


class SimulatedTokenizer:
    """Prompts of as many zeros as their messages say; completions without text."""

    eos_ids: tuple[int, ...] = ()

    def encode_prompt(self, messages: Sequence[Message]) -> IntArray:
        """See `Renderer.encode_prompt`: a message's content is its number of tokens."""
        return np.zeros(sum(int(message.content) for message in messages), np.int32)

    def encode_observation(self, messages: Sequence[Message], observation: Message, *, closed: bool = True) -> IntArray:
        """See `Renderer.encode_observation`."""
        return self.encode_prompt([observation])

    def decode(self, tokens: IntArray) -> str:
        """Nothing."""
        return ""


class SimulatedJudge:
    """Scores 1 with the prompt's own probability of success, after a latency. Both are drawn with the attempt's own seed."""

    def __init__(self, latency: DistributionConfig, success: DistributionConfig, seed: int) -> None:
        self._latency = latency
        self._success = success
        self._seed = seed

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        """The verdict."""
        seed = transcript.turns[-1].sampling.seed
        await asyncio.sleep(self._latency.draw(seed, "latency"))
        chance = self._success.draw(self._seed, "success", prompt.id)
        return Score.of(float(generator(seed, "verdict").random() < chance))


def simulated_prompts(count: int, tokens: DistributionConfig, seed: int, task: str) -> list[Prompt]:
    """`count` prompts whose lengths are drawn from `tokens`."""
    lengths = (max(1, round(tokens.draw(seed, "prompt", number))) for number in range(count))
    return [
        Prompt(id=f"{task}/{n}", task=task, messages=(Message("user", str(size)),)) for n, size in enumerate(lengths)
    ]

"""The parts of a run that a simulation puts in the place of models: a learner, prompts, a tokenizer, a judge.

Everything they answer is drawn from named streams, so that it depends on what is asked and not on when.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.config import Config
from antiphon.core.deadlines import succeed
from antiphon.core.errors import StateError, WorkerDied
from antiphon.core.types import (
    FloatArray,
    IntArray,
    Message,
    Pack,
    Prompt,
    Score,
    ScoreStatus,
    TrainBatch,
    WeightsUpdate,
)
from antiphon.learning.config import OptimizerConfig
from antiphon.simulate.engine import SimulatedEngine
from antiphon.simulate.faults import Faults
from antiphon.simulate.workloads import DistributionConfig
from antiphon.tasks.base import Transcript
from antiphon.weights.base import TransferContext

NUMBERED = 2  # added to a prompt's number in its first token: 0 is what prompts are made of, 1 what is sampled


SLICES = 16  # of a training step: between two of them it is seen whether engines run
_VERDICT = DistributionConfig(kind="uniform", mean=0.5, spread=0.5)


class LearnerSpeed(Config):
    """How fast a simulated learner is, in seconds."""

    step: float = Field(0.0, ge=0.0)
    """Of a training step, whatever is in it."""
    per_token: float = Field(0.0, ge=0.0)
    """Of a token that is trained on."""
    parallel: float = Field(1.0, le=1.0)
    """Share of `per_token` that is divided when several devices train; less than 0 where they are slower than one."""
    publish: float = Field(0.0, ge=0.0)
    beside_engines: float = Field(1.0, gt=0.0)
    """Times as long as a step takes while engines generate on the same machine."""


class SimulatedLearner:
    """A `Learner` that takes its time and learns nothing. It shares its machine with `engines`."""

    def __init__(
        self, speed: LearnerSpeed, faults: Faults, engines: Callable[[], Sequence[SimulatedEngine]] = tuple
    ) -> None:
        self.speed = speed
        self.busy_seconds = 0.0
        self._faults = faults
        self._engines = engines

    async def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """See `Learner.begin`."""
        return 0

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        """See `Learner.step`."""
        if self._faults.should_fail("learner.crash"):
            raise WorkerDied("the simulated learner crashed")
        seconds = await self._work(self.speed.step + self.speed.per_token * batch.tokens)
        self.busy_seconds += seconds
        return {"seconds": seconds, "tokens": float(batch.tokens)}

    async def _work(self, seconds: float) -> float:
        """Compute, in slices if engines may be in the way; returns the seconds that it took."""
        factor = self.speed.beside_engines
        slices, taken = (1 if factor == 1 else SLICES), 0.0
        self._tell_engines(True)
        for _ in range(slices):
            if any(engine.colocated and engine.running for engine in self._engines()):
                raise StateError("an engine runs on a device that the learner has")
            hindered = any(engine.running for engine in self._engines())
            taken += (slept := seconds / slices * (factor if hindered else 1))
            await asyncio.sleep(slept)
        self._tell_engines(False)
        return taken

    def _tell_engines(self, training: bool) -> None:
        for engine in self._engines():
            engine.share_machine(training)

    async def score(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """See `Learner.score`: a third of a step's time, as it has no backward pass."""
        await asyncio.sleep(self.speed.per_token * sum(len(pack.tokens) for pack in packs) / 3)
        return [np.zeros(len(pack.tokens), np.float32) for pack in packs]

    async def attention_stats(self, packs: Sequence[Pack]) -> list[FloatArray]:
        """See `Learner.attention_stats`: two thirds of the layers, forwards only."""
        await asyncio.sleep(self.speed.per_token * sum(len(pack.tokens) for pack in packs) * 2 / 9)
        return [np.zeros((len(pack.tokens), 2), np.float32) for pack in packs]

    async def publish(self, version: int, exchange: TransferContext) -> WeightsUpdate:
        """See `Learner.publish`; nothing is written."""
        await asyncio.sleep(self.speed.publish)
        return WeightsUpdate(version=version, location=str(exchange.directory / f"{version}"), manifest=None)

    async def save(self, place: Path) -> asyncio.Future[None]:
        """See `Learner.save`: there are no weights to write."""
        saved = asyncio.get_running_loop().create_future()
        saved.set_result(None)
        return saved

    async def restore(self, directory: Path) -> None:
        """See `Learner.restore`: there is nothing to restore."""

    async def offload(self) -> None:
        """See `Offloadable.offload`."""

    async def reload(self) -> None:
        """See `Offloadable.reload`."""


class SimulatedTokenizer:
    """Prompts of as many tokens as their messages say, the first of which is their number; completions without text."""

    eos_ids: tuple[int, ...] = ()

    def encode_prompt(self, messages: Sequence[Message]) -> IntArray:
        """See `Renderer.encode_prompt`: a message is its number of tokens, that of a prompt begins with the prompt's own."""
        sizes = [message.content.split("/") for message in messages]
        tokens = np.zeros(sum(int(size[-1]) for size in sizes), np.int32)
        tokens[0] = NUMBERED + int(sizes[0][0])
        return tokens

    def encode_observation(self, messages: Sequence[Message], observation: Message, *, closed: bool = True) -> IntArray:
        """See `Renderer.encode_observation`."""
        return np.zeros(int(observation.content), np.int32)

    def decode(self, tokens: IntArray) -> str:
        """Nothing."""
        return ""


class SimulatedJudge:
    """Scores 1 with the prompt's own probability of success, after a latency. Both are drawn with the attempt's own seed."""

    def __init__(self, latency: DistributionConfig, success: DistributionConfig, seed: int, faults: Faults) -> None:
        self._latency = latency
        self._success = success
        self._seed = seed
        self._faults = faults

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        """The verdict; none if the grader was lost."""
        seed = transcript.turns[-1].sampling.seed
        await asyncio.sleep(self._latency.draw(seed, "latency"))
        if self._faults.should_fail("reward.lost"):
            return Score(status=ScoreStatus.INFRASTRUCTURE, detail="the simulated grader was lost")
        chance = self._success.draw(self._seed, "success", prompt.id)
        return Score.of(float(_VERDICT.draw(seed, "verdict") < chance))


class LockStep:
    """A world server that steps all its environments at once: each turn takes as long as the slowest of those that are
    open. The baseline of asynchronous environments."""

    def __init__(self) -> None:
        self.open = 0
        self._seconds: list[float] = []
        self._done: asyncio.Future[None] | None = None

    async def take(self, seconds: float) -> None:
        """Wait until all open environments have come here, and then as long as the slowest takes."""
        loop = asyncio.get_running_loop()
        self._done = self._done or loop.create_future()
        done = self._done
        self._seconds.append(seconds)
        self.look()
        await asyncio.shield(done)

    def look(self) -> None:
        """Let the turn begin if nobody is missing."""
        if self._done is not None and len(self._seconds) >= self.open:
            loop, done = asyncio.get_running_loop(), self._done
            loop.call_later(max(self._seconds), self._end, done)
            self._seconds, self._done = [], None

    @staticmethod
    def _end(turn: asyncio.Future[None]) -> None:
        succeed(turn, None)


class SimulatedEnvironment:
    """A world that takes its time and says so many tokens; it ends after a number of turns. One of them a attempt."""

    def __init__(
        self, config: "EnvironmentConfig", seed: int, faults: Faults, lock_step: LockStep | None = None
    ) -> None:
        self._lock_step = lock_step
        self._config = config
        self._seed = seed
        self._faults = faults
        self._slow = 1.0
        self._open = False
        self._turns = 0

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """See `Environment.reset`."""
        self._slow = self._faults.slow_factor("environment.slow")
        if self._lock_step is not None:
            self._lock_step.open += 1
            self._open = True
        await self._take(self._config.reset_seconds.draw(self._seed, "reset"))
        return str(round(self._config.observation_tokens.draw(self._seed, "observation", 0))), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `Environment.step`."""
        self._turns += 1
        await self._take(self._config.step_seconds.draw(self._seed, "step", self._turns))
        over = self._turns >= self._config.turns.draw(self._seed, "turns")
        return (
            str(round(self._config.observation_tokens.draw(self._seed, "observation", self._turns))),
            0.0,
            over,
            False,
            {},
        )

    def close(self) -> None:
        """See `Environment.close`."""
        if self._lock_step is not None and self._open:
            self._lock_step.open -= 1
            self._lock_step.look()

    async def _take(self, seconds: float) -> None:
        if self._faults.should_fail("environment.fail"):
            raise RuntimeError("the simulated environment failed")
        if self._faults.should_fail("environment.hang"):
            await asyncio.Event().wait()
        if self._lock_step is not None:
            await self._lock_step.take(seconds * self._slow)
        else:
            await asyncio.sleep(seconds * self._slow)


class EnvironmentConfig(Config):
    """The simulated worlds of agents. An attempt has as many turns as `rollout.max_turns` allows."""

    reset_seconds: DistributionConfig = DistributionConfig(mean=0)
    step_seconds: DistributionConfig = DistributionConfig(mean=1)
    turns: DistributionConfig = DistributionConfig(mean=10)
    observation_tokens: DistributionConfig = DistributionConfig(mean=50, minimum=1)
    lock_step: bool = False
    """All environments step together, as long as the slowest takes: the baseline."""


def make_prompts(count: int, tokens: DistributionConfig, seed: int, task: str) -> list[Prompt]:
    """`count` prompts whose lengths are drawn from `tokens`."""
    lengths = (max(1, round(tokens.draw(seed, "prompt", number))) for number in range(count))
    return [
        Prompt(id=f"{task}/{n}", task=task, messages=(Message("user", f"{n}/{size}"),))
        for n, size in enumerate(lengths)
    ]

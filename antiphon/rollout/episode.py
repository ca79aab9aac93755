"""One attempt from prompt to scored trajectory: turns of generation, each followed by an observation if there is a world.

Tokens are appended and never rendered again: what was sampled is what is trained.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from antiphon.rollout.config import RolloutConfig
from antiphon.seeds import derive
from antiphon.tasks.base import Environment, Transcript
from antiphon.types import (
    MIXED_CACHE,
    AttemptId,
    AttemptStatus,
    Completion,
    Failure,
    FinishReason,
    GenerateRequest,
    IntArray,
    Message,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    ScoreStatus,
    Segment,
    Streams,
    Timing,
    Trajectory,
    TrajectoryMeta,
    Turn,
)

Generate = Callable[[GenerateRequest], Awaitable[Completion]]
Grade = Callable[[Prompt, Transcript], Awaitable[Score]]
MakeEnvironment = Callable[[], Environment]


class Tokenizer(Protocol):
    """What an episode needs of `tasks.rendering.Renderer`."""

    eos_ids: tuple[int, ...]

    def encode_prompt(self, messages: list[Message]) -> IntArray: ...

    def encode_observation(self, messages: list[Message], observation: Message, *, closed: bool = True) -> IntArray: ...

    def decode(self, tokens: IntArray) -> str: ...


class EnvironmentFailed(Exception):
    """The user's environment raised; becomes a `Failure`, never a score."""


@dataclass(slots=True)
class _Recording:
    """The segment as it grows."""

    messages: list[Message]
    tokens: list[IntArray] = field(default_factory=list)
    completions: list[Completion | None] = field(default_factory=list)  # None where tokens were not sampled
    turns: list[Turn] = field(default_factory=list)
    state_key: str | None = None  # of the state that the next action is taken in

    def add(self, tokens: IntArray, completion: Completion | None = None) -> None:
        self.tokens.append(tokens)
        self.completions.append(completion)

    @property
    def length(self) -> int:
        return sum(map(len, self.tokens))

    def sampled(self) -> list[Completion]:
        return [completion for completion in self.completions if completion is not None]

    def segment(self) -> Segment:
        def column(of: Callable[[Completion], Any], fill: Any, dtype: Any) -> Any:
            parts = [
                np.full(len(tokens), fill, dtype) if completion is None else of(completion)
                for tokens, completion in zip(self.tokens, self.completions, strict=True)
            ]
            return np.concatenate(parts)

        return Segment(
            tokens=np.concatenate(self.tokens),
            loss_mask=column(lambda c: np.ones(len(c.tokens), np.bool_), False, np.bool_),
            logprobs=column(lambda c: c.logprobs, 0.0, np.float32),
            versions=column(lambda c: c.versions, 0, np.int32),
            turns=tuple(self.turns),
            streams=Streams({MIXED_CACHE: column(lambda c: c.streams[MIXED_CACHE], False, np.bool_)}),
        )


class Episodes:
    """Runs attempts; each call of `run` is one, and cancelling it aborts what it is waiting for."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        generate: Generate,
        grade: Grade,
        environments: Mapping[str, MakeEnvironment],  # task -> factory, for tasks that have a world
        config: RolloutConfig,
        max_length: int,
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._generate = generate
        self._grade = grade
        self._environments = environments
        self._config = config
        self._max_length = max_length
        self._seed = seed

    async def run(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling, priority: int = 0
    ) -> Trajectory:
        """Play one attempt and score it. What goes wrong in an environment or a grader is in the result, not raised."""
        began = asyncio.get_running_loop().time()
        recording = _Recording(messages=list(prompt.messages))
        failure = None
        try:
            await self._play(recording, prompt, attempt, started, sampling, priority)
        except EnvironmentFailed as error:
            failure = Failure(source="environment", message=str(error))
        truncated = bool(recording.turns) and recording.turns[-1].finish is FinishReason.LENGTH
        if not recording.sampled():
            failure = failure or Failure(
                source="episode", message=f"a prompt of {recording.length} tokens leaves no room in {self._max_length}"
            )
        score = Score.ungraded("the attempt failed")
        if failure is None:
            score = await self._grade(prompt, Transcript(recording.messages, recording.turns, truncated))
            if score.status is not ScoreStatus.SCORED:
                failure = Failure(source="reward", message=score.detail)
        versions = [int(completion.versions.max()) for completion in recording.sampled() if len(completion.versions)]
        meta = TrajectoryMeta(
            id=attempt,
            prompt_id=prompt.id,
            task=prompt.task,
            started=started,
            newest=PolicyVersion(started.lineage, max(versions, default=started.n)),
            status=AttemptStatus.FAILED if failure else AttemptStatus.FINISHED,
            score=score,
            failure=failure,
            prompt_tokens=len(recording.tokens[0]) if recording.tokens else 0,
            completion_tokens=sum(len(completion.tokens) for completion in recording.sampled()),
            turns=len(recording.turns),
            truncated=truncated,
            timing=Timing(queued=began, started=began, finished=asyncio.get_running_loop().time()),
        )
        return Trajectory(meta=meta, payload=(recording.segment(),) if recording.sampled() else ())

    async def _play(
        self,
        recording: _Recording,
        prompt: Prompt,
        attempt: AttemptId,
        started: PolicyVersion,
        sampling: Sampling,
        priority: int,
    ) -> None:
        world = self._environments[prompt.task]() if prompt.task in self._environments else None
        try:
            if world is not None:
                observation, info = await _call(world.reset, derive(prompt.seed, "environment"))
                recording.state_key = info.get("state_key")
                recording.messages.append(Message("user", observation))
            recording.add(self._tokenizer.encode_prompt(recording.messages))
            for turn in range(self._config.max_turns):
                room = min(sampling.max_tokens, self._max_length - recording.length)
                if room <= 0:
                    return
                request = GenerateRequest(
                    id=f"{attempt}/{turn}",
                    tokens=np.concatenate(recording.tokens),
                    sampling=replace(
                        sampling, max_tokens=room, seed=derive(self._seed, prompt.id, prompt.epoch, str(attempt), turn)
                    ),
                    affinity=f"{attempt.group}" if turn == 0 else f"{attempt}",
                    priority=priority,
                    min_version=started.n,
                )
                if not await self._turn(recording, request, world, last=turn == self._config.max_turns - 1):
                    return
        finally:
            if world is not None:
                await _call(world.close)

    async def _turn(
        self, recording: _Recording, request: GenerateRequest, world: Environment | None, last: bool
    ) -> bool:
        """Generate once and act on it; return whether the episode goes on."""
        completion = await self._generate(request)
        start = recording.length
        recording.add(completion.tokens, completion)
        action = self._tokenizer.decode(completion.tokens)
        recording.messages.append(Message("assistant", action))
        turn = Turn(
            start=start,
            stop=recording.length,
            sampling=request.sampling,
            finish=completion.finish,
            timing=completion.timing,
        )
        if world is None:
            recording.turns.append(turn)
            return False
        observation, reward, terminated, truncated, info = await _call(world.step, action)
        recording.turns.append(replace(turn, reward=float(reward), state_key=recording.state_key))
        recording.state_key = info.get("state_key")
        if terminated or truncated or last or completion.finish is FinishReason.LENGTH:
            return False
        said = Message("user", observation)
        closed = len(completion.tokens) > 0 and int(completion.tokens[-1]) in self._tokenizer.eos_ids
        recording.add(self._tokenizer.encode_observation(recording.messages, said, closed=closed))
        recording.messages.append(said)
        return True


async def _call(method: Callable[..., Any], *args: Any) -> Any:
    """Call a user's environment, plain or asynchronous. The named boundary at which its errors become data."""
    try:
        result = method(*args)
        return await result if inspect.isawaitable(result) else result
    except Exception as error:
        raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error

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
MakeEnvironment = Callable[[Prompt], Environment]


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
    length: int = 0

    def add(self, tokens: IntArray, completion: Completion | None = None) -> None:
        self.tokens.append(tokens)
        self.completions.append(completion)
        self.length += len(tokens)

    def sampled(self) -> list[Completion]:
        return [completion for completion in self.completions if completion is not None]

    def segment(self) -> Segment:
        tokens = np.concatenate(self.tokens)
        length = len(tokens)
        loss_mask, mixed = np.zeros(length, np.bool_), np.zeros(length, np.bool_)
        logprobs, versions = np.zeros(length, np.float32), np.zeros(length, np.int32)
        start = 0
        for part, completion in zip(self.tokens, self.completions, strict=True):
            stop = start + len(part)
            if completion is not None:
                loss_mask[start:stop] = True
                logprobs[start:stop] = completion.logprobs
                versions[start:stop] = completion.versions
                mixed[start:stop] = completion.streams[MIXED_CACHE]
            start = stop
        return Segment(
            tokens=tokens,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            turns=tuple(self.turns),
            streams=Streams({MIXED_CACHE: mixed}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An attempt that was played and is not scored yet."""

    attempt: AttemptId
    prompt: Prompt
    started: PolicyVersion
    transcript: Transcript
    failure: Failure | None
    completion_tokens: int
    recording: _Recording
    timing: Timing

    def trajectory(self, score: Score, finished: float) -> Trajectory:
        """What it comes to with this score."""
        recording, failure = self.recording, self.failure
        if failure is None and score.status is not ScoreStatus.SCORED:
            failure = Failure(source="reward", message=score.detail)
        sampled = recording.sampled()
        newest = max((int(c.versions.max()) for c in sampled if len(c.versions)), default=self.started.n)
        meta = TrajectoryMeta(
            id=self.attempt,
            prompt_id=self.prompt.id,
            task=self.prompt.task,
            started=self.started,
            newest=PolicyVersion(self.started.lineage, newest),
            status=AttemptStatus.FAILED if failure else AttemptStatus.FINISHED,
            score=score,
            failure=failure,
            prompt_tokens=len(recording.tokens[0]) if recording.tokens else 0,
            completion_tokens=self.completion_tokens,
            turns=len(recording.turns),
            truncated=self.transcript.truncated,
            timing=Timing(queued=self.timing.queued, started=self.timing.started, finished=finished),
        )
        return Trajectory(meta=meta, payload=(recording.segment(),) if sampled else ())


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
        self._sampling = config.sampling.sampling()
        self._max_length = max_length
        self._seed = seed
        self._last: tuple[Prompt, IntArray] | None = None

    async def run(
        self,
        prompt: Prompt,
        attempt: AttemptId,
        started: PolicyVersion,
        sampling: Sampling | None = None,
        priority: int = 0,
    ) -> Trajectory:
        """Play one attempt and score it. What goes wrong in an environment or a grader is in the result, not raised.
        `sampling` is by default what the configuration says."""
        return await self.score(await self.play(prompt, attempt, started, sampling, priority))

    async def play(
        self,
        prompt: Prompt,
        attempt: AttemptId,
        started: PolicyVersion,
        sampling: Sampling | None = None,
        priority: int = 0,
    ) -> Played:
        """Play one attempt to its end."""
        began = asyncio.get_running_loop().time()
        recording = _Recording(messages=list(prompt.messages))
        failure = None
        try:
            await self._play(recording, prompt, attempt, started, sampling or self._sampling, priority)
        except EnvironmentFailed as error:
            failure = Failure(source="environment", message=str(error))
        truncated = bool(recording.turns) and recording.turns[-1].finish is FinishReason.LENGTH
        if not recording.sampled():
            failure = failure or Failure(
                source="episode", message=f"a prompt of {recording.length} tokens leaves no room in {self._max_length}"
            )
        return Played(
            attempt=attempt,
            prompt=prompt,
            started=started,
            transcript=Transcript(recording.messages, recording.turns, truncated),
            failure=failure,
            completion_tokens=sum(len(completion.tokens) for completion in recording.sampled()),
            recording=recording,
            timing=Timing(queued=began, started=began, finished=asyncio.get_running_loop().time()),
        )

    async def score(self, played: Played) -> Trajectory:
        """Score what was played, unless it had failed."""
        if played.failure is None:
            score = await self._grade(played.prompt, played.transcript)
        else:
            score = Score.ungraded("the attempt failed")
        return played.trajectory(score, asyncio.get_running_loop().time())

    async def _play(
        self,
        recording: _Recording,
        prompt: Prompt,
        attempt: AttemptId,
        started: PolicyVersion,
        sampling: Sampling,
        priority: int,
    ) -> None:
        world = self._environments[prompt.task](prompt) if prompt.task in self._environments else None
        try:
            if world is not None:
                observation, info = await self._call(world.reset, derive(prompt.seed, "environment"))
                recording.state_key = info.get("state_key")
                recording.messages.append(Message("user", observation))
                tokens = self._tokenizer.encode_prompt(recording.messages)
            else:
                tokens = self._encoded(prompt)
            recording.add(tokens)
            name = str(attempt)
            for turn in range(self._config.max_turns):
                room = min(sampling.max_tokens, self._max_length - recording.length)
                if room <= 0:
                    return
                request = GenerateRequest(
                    id=f"{name}/{turn}",
                    tokens=np.concatenate(recording.tokens),
                    sampling=replace(
                        sampling, max_tokens=room, seed=derive(self._seed, prompt.id, prompt.epoch, name, turn)
                    ),
                    affinity=(name, str(attempt.group)),
                    priority=priority,
                    min_version=started.n,
                )
                if not await self._turn(recording, request, world, last=turn == self._config.max_turns - 1):
                    return
        finally:
            if world is not None:
                await self._call(world.close)

    def _encoded(self, prompt: Prompt) -> IntArray:
        """The prompt's tokens. Siblings begin one after another, so only the last is kept."""
        if self._last is None or self._last[0] is not prompt:
            self._last = prompt, self._tokenizer.encode_prompt(list(prompt.messages))
        return self._last[1]

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
            engines=completion.engines,
        )
        if world is None:
            recording.turns.append(turn)
            return False
        observation, reward, terminated, truncated, info = await self._call(world.step, action)
        recording.turns.append(replace(turn, reward=float(reward), state_key=recording.state_key))
        recording.state_key = info.get("state_key")
        if terminated or truncated or last or completion.finish is FinishReason.LENGTH:
            return False
        said = Message("user", observation)
        closed = len(completion.tokens) > 0 and int(completion.tokens[-1]) in self._tokenizer.eos_ids
        recording.add(self._tokenizer.encode_observation(recording.messages, said, closed=closed))
        recording.messages.append(said)
        return True

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a user's environment, plain or asynchronous. The named boundary at which its errors, and its silence,
        become data."""
        seconds = self._config.environment_timeout
        limit = asyncio.timeout(seconds)
        try:
            result = method(*args)
            if not inspect.isawaitable(result):
                return result
            async with limit:
                return await result
        except Exception as error:
            late = f"{method.__name__} took more than {seconds:g} s" if limit.expired() else ""
            raise EnvironmentFailed(late or f"{type(error).__name__}: {error}") from error

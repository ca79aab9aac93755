"""One attempt from prompt to scored trajectory: turns of generation, each followed by an observation if there is a world.

Tokens are appended and never rendered again: what was sampled is what is trained.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol, TypeVar

import numpy as np

from antiphon.core.errors import DataError, RequestError
from antiphon.core.rng import derive
from antiphon.core.types import (
    AttemptId,
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
    Segment,
    Streams,
    Timing,
    Trajectory,
    Turn,
)
from antiphon.rollout.agents import Outcome
from antiphon.rollout.attempt import UnscoredAttempt
from antiphon.rollout.config import RolloutConfig
from antiphon.tasks.base import Environment, Transcript, as_reset, as_step

Generate = Callable[[GenerateRequest], Awaitable[Completion]]
Grade = Callable[[Prompt, Transcript], Awaitable[Score]]
EnvironmentFactory = Callable[[Prompt], Environment]
RunAgent = Callable[..., Awaitable[Outcome]]  # `agents.run_agent` of one agent
T = TypeVar("T")


class Tokenizer(Protocol):
    """What an episode needs of `tasks.rendering.Renderer`."""

    eos_ids: tuple[int, ...]

    def encode_prompt(self, messages: list[Message]) -> IntArray: ...

    def encode_observation(self, messages: list[Message], observation: Message, *, closed: bool = True) -> IntArray: ...

    def decode(self, tokens: IntArray) -> str: ...


# A log-prob above this is none, rounding allowed for; one at or below `LEAST` is of a token that nothing draws: servers that
# cannot write minus infinity write -9999.
MOST, LEAST = 0.01, -1000.0

# What an environment may say in `info` of the last action (could it be read and done; did it change anything) and of the end.
MEASURES = frozenset({"valid", "effective", "success"})


class EnvironmentFailed(Exception):
    """The user's environment raised; becomes a `Failure`, never a score."""


class PromptFailed(Exception):
    """Messages that cannot become a prompt; becomes a `Failure`, never a score."""


@dataclass(slots=True)
class _Sample:
    """A segment as it grows."""

    tokens: list[IntArray] = field(default_factory=list)
    completions: list[Completion | None] = field(default_factory=list)  # None where tokens were not sampled
    turns: list[Turn] = field(default_factory=list)
    length: int = 0

    def add(self, tokens: IntArray, completion: Completion | None = None) -> None:
        self.tokens.append(tokens)
        self.completions.append(completion)
        self.length += len(tokens)

    @property
    def sampled(self) -> bool:
        """Whether anything in it was; a prompt alone is none to train on."""
        return any(completion is not None for completion in self.completions)

    def segment(self, parent: int | None) -> Segment:
        """Return the segment, up to the last completion: an observation that nothing was sampled after is cut."""
        count = 1 + max(at for at, completion in enumerate(self.completions) if completion is not None)
        tokens = np.concatenate(self.tokens[:count])
        length = len(tokens)
        loss_mask = np.zeros(length, np.bool_)
        logprobs, versions = np.zeros(length, np.float32), np.zeros(length, np.int32)
        streams: dict[int, Streams] = {}
        start = 0
        for part, completion in zip(self.tokens[:count], self.completions[:count], strict=True):
            stop = start + len(part)
            if completion is not None:
                loss_mask[start:stop] = True
                logprobs[start:stop] = completion.logprobs
                versions[start:stop] = completion.versions
                streams[start] = completion.streams
            start = stop
        return Segment(
            tokens=tokens,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            turns=tuple(self.turns),
            streams=Streams.placed(length, streams),
            parent=parent,
        )


@dataclass(slots=True)
class _Recording:
    """An attempt as it goes on."""

    messages: list[Message]
    samples: list[_Sample] = field(default_factory=list)
    state_key: str | None = None  # of the state that the next action is taken in
    said: dict[str, list[float]] = field(default_factory=dict)  # what the environment said of the turns: see `MEASURES`
    truncated: bool = False  # see `TrajectoryMeta.truncated`

    @property
    def sample(self) -> _Sample:
        """The one that grows."""
        return self.samples[-1]

    def tokens(self) -> int:
        """Sampled so far."""
        return sum(turn.stop - turn.start for sample in self.samples for turn in sample.turns)

    def note(self, info: Mapping[str, Any]) -> None:
        """Take in what an environment says beside its observation."""
        self.state_key = _key(info)
        for name in MEASURES & info.keys():
            self.said.setdefault(name, []).append(float(bool(info[name])))

    def go_on(self, prompt: IntArray) -> None:
        """The next prompt, rendered anew: it extends the sample that grows, token for token, or begins another."""
        if self.samples:
            known = np.concatenate(self.sample.tokens)
            if len(prompt) >= len(known) and np.array_equal(prompt[: len(known)], known):
                self.sample.add(prompt[len(known) :])
                return
        self.begin(prompt)

    def begin(self, prompt: IntArray) -> None:
        """A prompt that begins a sample."""
        self.samples.append(_Sample())
        self.sample.add(prompt)

    def segments(self) -> tuple[Segment, ...]:
        """What can be trained on."""
        whole = [sample for sample in self.samples if sample.sampled]
        return tuple(sample.segment(number - 1 if number else None) for number, sample in enumerate(whole))

    def measures(self) -> dict[str, float]:
        """Of the attempt: turns, samples, and means over its turns of what its environment said; success is that of the end."""
        found = {name: fmean(values) for name, values in self.said.items()}
        if "success" in self.said:
            found["success"] = self.said["success"][-1]
        whole = [sample for sample in self.samples if sample.sampled]
        return found | {"turns": float(sum(len(sample.turns) for sample in whole)), "samples": float(len(whole))}


class EpisodeRunner:
    """Runs attempts; each call of `run` is one, and cancelling it aborts what it is waiting for."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        generate: Generate,
        grade: Grade,
        environments: Mapping[str, EnvironmentFactory],  # task -> factory, for tasks that have a world
        agents: Mapping[str, RunAgent] | None = None,  # task -> what plays an attempt, for tasks that have an agent
        config: RolloutConfig,
        max_length: int,
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._generate = generate
        self._grade = grade
        self._environments = environments
        self._agents = agents or {}
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
        return await self.score(await self.generate(prompt, attempt, started, sampling, priority))

    async def generate(
        self,
        prompt: Prompt,
        attempt: AttemptId,
        started: PolicyVersion,
        sampling: Sampling | None = None,
        priority: int = 0,
    ) -> UnscoredAttempt:
        """Play one attempt to its end."""
        began = asyncio.get_running_loop().time()
        if prompt.task in self._agents:
            outcome = await self._agents[prompt.task](
                prompt, attempt, started, sampling or self._sampling, priority=priority
            )
            segments = outcome.captured.segments
            return UnscoredAttempt(
                attempt=attempt,
                prompt=prompt,
                started=started,
                transcript=outcome.transcript,
                segments=segments,
                measures=outcome.measures,
                prompt_tokens=segments[0].turns[0].start if segments else 0,
                failure=outcome.failure or _find_bad_logprob(segments),
                timing=Timing(queued=began, started=began, finished=asyncio.get_running_loop().time()),
            )
        recording = _Recording(messages=list(prompt.messages))
        failure = None
        try:
            await self._play(recording, prompt, attempt, started, sampling or self._sampling, priority)
        except EnvironmentFailed as error:
            failure = Failure(source="environment", message=str(error))
        except PromptFailed as error:
            failure = Failure(source="episode", message=str(error))
        except RequestError as error:
            failure = Failure(source="engine", message=str(error))
        segments = recording.segments()
        if not segments and failure is None:
            message = f"a prompt of {recording.sample.length} tokens leaves no room in {self._max_length}"
            failure = Failure(source="episode", message=message)
        failure = failure or _find_bad_logprob(segments)
        turns = [turn for segment in segments for turn in segment.turns]
        return UnscoredAttempt(
            attempt=attempt,
            prompt=prompt,
            started=started,
            transcript=Transcript(recording.messages, turns, recording.truncated),
            segments=segments,
            measures=recording.measures() if prompt.task in self._environments else {},
            prompt_tokens=len(recording.samples[0].tokens[0]) if recording.samples else 0,
            failure=failure,
            timing=Timing(queued=began, started=began, finished=asyncio.get_running_loop().time()),
        )

    async def score(self, played: UnscoredAttempt) -> Trajectory:
        """Score what was played, unless it had failed."""
        if played.failure is None:
            score = await self._grade(played.prompt, played.transcript)
            score = replace(score, parts={**played.measures, **score.parts})
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
        make, clock = self._environments.get(prompt.task), asyncio.get_running_loop().time
        world = None if make is None else await self._call(_as_it_is, make, prompt)
        try:
            if world is not None:
                observation, info = await self._call(as_reset, world.reset, derive(prompt.seed, "environment"))
                recording.state_key = _key(info)
                recording.messages.append(Message("user", observation))
            recording.begin(self._encoded(prompt) if world is None else self._encode_prompt(recording.messages))
            name, begun = str(attempt), clock()
            for turn in range(self._config.max_turns):
                room = self._room(recording, sampling)
                late = turn and 0 < self._config.episode_seconds < clock() - begun
                if room <= 0 or late:
                    recording.truncated = True
                    return
                request = GenerateRequest(
                    id=f"{name}/{turn}",
                    tokens=np.concatenate(recording.sample.tokens),
                    sampling=replace(
                        sampling, max_tokens=room, seed=derive(self._seed, prompt.id, prompt.epoch, name, turn)
                    ),
                    affinity=(name, str(attempt.group)),
                    priority=priority,
                    min_version=started.n,
                    task=prompt.task,
                )
                if not await self._turn(recording, request, world, last=turn == self._config.max_turns - 1):
                    return
                self._continue(recording, prompt)
        finally:
            if world is not None:
                await self._call(_as_it_is, world.close)

    def _room(self, recording: _Recording, sampling: Sampling) -> int:
        """Tokens that the next turn may have."""
        room = min(sampling.max_tokens, self._max_length - recording.sample.length)
        limit = self._config.episode_tokens
        return min(room, limit - recording.tokens()) if limit else room

    def _continue(self, recording: _Recording, prompt: Prompt) -> None:
        """Put what was said last, an observation, to the policy."""
        *before, observation = recording.messages
        if self._config.samples == "trajectory":
            last = int(recording.sample.tokens[-1][-1]) if len(recording.sample.tokens[-1]) else None
            closed = last in self._tokenizer.eos_ids
            recording.sample.add(_tokens(self._tokenizer.encode_observation, before, observation, closed=closed))
            return
        talk = recording.messages[len(prompt.messages) :]
        if self._config.history is not None:
            talk = talk[-2 * self._config.history - 1 :]  # each turn before is an observation and an action
        shown = self._encode_prompt([*prompt.messages, *talk])
        if self._config.samples == "joined":
            recording.go_on(shown)
        else:
            recording.begin(shown)

    def _encoded(self, prompt: Prompt) -> IntArray:
        """The prompt's tokens. Siblings begin one after another, so only the last is kept."""
        if self._last is None or self._last[0] is not prompt:
            self._last = prompt, self._encode_prompt(list(prompt.messages))
        return self._last[1]

    def _encode_prompt(self, messages: list[Message]) -> IntArray:
        """Return the tokens of a prompt; `PromptFailed` if there are none."""
        tokens = _tokens(self._tokenizer.encode_prompt, messages)
        if not len(tokens):
            raise PromptFailed(f"the prompt has no tokens: its {len(messages)} messages are empty")
        return tokens

    async def _turn(
        self, recording: _Recording, request: GenerateRequest, world: Environment | None, last: bool
    ) -> bool:
        """Generate once and act on it; return whether the episode goes on."""
        completion = await self._generate(request)
        sample = recording.sample
        start = sample.length
        sample.add(completion.tokens, completion)
        action = self._tokenizer.decode(completion.tokens)
        recording.messages.append(Message("assistant", action))
        turn = Turn(
            start=start,
            stop=sample.length,
            sampling=request.sampling,
            finish=completion.finish,
            timing=completion.timing,
            engines=completion.engines,
        )
        recording.truncated = completion.finish is FinishReason.LENGTH
        if world is None:
            sample.turns.append(turn)
            return False
        key = recording.state_key
        observation, reward, terminated, truncated, info = await self._call(as_step, world.step, action)
        sample.turns.append(replace(turn, reward=float(reward), state_key=key))
        recording.note(info)
        if terminated or truncated or last or recording.truncated:
            recording.truncated = recording.truncated or not terminated
            return False
        recording.messages.append(Message("user", observation))
        return True

    async def _call(self, read: Callable[[Any], T], method: Callable[..., Any], *args: Any) -> T:
        """Call a user's environment, plain or asynchronous, and `read` what it returns. The named boundary at which its errors,
        and its silence, become data."""
        seconds = self._config.environment_timeout
        limit = asyncio.timeout(seconds)
        try:
            result = method(*args)
            if inspect.isawaitable(result):
                async with limit:
                    result = await result
            return read(result)
        except Exception as error:
            late = f"{method.__name__} took more than {seconds:g} s" if limit.expired() else ""
            raise EnvironmentFailed(late or f"{type(error).__name__}: {error}") from error


def _find_bad_logprob(segments: Sequence[Segment]) -> Failure | None:
    """Return the failure of an attempt of which some sampled token has no possible log-prob; None if all of them have one."""
    for number, segment in enumerate(segments):
        told = segment.logprobs
        bad = np.flatnonzero(segment.loss_mask & ~((told <= MOST) & (told > LEAST)))  # of a NaN both are false
        if len(bad):
            at = int(bad[0])
            message = (
                f"its engine gave token {at} of sample {number} the log-prob {told[at]:g}, which no sampled token has"
            )
            return Failure(source="engine", message=message)
    return None


def _tokens(encode: Callable[..., IntArray], *args: Any, **options: Any) -> IntArray:
    """Call a method of the tokenizer. What it cannot encode, or its template refuses, is a failure of this attempt alone."""
    try:
        return encode(*args, **options)
    except DataError as error:
        raise PromptFailed(str(error)) from error


def _as_it_is(told: Any) -> Any:
    return told


def _key(info: Mapping[str, Any]) -> str | None:
    key = info.get("state_key")
    return None if key is None else str(key)

"""Attempts by a model behind an API, which is sent messages and returns text: they have no tokens to train on."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from antiphon.core.rng import derive
from antiphon.core.types import (
    AttemptId,
    Failure,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    Sampling,
    Timing,
    Trajectory,
    Turn,
)
from antiphon.engines.chat_client import ChatReply, ChatRequestError
from antiphon.rollout.attempt import UnscoredAttempt
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.environment_call import EnvironmentCallError, call_environment, unparsed
from antiphon.rollout.episode import ScoreTranscript, score_attempt
from antiphon.rollout.episode_loop import EnvironmentFactory
from antiphon.rollout.episode_recording import EpisodeRecording, observation_message
from antiphon.tasks.base import Transcript, as_reset, as_step

Ask = Callable[[Sequence[Message], Sampling], Awaitable[ChatReply]]  # raises `ChatRequestError`


class ChatEpisodes:
    """Runs attempts with the environments, rewards and limits that a trained policy has."""

    def __init__(
        self, ask: Ask, config: RolloutConfig, grade: ScoreTranscript, environments: Mapping[str, EnvironmentFactory]
    ) -> None:
        """Create a runner.

        Args:
            ask: Asks the model.
            config: Limits of an episode, and how many turns before the last are sent (`history`).
            grade: Scores a transcript.
            environments: Factory by task, for tasks that have an environment.
        """
        self._ask = ask
        self._config = config
        self._grade = grade
        self._environments = environments
        limit = config.environment_concurrency
        self._slots = asyncio.Semaphore(limit) if limit else nullcontext()

    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling
    ) -> UnscoredAttempt:
        """Run one attempt without scoring it. A failure of the model or the environment is in the result, not raised."""
        began = asyncio.get_running_loop().time()
        recording, turns, failure = EpisodeRecording(messages=list(prompt.messages)), list[Turn](), None
        try:
            await self._play(prompt, sampling, recording, turns)
        except EnvironmentCallError as error:
            failure = Failure(source="environment", message=str(error))
        except ChatRequestError as error:
            failure = Failure(source="engine", message=str(error))
        return UnscoredAttempt(
            attempt=attempt,
            prompt=prompt,
            started=started,
            transcript=Transcript(recording.messages, turns, recording.truncated),
            segments=(),
            measures=recording.environment_measures(len(turns)) if prompt.task in self._environments else {},
            prompt_tokens=0,
            failure=failure,
            timing=Timing(queued=began, started=began, finished=asyncio.get_running_loop().time()),
        )

    async def score(self, unscored: UnscoredAttempt) -> Trajectory:
        """Score an attempt, unless it has failed."""
        return await score_attempt(unscored, self._grade)

    async def _play(self, prompt: Prompt, sampling: Sampling, recording: EpisodeRecording, turns: list[Turn]) -> None:
        """Let the model answer, or take turns with the task's environment until one of them ends the episode."""
        make = self._environments.get(prompt.task)
        if make is None:
            turns.append(await self._answer(prompt, sampling, recording))
            return
        environment = await self._call(unparsed, make, prompt)
        clock = asyncio.get_running_loop().time
        try:
            observation, info = await self._queue(as_reset, environment.reset, derive(prompt.seed, "environment"))
            recording.set_state(info)
            began, limit = clock(), self._config.episode_seconds
            for _ in range(self._config.max_turns):
                recording.messages.append(observation_message(observation, info))
                if turns and 0 < limit < clock() - began:
                    break
                turn, state_key = await self._answer(prompt, sampling, recording), recording.state_key
                action = recording.messages[-1].content
                observation, reward, terminated, truncated, info = await self._queue(as_step, environment.step, action)
                turns.append(replace(turn, reward=float(reward), state_key=state_key))
                recording.add_info(info)
                if terminated or truncated or recording.truncated:
                    recording.truncated = recording.truncated or not terminated
                    return
            recording.truncated = True
        finally:
            await self._call(unparsed, environment.close)

    async def _answer(self, prompt: Prompt, sampling: Sampling, recording: EpisodeRecording) -> Turn:
        """Add the model's reply to the messages."""
        conversation = recording.messages[len(prompt.messages) :]
        if self._config.history is not None:
            conversation = conversation[-2 * self._config.history - 1 :]  # an observation and an action for each turn
        reply = await self._ask([*prompt.messages, *conversation], sampling)
        recording.messages.append(Message("assistant", reply.content))
        recording.truncated = reply.truncated
        return Turn(
            start=0, stop=0, sampling=sampling, finish=FinishReason.LENGTH if reply.truncated else FinishReason.STOP
        )

    async def _queue(self, parse: Callable[[Any], Any], method: Callable[..., Any], *args: Any) -> Any:
        async with self._slots:
            return await self._call(parse, method, *args)

    async def _call(self, parse: Callable[[Any], Any], method: Callable[..., Any], *args: Any) -> Any:
        return await call_environment(self._config.environment_timeout, parse, method, *args)

"""The turns of one episode: a completion, and if the task has an environment a step of it, until one side ends it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from antiphon.core.rng import derive
from antiphon.core.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Message,
    Prompt,
    Turn,
)
from antiphon.rollout.attempt import AttemptInputs
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.environment_call import call_environment, unparsed
from antiphon.rollout.episode_recording import EpisodeRecording, observation_message
from antiphon.rollout.prompt_encoding import PromptEncoder
from antiphon.tasks.base import Environment, as_reset, as_step

Generate = Callable[[GenerateRequest], Awaitable[Completion]]
EnvironmentFactory = Callable[[Prompt], Environment]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """Objects and settings shared by all episodes of a run."""

    encoder: PromptEncoder
    generate: Generate
    config: RolloutConfig
    max_length: int  # most tokens of a segment
    seed: int
    step_slots: "asyncio.Semaphore | nullcontext[None]" = field(init=False)  # held while an environment resets or steps

    def __post_init__(self) -> None:
        limit = self.config.environment_concurrency
        object.__setattr__(self, "step_slots", asyncio.Semaphore(limit) if limit else nullcontext())


class EpisodeLoop:
    """One episode. After `run`, also after one that raised, `recording` has what there is."""

    def __init__(
        self, context: EpisodeContext, inputs: AttemptInputs, make_environment: EnvironmentFactory | None
    ) -> None:
        self.recording = EpisodeRecording(messages=list(inputs.prompt.messages))
        self._context = context
        self._config = context.config
        self._inputs = inputs
        self._name = str(inputs.attempt)
        self._make_environment = make_environment
        self._environment: Environment | None = None

    async def run(self) -> None:
        """Run the episode to its end.

        Raises:
            EnvironmentCallError: If the environment raises, or takes too long.
            PromptError: If a prompt cannot be encoded.
            RequestError: If a request is invalid.
            UnsupportedError: If the engine does not support what a request asks for.
        """
        try:
            await self._begin()
            clock = asyncio.get_running_loop().time
            began = clock()
            for turn in range(self._config.max_turns):
                room = self._tokens_left()
                late = turn and 0 < self._config.episode_seconds < clock() - began
                if room <= 0 or late:
                    self.recording.truncated = True
                    return
                if not await self._take_turn(self._request(turn, room), last=turn == self._config.max_turns - 1):
                    return
                self._prompt_with_observation()
        finally:
            if self._environment is not None:
                await self._call(unparsed, self._environment.close)

    async def _begin(self) -> None:
        prompt, recording, encoder = self._inputs.prompt, self.recording, self._context.encoder
        if self._make_environment is None:
            recording.begin_segment(encoder.encode_task(prompt))
            return
        self._environment = await self._call(unparsed, self._make_environment, prompt)
        seed = derive(prompt.seed, "environment")
        observation, info = await self._queue(as_reset, self._environment.reset, seed)
        recording.set_state(info)
        recording.messages.append(observation_message(observation, info))
        recording.begin_segment(encoder.encode(recording.messages))

    def _tokens_left(self) -> int:
        """Return how many tokens the next turn may sample."""
        room = min(self._inputs.sampling.max_tokens, self._context.max_length - self.recording.current.length)
        limit = self._config.episode_tokens
        return min(room, limit - self.recording.sampled_tokens()) if limit else room

    def _request(self, turn: int, max_tokens: int) -> GenerateRequest:
        inputs, prompt = self._inputs, self._inputs.prompt
        seed = derive(self._context.seed, prompt.id, prompt.epoch, self._name, turn)
        return GenerateRequest(
            id=f"{self._name}/{turn}",
            tokens=np.concatenate(self.recording.current.tokens),
            sampling=replace(inputs.sampling, max_tokens=max_tokens, seed=seed),
            affinity=(self._name, str(inputs.attempt.group)),
            priority=inputs.priority,
            min_version=inputs.started.n,
            task=prompt.task,
            attachments=tuple(self.recording.current.images),
        )

    async def _take_turn(self, request: GenerateRequest, *, last: bool) -> bool:
        """Generate a completion and pass it to the environment; return True if the episode goes on."""
        recording = self.recording
        completion = await self._context.generate(request)
        segment = recording.current
        start = segment.length
        segment.add(completion.tokens, completion)
        action = self._context.encoder.tokenizer.decode(completion.tokens)
        recording.messages.append(Message("assistant", action))
        turn = Turn(
            start=start,
            stop=segment.length,
            sampling=request.sampling,
            finish=completion.finish,
            timing=completion.timing,
            engines=completion.engines,
        )
        recording.truncated = completion.finish is FinishReason.LENGTH
        if self._environment is None:
            segment.turns.append(turn)
            return False
        state_key = recording.state_key
        observation, reward, terminated, truncated, info = await self._queue(as_step, self._environment.step, action)
        segment.turns.append(replace(turn, reward=float(reward), state_key=state_key))
        recording.add_info(info)
        if terminated or truncated or last or recording.truncated:
            recording.truncated = recording.truncated or not terminated
            return False
        recording.messages.append(observation_message(observation, info))
        return True

    def _prompt_with_observation(self) -> None:
        """Make the next prompt from the last message, an observation, in the way that `samples` says."""
        recording, encoder, task = self.recording, self._context.encoder, self._inputs.prompt
        if self._config.samples == "trajectory":
            *before, observation = recording.messages
            completion = recording.current.tokens[-1]
            last_token = int(completion[-1]) if len(completion) else None
            encoded = encoder.encode_observation(before, observation, last_token)
            recording.current.add(encoded.tokens, images=encoded.images)
            return
        conversation = recording.messages[len(task.messages) :]
        if self._config.history is not None:
            conversation = conversation[-2 * self._config.history - 1 :]  # an observation and an action for each turn
        prompt = encoder.encode([*task.messages, *conversation])
        if self._config.samples == "joined":
            recording.continue_with(prompt)
        else:
            recording.begin_segment(prompt)

    async def _queue(self, parse: Callable[[Any], Any], method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the environment once a slot is free."""
        async with self._context.step_slots:
            return await self._call(parse, method, *args)

    async def _call(self, parse: Callable[[Any], Any], method: Callable[..., Any], *args: Any) -> Any:
        return await call_environment(self._config.environment_timeout, parse, method, *args)

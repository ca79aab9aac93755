"""The session of an agent's attempt: tokens are sampled as the run's configuration says, and all are recorded."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from typing_extensions import override

from antiphon.core.errors import AntiphonError
from antiphon.core.rng import derive
from antiphon.core.types import (
    FinishReason,
    GenerateRequest,
    IntArray,
    Message,
    Sampling,
    Segment,
)
from antiphon.rollout.attempt import AttemptInputs
from antiphon.rollout.gateway.capture import CaptureCounts, ConversationRecorder, PromptDraft
from antiphon.rollout.gateway.chat import CONTEXT_LENGTH, MAX_TURNS, ApiError, ChatRequest, CompletionRequest, Reply
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.rollout.gateway.sessions import OnText, PreparedRequest, Session

R = TypeVar("R", bound=ChatRequest)


@dataclass(frozen=True, slots=True)
class CapturedAttempt:
    """The recorded conversation of an attempt."""

    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    """The conversation that was answered last, with its reply."""
    counts: CaptureCounts
    error: AntiphonError | None = None
    """The error of an engine: it says nothing about the agent."""
    truncated: bool = False
    """The last request was refused because no room or no turn was left, or its reply hit its limit of tokens."""


class AttemptSession(Session):
    """The session of an agent's attempt at a prompt. All tokens are recorded."""

    def __init__(
        self,
        model: ServedModel,
        inputs: AttemptInputs,
        *,
        max_turns: int = 0,
        seed: int = 0,
    ) -> None:
        """Begin a session.

        Args:
            model: The model.
            inputs: Inputs of the attempt. Its sampling holds whatever the agent asks for.
            max_turns: Most replies; 0 means no limit.
            seed: Seed of the run.
        """
        super().__init__(model)
        self._max_turns = max_turns
        self._inputs = inputs
        self._name, self._group = str(inputs.attempt), str(inputs.attempt.group)
        self._seed = seed
        self._recorder = ConversationRecorder(model.tokenizer)
        self._messages: tuple[Message, ...] = ()
        self._overridden: Counter[str] = Counter()
        self._cancelled = self._unreadable = 0
        self._turns = 0  # replies that were recorded, and requests in flight
        self._truncated = False
        self.error: AntiphonError | None = None
        """The error of an engine."""

    def captured(self) -> CapturedAttempt:
        """Return what was recorded so far."""
        segments = self._recorder.segments()
        counts = self._recorder.counts(
            segments=len(segments),
            cancelled=self._cancelled,
            unreadable_calls=self._unreadable,
            overridden=dict(self._overridden),
        )
        return CapturedAttempt(segments, self._messages, counts, self.error, self._truncated)

    @override
    def prepare(self, chat: ChatRequest) -> PreparedRequest:
        return self._prepare(super().prepare, chat)

    @override
    def prepare_completion(self, request: CompletionRequest) -> PreparedRequest:
        if len(request.prompts) != 1:
            raise ApiError("prompt: an attempt completes one text a request", code="unsupported_parameter")
        prepared = self._prepare(super().prepare_completion, request)
        draft = self._recorder.start_text(prepared.prompt)  # it may go on from a turn with images
        requests = [replace(request, attachments=draft.images) for request in prepared.requests]
        return replace(prepared, draft=draft, requests=requests)

    def _prepare(self, prepare: Callable[[R], PreparedRequest], request: R) -> PreparedRequest:
        try:
            prepared = prepare(request)
        except ApiError as error:
            self._truncated = self._truncated or error.code == CONTEXT_LENGTH
            raise
        self._require_turns(len(prepared.requests))
        return prepared

    def _require_turns(self, count: int) -> None:
        if self._max_turns and self._turns + count > self._max_turns:
            self._truncated = True
            raise ApiError(f"the attempt has had its {self._max_turns} turns", 403, MAX_TURNS)

    @override
    def sampling(self, chat: ChatRequest, room: int) -> Sampling:
        """Return the configured sampling, with the client's stop strings, and its token limit if that is lower."""
        held, wanted = self._inputs.sampling, chat.max_tokens or room
        self._overridden.update(
            name for name, value in chat.requested_sampling.items() if not self._is_configured(name, value)
        )
        if chat.max_tokens is not None and wanted > held.max_tokens:
            self._overridden["max_tokens"] += 1
        limit = min(held.max_tokens, room, wanted)
        return replace(held, max_tokens=limit, stop=tuple(dict.fromkeys([*held.stop, *chat.stop])))

    def _is_configured(self, name: str, value: float) -> bool:
        """Return True if a setting that the client asks for is the configured one anyway. Seeds are the run's."""
        return name != "seed" and value == getattr(self._inputs.sampling, name)

    @override
    def request(self, prompt: IntArray, sampling: Sampling, choice: int) -> GenerateRequest:
        number = next(self._numbers)
        prompt_id, epoch = self._inputs.prompt.id, self._inputs.prompt.epoch
        seed = derive(self._seed, prompt_id, epoch, self._name, number)
        return GenerateRequest(
            id=f"{self._name}/{number}",
            tokens=prompt,
            sampling=replace(sampling, seed=seed),
            affinity=(self._name, self._group),
            priority=self._inputs.priority,
            min_version=self._inputs.started.n,
            task=self._inputs.prompt.task,
        )

    @override
    def draft(self, chat: ChatRequest, forced: str) -> PromptDraft:
        return self._recorder.start_turn(chat.messages, chat.tools, forced)

    @override
    def record(self, prepared: PreparedRequest, request: GenerateRequest, reply: Reply) -> None:
        self._unreadable += not reply.readable
        self._truncated = reply.completion.finish is FinishReason.LENGTH
        assert prepared.draft is not None
        self._recorder.record_reply(prepared.draft, reply.completion, request.sampling, reply.message)
        self._turns += 1
        chat = prepared.chat
        text = (Message("user", chat.texts[0]),) if isinstance(chat, CompletionRequest) else ()
        self._messages = (*chat.messages, *text, reply.message)

    @override
    async def answer(self, prepared: PreparedRequest, on_text: OnText | None = None) -> list[Reply]:
        count = len(prepared.requests)
        self._require_turns(count)  # others may have been answered since it was prepared
        self._turns += count
        try:
            # Text is sent when it is complete: an engine may begin again under new weights.
            return await super().answer(prepared)
        except asyncio.CancelledError:
            self._cancelled += not self._ended
            raise
        except AntiphonError as error:
            self.error = error
            raise
        finally:
            self._turns -= count  # those that were answered are counted as recorded

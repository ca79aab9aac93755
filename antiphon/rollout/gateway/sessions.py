"""From a chat request to its replies. The kind of session decides how tokens are sampled and whether they are recorded.

An `AttemptSession` belongs to an agent: tokens are sampled as the run's configuration says, and all are recorded. An
`UnrecordedClient` uses the model with its own settings, and nothing is recorded.
"""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from antiphon.core.errors import REFUSALS, DataError, RequestError
from antiphon.core.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    IntArray,
    Message,
    Sampling,
    ToolCall,
)
from antiphon.engines.request_checks import validate_request
from antiphon.rollout.gateway.capture import ConversationRecorder, PromptDraft
from antiphon.rollout.gateway.chat import ApiError, ChatRequest, CompletionRequest, Reply, TextPrompt
from antiphon.rollout.gateway.incremental_detokenizer import IncrementalDetokenizer, cut_at_stop
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.rollout.gathering import gather_or_cancel
from antiphon.tasks.tool_calls import TOOL_FORMATS, ToolFormat

OnText = Callable[[str], None]
_VOCABULARY = 1 << 31  # larger than any: the engines know the real one
_NAME = "ANTIPHONNAME"  # of a tool that does not exist


@dataclass(slots=True, eq=False, kw_only=True)
class PreparedRequest:
    """A request that was checked, with what the engines need to answer it."""

    chat: ChatRequest
    draft: PromptDraft | None  # None for a completion of texts
    prompt: IntArray  # [P], the draft's; of texts, all of them
    requests: list[GenerateRequest]
    forced: str
    """Text that the reply begins with, which is not sampled."""


class Session(ABC):
    """Requests of the owner of one key: their checks, limits and replies."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._format: type[ToolFormat] = TOOL_FORMATS.resolve(model.tools)
        self._numbers = itertools.count()  # of requests
        self._replies = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = False

    @abstractmethod
    def sampling(self, chat: ChatRequest, room: int) -> Sampling:
        """Return how tokens are sampled for a request, at most `room` of them."""

    @abstractmethod
    def request(self, prompt: IntArray, sampling: Sampling, choice: int) -> GenerateRequest:
        """Return the request to the engines for one of several replies."""

    @abstractmethod
    def record(self, prepared: PreparedRequest, request: GenerateRequest, reply: Reply) -> None:
        """Record a reply before the client gets it."""

    def draft(self, chat: ChatRequest, forced: str) -> PromptDraft:
        """Return the prompt of a conversation, without memory of earlier ones."""
        return ConversationRecorder(self.model.tokenizer).start_turn(chat.messages, chat.tools, forced)

    def prepare(self, chat: ChatRequest) -> PreparedRequest:
        """Check a request and render its prompt.

        Raises:
            ApiError: If anything is wrong with the request.
        """
        forced = self._forced_beginning(chat)
        draft = self._checked_draft(chat, forced)
        prompt = draft.tokens
        sampling = self.sampling(chat, self.model.tokens_left(prompt))
        plain = [self.request(prompt, sampling, choice) for choice in range(chat.n)]
        requests = [replace(request, attachments=draft.images) for request in plain] if draft.images else plain
        self._check(requests[:1])  # the others differ in their seeds
        return PreparedRequest(chat=chat, draft=draft, prompt=prompt, requests=requests, forced=forced)

    def prepare_completion(self, request: CompletionRequest) -> PreparedRequest:
        """Check a request for completions of texts, and tokenize them.

        Raises:
            ApiError: If anything is wrong with the request.
        """
        prompts = [self._tokenize(prompt, f"prompt[{number}]") for number, prompt in enumerate(request.prompts)]
        requests = []
        for number, tokens in enumerate(prompts):
            sampling = self.sampling(request, self.model.tokens_left(tokens))
            choices = range(number * request.n, (number + 1) * request.n)
            requests += [self.request(tokens, sampling, choice) for choice in choices]
        self._check(requests[:: request.n])
        texts = tuple(
            prompt if isinstance(prompt, str) else self.model.tokenizer.decode(tokens)
            for prompt, tokens in zip(request.prompts, prompts, strict=True)
        )
        return PreparedRequest(
            chat=replace(request, texts=texts), draft=None, prompt=np.concatenate(prompts), requests=requests, forced=""
        )

    def _tokenize(self, prompt: TextPrompt, at: str) -> IntArray:
        try:
            tokens = self.model.tokenizer.encode_text(prompt) if isinstance(prompt, str) else np.array(prompt, np.int32)
        except DataError as error:
            raise ApiError(f"{at}: {error}") from error
        if not len(tokens):
            raise ApiError(f"{at}: it has no tokens", code="empty_prompt")
        return tokens

    def _check(self, requests: Sequence[GenerateRequest]) -> None:
        """Raise `ApiError` for a request that no engine can run."""
        try:
            for request in requests:
                validate_request(request, self.model.max_length, _VOCABULARY, decodes=True, reads_images=True)
        except RequestError as error:
            raise ApiError(str(error)) from error

    def count(self, chat: ChatRequest) -> int:
        """Return the number of tokens of the prompt."""
        return self._checked_draft(chat, "").length

    async def answer(self, prepared: PreparedRequest, on_text: OnText | None = None) -> list[Reply]:
        """Generate the replies.

        Args:
            prepared: The request.
            on_text: Receives text of the only reply as it comes, if the session may stream.

        Raises:
            ApiError: If the session has ended, or an engine refuses the request.
        """
        if self._ended:  # after the request was prepared
            raise ApiError("the attempt has ended", 401, "invalid_api_key")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await self._answer(prepared, on_text)
        except REFUSALS as error:
            raise ApiError(str(error)) from error
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        """Cancel all requests and answer no more."""
        self._ended = True
        for task in self._tasks:
            task.cancel()

    async def _answer(self, prepared: PreparedRequest, on_text: OnText | None) -> list[Reply]:
        on_delta = None
        if on_text is not None and len(prepared.requests) == 1 and not prepared.chat.tools:
            on_delta = IncrementalDetokenizer(self.model.tokenizer, prepared.chat.stop, on_text)
        completions = await gather_or_cancel([self.model.generate(request, on_delta) for request in prepared.requests])
        replies = []
        for request, completion in zip(prepared.requests, completions, strict=True):
            replies.append(self._reply(prepared, request, completion))
            self.record(prepared, request, replies[-1])
        return replies

    def _reply(self, prepared: PreparedRequest, request: GenerateRequest, completion: Completion) -> Reply:
        text = self.model.tokenizer.decode(completion.tokens)
        length = completion.finish is FinishReason.LENGTH
        text, stop = (text, None) if length else cut_at_stop(text, request.sampling.stop)
        text = prepared.forced + text
        calls: tuple[ToolCall, ...] = ()
        readable = True
        if prepared.chat.tools and prepared.chat.choice != "none":
            parsed = self._format(_schemas(prepared.chat)).parse(text)
            calls, readable = self._with_ids(parsed.calls), not parsed.problems
            text = parsed.content if calls else text
        reason = "tool_calls" if calls else "length" if length else "stop_string" if stop else "stop"
        message = Message("assistant", text, calls)
        return Reply(message=message, reason=reason, stop=stop, completion=completion, readable=readable)

    def _with_ids(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Give calls ids of nine letters and digits, which the strictest chat templates require."""
        number = next(self._replies)
        return tuple(replace(call, id=f"c{number:05d}{index:03d}") for index, call in enumerate(calls))

    def _checked_draft(self, chat: ChatRequest, forced: str) -> PromptDraft:
        if not chat.messages or chat.messages[-1].role == "assistant":
            raise ApiError(
                "messages: the last must not be the assistant's: replies that the client begins are not supported"
            )
        try:
            return self.draft(chat, forced)
        except DataError as error:
            raise ApiError(str(error)) from error
        except RecursionError as error:
            raise ApiError("messages, tools: they are nested too deeply") from error

    def _forced_beginning(self, chat: ChatRequest) -> str:
        """Return the beginning of a reply that has to call a tool; empty if it need not."""
        choice = chat.choice
        if choice in ("auto", "none"):
            return ""
        names = [tool["function"]["name"] for tool in chat.tools]
        name = choice.removeprefix("=")
        if choice.startswith("=") and name not in names:
            raise ApiError(f"tool_choice: {name!r} is not among the tools, which are {', '.join(names) or 'none'}")
        if not names:
            raise ApiError("tool_choice: there are no tools")
        before, _, _ = self._format({}).render("", [ToolCall(_NAME, {})]).partition(_NAME)
        return before + (name if choice.startswith("=") else "")


def _schemas(chat: ChatRequest) -> dict[str, Mapping[str, Any]]:
    """Return the described parameters of each tool, by its name."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in chat.tools:
        function = tool["function"]
        match function.get("parameters"):
            case {"properties": dict(properties)}:
                named = {name: schema for name, schema in properties.items() if isinstance(schema, dict)}
                found[function["name"]] = {"properties": named}
    return found

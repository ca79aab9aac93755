"""From a request to its replies: who asks decides how tokens are drawn and what is kept of them.

An `Attempt` is run by an agent: tokens are sampled as the run's configuration says, and all are recorded. An
`UnrecordedClient` uses a model: its own settings hold, and nothing is kept.
"""

import asyncio
import itertools
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from antiphon.core.errors import AntiphonError, DataError, RequestError, UnsupportedError
from antiphon.core.rng import derive
from antiphon.core.types import (
    AttemptId,
    Completion,
    FinishReason,
    GenerateRequest,
    IntArray,
    Message,
    PolicyVersion,
    Prompt,
    Sampling,
    Segment,
    ToolCall,
)
from antiphon.engines.base import validate_request
from antiphon.rollout.gateway.capture import Capture, Counts, Draft
from antiphon.rollout.gateway.chat import CONTEXT_LENGTH, MAX_TURNS, Chat, Refused, Reply
from antiphon.rollout.gateway.incremental_detokenizer import Unfolding, before_stop
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.tasks.tool_calls import TOOL_FORMATS, ToolFormat

Tell = Callable[[str], None]
PENALTIES = ("presence_penalty", "frequency_penalty")
_POSITIVE = 2**63 - 1
_ANY_TOKEN = 1 << 31  # what a vocabulary does not reach; its end is known to the engines
_NAME = "ANTIPHONNAME"  # of a tool that there is not


@dataclass(slots=True, eq=False, kw_only=True)
class Asked:
    """A request that is being answered."""

    chat: Chat
    draft: Draft
    prompt: IntArray  # [P], the draft's
    requests: list[GenerateRequest]
    forced: str
    """How the reply begins: text that was not sampled."""


class Session(ABC):
    """One key: what it may ask, and how it is answered."""

    refusals: tuple[type[AntiphonError], ...] = (RequestError,)
    """Errors of engines that say that a request is invalid."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._format: type[ToolFormat] = TOOL_FORMATS.resolve(model.tools)
        self._numbers = itertools.count()  # of requests
        self._replies = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = False

    @abstractmethod
    def sampling(self, chat: Chat, room: int) -> Sampling:
        """How tokens are drawn for a request; `room` is the most there may be."""

    @abstractmethod
    def request(self, prompt: IntArray, sampling: Sampling, choice: int) -> GenerateRequest:
        """What the engines are asked for, to make one of several replies."""

    @abstractmethod
    def keep(self, asked: Asked, request: GenerateRequest, reply: Reply) -> None:
        """Note a reply that is about to be given."""

    def draft(self, chat: Chat, forced: str) -> Draft:
        """The prompt, where nothing is remembered."""
        return Capture(self.model.tokenizer).draft(chat.messages, chat.tools, forced)

    def ask(self, chat: Chat) -> Asked:
        """Find the prompt, and all that may be wrong with the request."""
        forced = self._forced(chat)
        draft = self._drafted(chat, forced)
        prompt = draft.tokens
        sampling = self.sampling(chat, self.model.room(prompt))
        requests = [self.request(prompt, sampling, choice) for choice in range(chat.n)]
        try:
            for request in requests[:1]:  # the others differ in their seeds
                validate_request(request, self.model.max_length, _ANY_TOKEN, decodes=True)
        except RequestError as error:
            raise Refused(str(error)) from error
        return Asked(chat=chat, draft=draft, prompt=prompt, requests=requests, forced=forced)

    def count(self, chat: Chat) -> int:
        """Tokens of the prompt."""
        return self._drafted(chat, "").length

    async def answer(self, asked: Asked, tell: Tell | None = None) -> list[Reply]:
        """The replies. `tell` is given text of the only reply as it comes, where it may be."""
        if self._ended:  # after it had been asked
            raise Refused("the attempt has ended", 401, "invalid_api_key")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await self._answer(asked, tell)
        except self.refusals as error:
            raise Refused(str(error)) from error
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        """Answer no more: what is not answered by now is not kept."""
        self._ended = True
        for task in self._tasks:
            task.cancel()

    async def _answer(self, asked: Asked, tell: Tell | None) -> list[Reply]:
        on_delta = None
        if tell is not None and asked.chat.n == 1 and not asked.chat.tools:
            on_delta = Unfolding(self.model.tokenizer, asked.chat.stop, tell)
        completions = await _together([self.model.generate(request, on_delta) for request in asked.requests])
        replies = []
        for request, completion in zip(asked.requests, completions, strict=True):
            replies.append(self._reply(asked, request, completion))
            self.keep(asked, request, replies[-1])
        return replies

    def _reply(self, asked: Asked, request: GenerateRequest, completion: Completion) -> Reply:
        text = self.model.tokenizer.decode(completion.tokens)
        length = completion.finish is FinishReason.LENGTH
        text, stop = (text, None) if length else before_stop(text, request.sampling.stop)
        text = asked.forced + text
        calls: tuple[ToolCall, ...] = ()
        readable = True
        if asked.chat.tools and asked.chat.choice != "none":
            parsed = self._format(_schemas(asked.chat)).parse(text)
            calls, readable = self._with_ids(parsed.calls), not parsed.problems
            text = parsed.content if calls else text
        reason = "tool_calls" if calls else "length" if length else "stop_string" if stop else "stop"
        message = Message("assistant", text, calls)
        return Reply(message=message, reason=reason, stop=stop, completion=completion, readable=readable)

    def _with_ids(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Nine letters and digits, which is what the strictest of chat templates allow."""
        number = next(self._replies)
        return tuple(replace(call, id=f"c{number:05d}{index:03d}") for index, call in enumerate(calls))

    def _drafted(self, chat: Chat, forced: str) -> Draft:
        if not chat.messages or chat.messages[-1].role == "assistant":
            raise Refused(
                "messages: the last must not be the assistant's: replies that the client begins are not supported"
            )
        try:
            return self.draft(chat, forced)
        except DataError as error:
            raise Refused(str(error)) from error
        except RecursionError as error:
            raise Refused("messages, tools: they are nested too deeply") from error

    def _forced(self, chat: Chat) -> str:
        """How a reply that has to call a tool begins."""
        choice = chat.choice
        if choice in ("auto", "none"):
            return ""
        names = [tool["function"]["name"] for tool in chat.tools]
        name = choice.removeprefix("=")
        if choice.startswith("=") and name not in names:
            raise Refused(f"tool_choice: {name!r} is not among the tools, which are {', '.join(names) or 'none'}")
        if not names:
            raise Refused("tool_choice: there are no tools")
        before, _, _ = self._format({}).render("", [ToolCall(_NAME, {})]).partition(_NAME)
        return before + (name if choice.startswith("=") else "")


@dataclass(frozen=True, slots=True)
class Captured:
    """What an attempt came to."""

    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    """The conversation that was added to last, with its reply."""
    counts: Counts
    error: AntiphonError | None = None
    """What the engines failed with: that says nothing about the agent."""
    truncated: bool = False
    """The last request was refused for want of room or of turns, or its reply hit its limit of tokens."""


class Attempt(Session):
    """An agent's attempt at a prompt."""

    def __init__(
        self,
        model: ServedModel,
        prompt: Prompt,
        attempt: AttemptId,
        started: PolicyVersion,
        sampling: Sampling,
        *,
        priority: int = 0,
        max_turns: int = 0,
        seed: int = 0,
    ) -> None:
        """`max_turns` bounds the replies that are asked for; 0 does not."""
        super().__init__(model)
        self._max_turns = max_turns
        self._prompt = prompt
        self._name, self._group = str(attempt), str(attempt.group)
        self._started = started
        self._sampling = sampling
        self._priority = priority
        self._seed = seed
        self._capture = Capture(model.tokenizer)
        self._messages: tuple[Message, ...] = ()
        self._overridden: Counter[str] = Counter()
        self._cancelled = self._unreadable = 0
        self._truncated = False
        self.error: AntiphonError | None = None
        """What the engines failed with."""

    def captured(self) -> "Captured":
        """What there is."""
        segments = self._capture.segments()
        counts = self._capture.counts(
            segments=len(segments),
            cancelled=self._cancelled,
            unreadable_calls=self._unreadable,
            overridden=dict(self._overridden),
        )
        return Captured(segments, self._messages, counts, self.error, self._truncated)

    def ask(self, chat: Chat) -> Asked:
        """See `Session.ask`."""
        try:
            return super().ask(chat)
        except Refused as error:
            self._truncated = self._truncated or error.code in (CONTEXT_LENGTH, MAX_TURNS)
            raise

    def sampling(self, chat: Chat, room: int) -> Sampling:
        """As configured. Of what the client wants, its stop strings hold, and a limit below the configured one."""
        held, wanted = self._sampling, chat.max_tokens or room
        self._overridden.update(name for name, value in chat.wishes.items() if not self._grants(name, value))
        if chat.max_tokens is not None and wanted > held.max_tokens:
            self._overridden["max_tokens"] += 1
        limit = min(held.max_tokens, room, wanted)
        return replace(held, max_tokens=limit, stop=tuple(dict.fromkeys([*held.stop, *chat.stop])))

    def _grants(self, name: str, value: float) -> bool:
        """Whether the client gets what it wants anyway; seeds are the run's."""
        return name != "seed" and value == (0 if name in PENALTIES else getattr(self._sampling, name))

    def request(self, prompt: IntArray, sampling: Sampling, choice: int) -> GenerateRequest:
        """See `Session.request`."""
        number = next(self._numbers)
        if self._max_turns and number >= self._max_turns:
            raise Refused(f"the attempt has had its {self._max_turns} turns", 403, MAX_TURNS)
        seed = derive(self._seed, self._prompt.id, self._prompt.epoch, self._name, number)
        return GenerateRequest(
            id=f"{self._name}/{number}",
            tokens=prompt,
            sampling=replace(sampling, seed=seed),
            affinity=(self._name, self._group),
            priority=self._priority,
            min_version=self._started.n,
            task=self._prompt.task,
        )

    def draft(self, chat: Chat, forced: str) -> Draft:
        """See `Session.draft`."""
        return self._capture.draft(chat.messages, chat.tools, forced)

    def keep(self, asked: Asked, request: GenerateRequest, reply: Reply) -> None:
        """See `Session.keep`."""
        self._unreadable += not reply.readable
        self._truncated = reply.completion.finish is FinishReason.LENGTH
        self._capture.add(asked.draft, reply.completion, request.sampling, reply.message)
        self._messages = (*asked.chat.messages, reply.message)

    async def answer(self, asked: Asked, tell: Tell | None = None) -> list[Reply]:
        """See `Session.answer`. Text is given when it is complete: new weights may make an engine begin again."""
        try:
            return await super().answer(asked)
        except asyncio.CancelledError:
            self._cancelled += not self._ended
            raise
        except AntiphonError as error:
            self.error = error
            raise


class UnrecordedClient(Session):
    """Who uses a model. May ask many things at once."""

    refusals = (RequestError, UnsupportedError)  # a client chooses its sampling, which an engine may not support

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self._name = f"guest-{secrets.token_hex(4)}"  # each has requests with ids of its own

    def sampling(self, chat: Chat, room: int) -> Sampling:
        """As the client wants."""
        if unknown := [name for name in PENALTIES if chat.wishes.get(name)]:
            raise Refused(f"{unknown[0]}: only 0 is supported here", code="unsupported_parameter")
        wishes: dict[str, Any] = {name: value for name, value in chat.wishes.items() if name not in PENALTIES}
        wishes["top_k"] = max(int(wishes.get("top_k", 0)), 0)
        wishes["seed"] = int(wishes["seed"]) & _POSITIVE if "seed" in wishes else secrets.randbits(63)
        if wishes.get("top_p") == 0:  # nothing but the likeliest
            wishes |= {"top_p": 1.0, "temperature": 0.0}
        return Sampling(max_tokens=min(room, chat.max_tokens or room), stop=chat.stop, **wishes)

    def request(self, prompt: IntArray, sampling: Sampling, choice: int) -> GenerateRequest:
        """See `Session.request`."""
        ours = replace(sampling, seed=derive(sampling.seed, choice))
        return GenerateRequest(id=f"{self._name}/{next(self._numbers)}", tokens=prompt, sampling=ours)

    def keep(self, asked: Asked, request: GenerateRequest, reply: Reply) -> None:
        """Nothing is kept."""


async def _together(running: Sequence[Coroutine[Any, Any, Completion]]) -> list[Completion]:
    """The results of all; if one fails, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as owner:
            tasks = [owner.create_task(one) for one in running]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


def _schemas(chat: Chat) -> dict[str, Mapping[str, Any]]:
    """The parameters of each tool, as far as they are described."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in chat.tools:
        function = tool["function"]
        match function.get("parameters"):
            case {"properties": dict(properties)}:
                named = {name: schema for name, schema in properties.items() if isinstance(schema, dict)}
                found[function["name"]] = {"properties": named}
    return found

"""Records the conversation of one attempt as a tree of turns: token-exact, even if its client rewrites messages.

Clients speak in messages and send the whole conversation each time. Where it begins with one known already, reply
included, the prompt is the recorded tokens and what the chat template adds for the new messages: what was sampled is
never tokenised again. Where the client has changed what was said before, a branch begins at the last reply that it left
alone, or at the root. Every branch becomes a segment; a turn that several share is trained in the first of them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from antiphon.core.errors import DataError
from antiphon.core.types import Completion, IntArray, Message, Sampling, Segment, Streams, Turn

Key = tuple[Any, ...]
Tools = Sequence[Mapping[str, Any]]

NONE = -1  # the number of no call


class Tokenizer(Protocol):
    """The part of `tasks.rendering.Renderer` that the gateway uses."""

    eos_ids: tuple[int, ...]

    def encode_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> IntArray:
        """Return the tokens of a prompt with these messages and tools."""

    def encode_observations(
        self, messages: Sequence[Message], observations: Sequence[Message], *, tools: Tools = (), closed: bool = True
    ) -> IntArray:
        """Return the tokens that append observations to these messages; `closed` if the last message ended with EOS."""

    def encode(self, text: str) -> IntArray:
        """Return the tokens of plain text."""

    def decode(self, tokens: IntArray) -> str:
        """Return the text of these tokens."""


@dataclass(slots=True, eq=False)
class _Place:
    """A point of the conversation as clients tell it: after the messages on the way here from the root."""

    next: dict[Key, "_Place"] = field(default_factory=dict)
    rewritten: dict[Key, "_Place"] = field(default_factory=dict)  # after replies, as clients may write them
    reply: "_Sampled | None" = None  # that ends here; of several that read the same, the last

    def after(self, message: Message, call: int) -> "_Place":
        """Return the place after a message; `call` is the number of the call that it answers."""
        key = _key(message, call)
        if key not in self.next:
            same = self.rewritten.get(_sense(message)) if message.role == "assistant" else None
            self.next[key] = same or _Place()
        return self.next[key]


@dataclass(slots=True, eq=False)
class Draft:
    """A prompt that is about to be answered: the turn that it goes on from, and the tokens that it adds."""

    place: _Place
    parent: "_Sampled | None"
    added: IntArray
    rerendered: bool = False  # there was such a turn, but the template cannot append to it

    @property
    def length(self) -> int:
        """P."""
        return len(self.added) + (0 if self.parent is None else self.parent.turn.stop)

    @property
    def tokens(self) -> IntArray:
        """The whole prompt [P]."""
        before = [] if self.parent is None else self.parent.pieces()
        return np.concatenate([*before, self.added])


@dataclass(slots=True, eq=False)
class _Sampled:
    """One turn: the answer to a draft."""

    draft: Draft
    completion: Completion
    turn: Turn
    continued: bool = False

    def path(self) -> list["_Sampled"]:
        """The turns from the root to this one."""
        turns = [self]
        while (before := turns[-1].draft.parent) is not None:
            turns.append(before)
        return turns[::-1]

    def pieces(self) -> list[IntArray]:
        """Tokens from the root to the end of this turn."""
        return [piece for turn in self.path() for piece in (turn.draft.added, turn.completion.tokens)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCounts:
    """Counts of the client's turns, by their place in the conversation."""

    turns: int = 0
    appended: int = 0
    """Those whose prompt is the recorded tokens of an earlier one, and what the template added."""
    segments: int = 0
    forks: int = 0
    """Branches that begin before the end of what was said: an edited, dropped or compacted history, a side question."""
    retries: int = 0
    """Times that the very same conversation was to be answered again."""
    cancelled: int = 0
    """Requests whose client left before the answer; they leave no turn."""
    rerendered: int = 0
    """Continuations that the chat template could not append to what was said: they begin at the root. Each is a fork, too."""
    unreadable_calls: int = 0
    """Replies in which something that looks like a tool call could not be read."""
    overridden: Mapping[str, int] = field(default_factory=dict)
    """Settings that the client asked for and did not get, and how often."""


class Capture:
    """The turns of one attempt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._roots: dict[str, _Place] = {}  # by the tools that were offered
        self._turns: list[_Sampled] = []

    def draft(self, messages: Sequence[Message], tools: Tools = (), forced: str = "") -> Draft:
        """The prompt for a conversation that ends with what is to be answered. `forced` is how the answer has to begin.

        `DataError` if the chat template refuses it.
        """
        place = self._roots.setdefault(json.dumps(list(tools)), _Place())
        parent: _Sampled | None = None
        said = 0
        for number, (message, call) in enumerate(zip(messages, _answered(messages), strict=True), 1):
            place = place.after(message, call)
            if place.reply is not None:
                parent, said = place.reply, number
        added, rerendered = None, False
        if parent is not None:
            try:
                added = self._appended(parent, messages[:said], messages[said:], tools)
            except DataError:
                parent, rerendered = None, True
        if added is None:
            added = self._tokenizer.encode_prompt(messages, tools)
        if forced:
            added = np.concatenate([added, self._tokenizer.encode(forced)])
        return Draft(place, parent, added, rerendered)

    def add(self, draft: Draft, completion: Completion, sampling: Sampling, reply: Message) -> None:
        """The answer to a draft, and the message that the client gets for it."""
        start = draft.length
        turn = Turn(
            start=start,
            stop=start + len(completion.tokens),
            sampling=sampling,
            finish=completion.finish,
            tool_calls=tuple({"name": call.name, "arguments": call.arguments} for call in reply.tool_calls),
            timing=completion.timing,
            engines=completion.engines,
        )
        sampled = _Sampled(draft, completion, turn)
        if draft.parent is not None:
            draft.parent.continued = True
        self._turns.append(sampled)
        place = draft.place.next.setdefault(_key(reply, NONE), _Place())
        place.reply = sampled
        draft.place.rewritten[_sense(reply)] = place

    def segments(self) -> tuple[Segment, ...]:
        """Return one segment for each turn that no turn follows, in the order in which these came.

        Each sampled token is in the loss mask of exactly one segment.
        """
        found: list[Segment] = []
        trained: dict[_Sampled, int] = {}  # and in which segment
        for leaf in self._turns:
            if leaf.continued:
                continue
            path = leaf.path()
            new = [turn for turn in path if turn not in trained]
            if not any(len(turn.completion.tokens) for turn in new):
                continue
            shared = path[len(path) - len(new) - 1] if len(new) < len(path) else None
            found.append(_segment(path, new, None if shared is None else trained[shared]))
            trained.update(dict.fromkeys(new, len(found) - 1))
        return tuple(found)

    def counts(self, **more: Any) -> CaptureCounts:
        """The numbers; `more` are those that only others know."""
        drafts = {turn.draft for turn in self._turns}
        places = {(draft.parent, draft.place) for draft in drafts}
        parents = {draft.parent for draft in drafts}
        return CaptureCounts(
            turns=len(self._turns),
            appended=sum(turn.draft.parent is not None for turn in self._turns),
            forks=len(places) - len(parents),
            retries=len(drafts) - len(places),
            rerendered=sum(draft.rerendered for draft in drafts),
            **more,
        )

    def _appended(self, parent: _Sampled, said: Sequence[Message], new: Sequence[Message], tools: Tools) -> IntArray:
        """Tokens to append to a turn; `DataError` where the template cannot."""
        sampled = parent.completion.tokens
        closed = len(sampled) > 0 and int(sampled[-1]) in self._tokenizer.eos_ids
        return self._tokenizer.encode_observations(said, new, tools=tools, closed=closed)


def _segment(path: Sequence[_Sampled], new: Sequence[_Sampled], parent: int | None) -> Segment:
    """The tokens of a path, of whose turns `new` are to be trained here."""
    tokens = np.concatenate(path[-1].pieces())
    length = len(tokens)
    loss_mask = np.zeros(length, np.bool_)
    logprobs, versions = np.zeros(length, np.float32), np.zeros(length, np.int32)
    for sampled in new:
        span, completion = slice(sampled.turn.start, sampled.turn.stop), sampled.completion
        loss_mask[span] = True
        logprobs[span] = completion.logprobs
        versions[span] = completion.versions
    return Segment(
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        turns=tuple(sampled.turn for sampled in new),
        streams=Streams.placed(length, {sampled.turn.start: sampled.completion.streams for sampled in new}),
        parent=parent,
    )


# --- when two messages are the same ------------------------------------------------------------------------------------


def _answered(messages: Sequence[Message]) -> Iterator[int]:
    """For each message, the number in the conversation of the call that it answers."""
    numbers: dict[str, int] = {}
    count = 0
    for message in messages:
        for call in message.tool_calls:
            numbers[call.id] = count
            count += 1
        yield numbers.get(message.tool_call_id, NONE) if message.role == "tool" else NONE


def _key(message: Message, call: int) -> Key:
    """Equal for messages that no template can tell apart."""
    calls = tuple((call.id, call.name, json.dumps(call.arguments)) for call in message.tool_calls)
    return message.role, message.content, calls, message.tool_call_id, call


def _sense(reply: Message) -> Key:
    """Return a key that is equal for a reply and for what clients make of it without changing its meaning.

    Clients strip replies, write arguments as JSON in their own way, and give calls ids of their own.
    """
    calls = tuple((call.name, _canonical(call.arguments)) for call in reply.tool_calls)
    return reply.content.strip(), calls


def _canonical(value: Any) -> str:
    """Equal for values that are the same in JSON."""
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    """1.0 as 1: not every language can tell."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_whole_numbers(item) for item in value]
    return value

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
from antiphon.core.types import Completion, IntArray, Message, PlacedImage, Sampling, Segment, Streams, Turn

Key = tuple[Any, ...]
Tools = Sequence[Mapping[str, Any]]

NO_CALL = -1  # in place of the number of a tool call


class Tokenizer(Protocol):
    """The part of `tasks.rendering.Renderer` that the gateway uses."""

    eos_ids: tuple[int, ...]

    def encode_images(
        self,
        messages: Sequence[Message],
        observations: Sequence[Message] = ...,
        *,
        tools: Tools = (),
        closed: bool = True,
    ) -> tuple[IntArray, tuple[PlacedImage, ...]]:
        """Return the tokens of a prompt, or with `observations` those to append for them, and the images among them.

        `closed` if the last message ended with EOS.
        """

    def encode(self, text: str) -> IntArray:
        """Return the tokens of plain text."""

    def encode_text(self, text: str) -> IntArray:
        """Return the tokens of a text that is to be continued."""

    def decode(self, tokens: IntArray) -> str:
        """Return the text of these tokens."""


@dataclass(slots=True, eq=False)
class _ConversationNode:
    """A node in the tree of conversations: the state after all messages on the path from the root."""

    children: dict[Key, "_ConversationNode"] = field(default_factory=dict)
    rewritten: dict[Key, "_ConversationNode"] = field(default_factory=dict)  # by replies as clients may rewrite them
    reply: "_SampledTurn | None" = None  # the sampled turn that ends here; the last of several equal ones

    def advance(self, message: Message, call: int) -> "_ConversationNode":
        """Return the node after a message; `call` is the number of the tool call that it answers."""
        key = _message_key(message, call)
        if key not in self.children:
            same = self.rewritten.get(_meaning_key(message)) if message.role == "assistant" else None
            self.children[key] = same or _ConversationNode()
        return self.children[key]


@dataclass(slots=True, eq=False)
class PromptDraft:
    """A prompt that waits for its reply: the turn that it continues, and the tokens that it adds."""

    node: _ConversationNode
    parent: "_SampledTurn | None"
    added: IntArray
    added_images: tuple[PlacedImage, ...] = ()  # with their places among these
    rerendered: bool = False  # there was such a turn, but the template cannot append to it

    @property
    def length(self) -> int:
        """Number of tokens of the whole prompt."""
        return len(self.added) + (0 if self.parent is None else self.parent.turn.stop)

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """All images of the prompt, with their places in it."""
        drafts = [*(turn.draft for turn in (self.parent.path() if self.parent else ())), self]
        return tuple(image.shifted(draft.length - len(draft.added)) for draft in drafts for image in draft.added_images)

    @property
    def tokens(self) -> IntArray:
        """The whole prompt [P]."""
        before = [] if self.parent is None else self.parent.token_pieces()
        return np.concatenate([*before, self.added])


@dataclass(slots=True, eq=False)
class _SampledTurn:
    """One turn: the completion of a draft."""

    draft: PromptDraft
    completion: Completion
    turn: Turn
    continued: bool = False

    def path(self) -> list["_SampledTurn"]:
        """Return the turns from the root to this one."""
        turns = [self]
        while (before := turns[-1].draft.parent) is not None:
            turns.append(before)
        return turns[::-1]

    def token_pieces(self) -> list[IntArray]:
        """Return the tokens from the root to the end of this turn, as a list of arrays."""
        return [piece for turn in self.path() for piece in (turn.draft.added, turn.completion.tokens)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCounts:
    """Counts of the client's turns, by their place in the conversation."""

    turns: int = 0
    appended: int = 0
    """Turns whose prompt is the recorded tokens of an earlier turn plus those that the template added."""
    segments: int = 0
    forks: int = 0
    """Branches that begin before the end of the conversation: an edited, dropped or compacted history, a side question."""
    retries: int = 0
    """Requests that repeat a conversation which was answered already."""
    cancelled: int = 0
    """Requests whose client disconnected before the reply; they leave no turn."""
    rerendered: int = 0
    """Continuations that the chat template could not append, so that they begin at the root. Each counts as a fork, too."""
    unreadable_calls: int = 0
    """Replies with an apparent tool call that could not be parsed."""
    overridden: Mapping[str, int] = field(default_factory=dict)
    """Number of requests by sampling setting that the client asked for and did not get."""


class ConversationRecorder:
    """Records the turns of one attempt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._roots: dict[str, _ConversationNode] = {}  # by the tools that were offered
        self._turns: list[_SampledTurn] = []
        self._texts: dict[
            bytes, _ConversationNode
        ] = {}  # by the tokens of texts to complete, which are no conversations

    def start_turn(self, messages: Sequence[Message], tools: Tools = (), forced: str = "") -> PromptDraft:
        """Return the prompt of a conversation that is to be answered.

        Args:
            messages: The conversation.
            tools: Tools offered to the policy.
            forced: Text with which the reply has to begin; it becomes part of the prompt.

        Raises:
            DataError: The chat template refuses the conversation.
        """
        node = self._roots.setdefault(json.dumps(list(tools)), _ConversationNode())
        parent: _SampledTurn | None = None
        answered = 0  # messages up to the reply that is continued
        for number, (message, call) in enumerate(zip(messages, _answered_calls(messages), strict=True), 1):
            node = node.advance(message, call)
            if node.reply is not None:
                parent, answered = node.reply, number
        encoded, rerendered = None, False
        if parent is not None:
            try:
                encoded = self._encode_appended(parent, messages[:answered], messages[answered:], tools)
            except DataError:
                parent, rerendered = None, True
        added, images = encoded or self._tokenizer.encode_images(messages, tools=tools)
        if forced:
            added = np.concatenate([added, self._tokenizer.encode(forced)])
        return PromptDraft(node, parent, added, images, rerendered)

    def start_text(self, tokens: IntArray) -> PromptDraft:
        """Return the prompt of a text [P] that is to be completed; it goes on from the longest turn that it begins with."""
        known = [turn for turn in self._turns if _begins_with(tokens, turn)]
        parent = max(known, key=lambda turn: (turn.turn.stop, not turn.continued), default=None)
        node = self._texts.setdefault(tokens.tobytes(), _ConversationNode())
        return PromptDraft(node, parent, tokens[0 if parent is None else parent.turn.stop :])

    def record_reply(self, draft: PromptDraft, completion: Completion, sampling: Sampling, reply: Message) -> None:
        """Record the completion of a draft, and the message that the client gets for it."""
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
        sampled = _SampledTurn(draft, completion, turn)
        if draft.parent is not None:
            draft.parent.continued = True
        self._turns.append(sampled)
        node = draft.node.children.setdefault(_message_key(reply, NO_CALL), _ConversationNode())
        node.reply = sampled
        draft.node.rewritten[_meaning_key(reply)] = node

    def segments(self) -> tuple[Segment, ...]:
        """Return one segment for each turn that no turn follows, in the order in which these came.

        Each sampled token is in the loss mask of exactly one segment.
        """
        found: list[Segment] = []
        trained: dict[_SampledTurn, int] = {}  # and in which segment
        for leaf in self._turns:
            if leaf.continued:
                continue
            path = leaf.path()
            new = [turn for turn in path if turn not in trained]
            if not any(len(turn.completion.tokens) for turn in new):
                continue
            shared = path[len(path) - len(new) - 1] if len(new) < len(path) else None
            found.append(_make_segment(path, new, None if shared is None else trained[shared]))
            trained.update(dict.fromkeys(new, len(found) - 1))
        return tuple(found)

    def counts(self, **more: Any) -> CaptureCounts:
        """Return the counts; `more` are those that the session counts."""
        drafts = {turn.draft for turn in self._turns}
        nodes = {(draft.parent, draft.node) for draft in drafts}
        parents = {draft.parent for draft in drafts}
        return CaptureCounts(
            turns=len(self._turns),
            appended=sum(turn.draft.parent is not None for turn in self._turns),
            forks=len(nodes) - len(parents),
            retries=len(drafts) - len(nodes),
            rerendered=sum(draft.rerendered for draft in drafts),
            **more,
        )

    def _encode_appended(
        self, parent: _SampledTurn, messages: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> tuple[IntArray, tuple[PlacedImage, ...]]:
        """Return the tokens that append messages to a turn, and their images; raise `DataError` if the template cannot."""
        sampled = parent.completion.tokens
        closed = len(sampled) > 0 and int(sampled[-1]) in self._tokenizer.eos_ids
        return self._tokenizer.encode_images(messages, new, tools=tools, closed=closed)


def _begins_with(tokens: IntArray, turn: _SampledTurn) -> bool:
    """Return True if tokens begin with those from the root to the end of a turn."""
    stop = turn.turn.stop
    return stop <= len(tokens) and np.array_equal(tokens[:stop], np.concatenate(turn.token_pieces()))


def _make_segment(path: Sequence[_SampledTurn], new: Sequence[_SampledTurn], parent: int | None) -> Segment:
    """Return the segment with the tokens of a path, in which only the turns `new` are trained."""
    tokens = np.concatenate(path[-1].token_pieces())
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
        images=path[-1].draft.images,
    )


# --- keys of messages that count as the same ------------------------------------------------------------------------------


def _answered_calls(messages: Sequence[Message]) -> Iterator[int]:
    """Yield for each message the number of the tool call that it answers, counted over the conversation."""
    numbers: dict[str, int] = {}
    count = 0
    for message in messages:
        for call in message.tool_calls:
            numbers[call.id] = count
            count += 1
        yield numbers.get(message.tool_call_id, NO_CALL) if message.role == "tool" else NO_CALL


def _message_key(message: Message, call: int) -> Key:
    """Return a key that is equal for messages which no template can tell apart."""
    calls = tuple((call.id, call.name, json.dumps(call.arguments)) for call in message.tool_calls)
    return message.role, message.content, calls, message.tool_call_id, call, message.images


def _meaning_key(reply: Message) -> Key:
    """Return a key that is equal for a reply and for what clients make of it without changing its meaning.

    Clients strip replies, write arguments as JSON in their own way, and give calls ids of their own.
    """
    calls = tuple((call.name, _canonical_json(call.arguments)) for call in reply.tool_calls)
    return reply.content.strip(), calls


def _canonical_json(value: Any) -> str:
    """Return JSON that is the same for equal values."""
    return json.dumps(_unify_numbers(value), sort_keys=True)


def _unify_numbers(value: Any) -> Any:
    """Replace 1.0 by 1 and the like: not every language distinguishes them."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _unify_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_unify_numbers(item) for item in value]
    return value

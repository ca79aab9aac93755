"""What flows through Antiphon, one frozen record a stage; `docs/life_of_a_sample.md` follows one through all of them.

Letters in the field comments: P prompt, C completion, L segment, T packed tokens; G siblings of a group; S sequences of
a pack. Arrays are numpy; lengths are checked on construction. Times are seconds of the event loop's clock.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from antiphon.core.streams import Streams

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


def _require_length(owner: str, length: int, **arrays: NDArray[Any]) -> None:
    for name, array in arrays.items():
        if array.ndim != 1 or len(array) != length:
            raise ValueError(f"{owner}.{name} has shape {array.shape}, expected ({length},)")


def _within(indices: NDArray[Any], array: NDArray[Any]) -> bool:
    return bool(((indices >= 0) & (indices < len(array))).all())


# --- versions and sampling ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """The weights after `n` published updates. A resume after a rollback opens a new lineage, so that versions which
    were undone never look like the future."""

    lineage: int
    n: int

    def age(self, now: "PolicyVersion") -> int:
        """Number of versions published since this one."""
        if now.lineage < self.lineage or now.n < self.n:
            raise ValueError(f"{self} lies in the future of {now}")
        return now.n - self.n

    def next(self) -> "PolicyVersion":
        """The version after one more published update."""
        return PolicyVersion(self.lineage, self.n + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy. Recorded with every completion, because the learner's log-probs
    apply the same temperature."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0

    @property
    def truncated(self) -> bool:
        """True if tokens are drawn from less than the full distribution, so that plain log-probs are not its own."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class OnUpdate(StrEnum):
    """What happens to requests in flight when an engine loads new weights."""

    KEEP = "keep"  # go on with the old KV cache; later tokens are flagged
    RECOMPUTE = "recompute"  # re-prefill prompt and tokens under the new weights
    RESTART = "restart"  # drop the tokens and start again
    DRAIN = "drain"  # finish what runs, then load


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsUpdate:
    """Published weights: which version, where they lie, and what the receiver needs to read and verify them."""

    version: int
    location: str  # what the channel's receiver opens
    manifest: Any  # weights.base.Manifest


# --- prompts and completions -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the policy asks for. `id` is what the tool's answer refers to."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. An assistant may call tools; a tool answers the call `tool_call_id`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A task instance. `id` is stable across resumes; `payload` is opaque to all but its task."""

    id: str
    task: str
    messages: tuple[Message, ...]
    payload: Any = None
    attachments: tuple[Any, ...] = ()
    seed: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What an engine is asked for. `affinity` names what it shares a prefix with, the longest first: its conversation, its
    group; an engine must hold at least `min_version`; lower `priority` goes first; `task` may prefer some engines."""

    id: str
    tokens: IntArray  # [P]
    sampling: Sampling
    affinity: tuple[str, ...] = ()
    priority: int = 0
    min_version: int = 0
    task: str = ""
    attachments: tuple[Any, ...] = ()


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a piece of work was asked for, began and ended, in seconds."""

    queued: float = 0.0
    started: float = 0.0
    finished: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens. `logprobs` are those of the distribution they were drawn from at its temperature."""

    tokens: IntArray  # [C]
    logprobs: FloatArray  # [C]
    versions: IntArray  # [C] number of the version that sampled each token
    finish: FinishReason
    streams: Streams = field(default_factory=Streams)  # [C]
    timing: Timing = Timing()
    engines: tuple[int, ...] = ()  # numbers in the pool: one, and those that went on when it died

    def __post_init__(self) -> None:
        _require_length("Completion", len(self.tokens), logprobs=self.logprobs, versions=self.versions)
        self.streams.check_length("Completion", len(self.tokens))

    @staticmethod
    def join(pieces: Sequence["Completion"]) -> "Completion":
        """One completion that was sampled in several pieces, each going on where the one before was cut off."""
        first, last = pieces[0], pieces[-1]
        return Completion(
            tokens=np.concatenate([piece.tokens for piece in pieces]),
            logprobs=np.concatenate([piece.logprobs for piece in pieces]),
            versions=np.concatenate([piece.versions for piece in pieces]),
            finish=last.finish,
            streams=Streams.join([piece.streams for piece in pieces]),
            timing=Timing(queued=first.timing.queued, started=first.timing.started, finished=last.timing.finished),
            engines=tuple(number for piece in pieces for number in piece.engines),
        )


# --- trajectories ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion inside a segment: its span, and what the environment said of it."""

    start: int
    stop: int  # one past the last sampled token
    sampling: Sampling
    finish: FinishReason = FinishReason.STOP
    reward: float | None = None
    state_key: str | None = None
    tool_calls: tuple[Any, ...] = ()
    timing: Timing = Timing()
    engines: tuple[int, ...] = ()  # that sampled it


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One linear token sequence. A plain conversation is one; a fork, a compaction or one-sample-a-turn makes several,
    each naming its `parent`. `logprobs` and `versions` mean something where `loss_mask` is true."""

    tokens: IntArray  # [L]
    loss_mask: BoolArray  # [L] true where the policy sampled the token
    logprobs: FloatArray  # [L]
    versions: IntArray  # [L]
    turns: tuple[Turn, ...]
    streams: Streams = field(default_factory=Streams)  # [L]
    parent: int | None = None  # index among the trajectory's segments

    def __post_init__(self) -> None:
        length = len(self.tokens)
        _require_length("Segment", length, loss_mask=self.loss_mask, logprobs=self.logprobs, versions=self.versions)
        self.streams.check_length("Segment", length)
        for turn in self.turns:
            if not 0 <= turn.start <= turn.stop <= length:
                raise ValueError(f"turn {turn.start}:{turn.stop} lies outside its segment of {length} tokens")


class ScoreStatus(StrEnum):
    """Whether a grader judged, could not judge, or broke."""

    SCORED = "scored"
    UNGRADED = "ungraded"  # the grader had nothing to say: no answer to judge, time-out, its own error
    INFRASTRUCTURE = "infrastructure"  # the machinery around it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A grader's verdict. `value` is None unless the status is scored: a reward is never invented."""

    status: ScoreStatus
    value: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[float, ...] = ()
    detail: str = ""

    def __post_init__(self) -> None:
        scored = self.status is ScoreStatus.SCORED
        if scored != (self.value is not None and math.isfinite(self.value)):
            raise ValueError(f"a {self.status} score cannot have the value {self.value}")

    @staticmethod
    def of(value: float, **parts: float) -> "Score":
        """A scored verdict."""
        return Score(status=ScoreStatus.SCORED, value=float(value), parts=parts)

    @staticmethod
    def ungraded(detail: str) -> "Score":
        """No verdict; `detail` says why."""
        return Score(status=ScoreStatus.UNGRADED, detail=detail)


class AttemptStatus(StrEnum):
    """The states of an attempt. The last seven are terminal; each attempt ends in exactly one of them."""

    RUNNING = "running"
    FINISHED = "finished"
    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    REDUNDANT = "redundant"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rollout has nothing to train on; data, not an exception."""

    source: Literal["engine", "environment", "agent", "reward", "episode"]
    message: str


class AttemptId(NamedTuple):
    """Which group, which sibling of it, and which try at that sibling. A tuple: it is hashed at every turn."""

    group: int  # below 0: of an evaluation, of which nothing is recorded
    sibling: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.group}.{self.sibling}.{self.attempt}"


class TextStatistics(NamedTuple):
    """What is known of the tokens that were sampled, where these are not at hand; see `rollout.reward_monitor`."""

    repetition: float
    digest: int | None  # None: too few tokens to tell


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryMeta:
    """All that the scheduler and the ledger see of a trajectory."""

    id: AttemptId
    prompt_id: str
    task: str
    started: PolicyVersion
    newest: PolicyVersion
    status: AttemptStatus
    score: Score
    failure: Failure | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    turns: int = 0
    truncated: bool = False
    """A limit cut it off: the last reply hit its limit of tokens; or the episode ended by its length, tokens, turns or seconds,
    or because its environment said `truncated`, before the environment terminated."""
    timing: Timing = Timing()
    wording: TextStatistics | None = None  # if its payload does not travel with it


@dataclass(frozen=True, slots=True)
class PayloadReference:
    """Where a payload lies when it does not travel with its meta: durable, in a file of the run's record."""

    file: str
    attempt: AttemptId  # whose it is there: that which made it
    digest: int  # see `record.trajectories.digest`


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt's outcome: `meta`, and the segments or a reference to them."""

    meta: TrajectoryMeta
    payload: tuple[Segment, ...] | PayloadReference

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments; `ValueError` when they are held elsewhere."""
        if isinstance(self.payload, PayloadReference):
            raise ValueError(f"the payload of attempt {self.meta.id} lies in {self.payload.file}; fetch it first")
        return self.payload


class GroupOutcome(StrEnum):
    """What became of a group."""

    COMPLETE = "complete"
    FILTERED = "filtered"
    FAILED = "failed"
    STALE = "stale"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The siblings that answer one prompt."""

    id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]  # [G]
    outcome: GroupOutcome


# --- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One segment of one trajectory, ready to be packed. `weights` scale each token's loss (masks, corrections)."""

    meta: TrajectoryMeta
    segment: Segment
    streams: Streams  # [L]
    advantages: FloatArray  # [L]
    weights: FloatArray  # [L]
    reward: float = (
        0.0  # of its trajectory: the score, what was made of it, and the divergence taken off it (`kl.place`)
    )
    task_reward: float | None = None  # the same without the divergence, where one was taken off: see `KL_REWARD`
    turn_divisor: float | None = (
        1.0  # what the rewards of its turns are divided by; None: they are none of `reward` any more
    )

    def __post_init__(self) -> None:
        length = len(self.segment.tokens)
        _require_length("Sample", length, advantages=self.advantages, weights=self.weights)
        self.streams.check_length("Sample", length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Samples laid end to end without padding: one micro-batch. What several begin with alike is there once: the pack is a
    forest of pieces, and a sample is the path from a root to its last piece. `coefficients` carry everything that
    multiplies a token's loss, divided by the counts of the whole update, so that a sum over packs is the update's loss
    however it was cut."""

    tokens: IntArray  # [T]
    lengths: IntArray  # [S] of the pieces, sums to T
    parents: IntArray  # [S] the piece that each one continues, which comes before it; -1 for a beginning
    owners: IntArray  # [S] the sample whose loss each piece has
    ends: IntArray  # [samples] the last piece of each
    loss_mask: BoolArray  # [T]
    logprobs: FloatArray  # [T] of the behaviour policy
    advantages: FloatArray  # [T]
    coefficients: NDArray[np.float64]  # [T] double, so that a test in double precision sees no rounding
    temperatures: FloatArray  # [T]
    streams: Streams = field(default_factory=Streams)  # [T]

    def __post_init__(self) -> None:
        _require_length(
            "Pack",
            len(self.tokens),
            loss_mask=self.loss_mask,
            logprobs=self.logprobs,
            advantages=self.advantages,
            coefficients=self.coefficients,
            temperatures=self.temperatures,
        )
        self.streams.check_length("Pack", len(self.tokens))
        if int(self.lengths.sum()) != len(self.tokens):
            raise ValueError(f"Pack.lengths sum to {int(self.lengths.sum())}, expected {len(self.tokens)}")
        if len(self.parents) != len(self.lengths) or (self.parents >= np.arange(len(self.lengths))).any():
            raise ValueError(
                f"Pack.parents {self.parents.tolist()} are not a forest of {len(self.lengths)} pieces in order"
            )
        if len(self.owners) != len(self.lengths) or not _within(self.owners, self.ends):
            raise ValueError(f"Pack.owners {self.owners.tolist()} are not those of {len(self.lengths)} pieces")
        if not _within(self.ends, self.lengths):
            raise ValueError(f"Pack.ends {self.ends.tolist()} are none of {len(self.lengths)} pieces")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimiser step: packs for each data-parallel rank, which gets no others, and the counts of the whole."""

    packs: tuple[tuple[Pack, ...], ...]  # [ranks][micro-batches]
    loss_tokens: int
    samples: int
    groups: int
    sequences: int  # segments that are trained on
    forward_only: tuple[tuple[Pack, ...], ...] = ()  # as packs: of segments that make no gradient, to be measured


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Everything one training step does: mini-batches × epochs."""

    updates: tuple[Update, ...]

    @property
    def tokens(self) -> int:
        """Tokens that are trained on, prompts among them."""
        return sum(len(pack.tokens) for update in self.updates for rank in update.packs for pack in rank)

"""Trajectories of attempts, their scores, and the groups that siblings form."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from antiphon.core.types.arrays import BoolArray, FloatArray, IntArray, require_length
from antiphon.core.types.completions import FinishReason, PlacedImage, Prompt, Timing, require_places
from antiphon.core.types.pickling import quick_to_pickle
from antiphon.core.types.streams import Streams
from antiphon.core.types.versions import PolicyVersion, Sampling


@quick_to_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion inside a segment: its span, and the environment's reward for it."""

    start: int
    stop: int  # one past the last sampled token
    sampling: Sampling
    finish: FinishReason = FinishReason.STOP
    reward: float | None = None
    state_key: str | None = None  # name of the environment's state before the turn: advantages compare equal states
    tool_calls: tuple[Any, ...] = ()
    timing: Timing = Timing()
    engines: tuple[int, ...] = ()  # that sampled it


@quick_to_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One linear token sequence.

    A plain conversation is one segment. A fork (an agent changed or summarized its history) or one sample a turn makes
    several, each naming its `parent`.
    `logprobs` and `versions` are defined where `loss_mask` is true: log-probs with which the tokens were sampled, and the
    policy versions that sampled them.
    """

    tokens: IntArray  # [L]
    loss_mask: BoolArray  # [L] true where the policy sampled the token
    logprobs: FloatArray  # [L]
    versions: IntArray  # [L]
    turns: tuple[Turn, ...]
    streams: Streams = field(default_factory=Streams)  # [L]
    parent: int | None = None  # index among the trajectory's segments
    images: tuple[PlacedImage, ...] = ()  # in the order of their tokens

    def __post_init__(self) -> None:
        length = len(self.tokens)
        require_length("Segment", length, loss_mask=self.loss_mask, logprobs=self.logprobs, versions=self.versions)
        self.streams.check_length("Segment", length)
        for turn in self.turns:
            if not 0 <= turn.start <= turn.stop <= length:
                raise ValueError(f"turn {turn.start}:{turn.stop} lies outside its segment of {length} tokens")
        require_places("Segment", length, self.images)

    def token_keys(self) -> NDArray[np.int32] | NDArray[np.int64]:
        """Return numbers [L] that are equal where tokens are: those of different images, which have the same ids, differ."""
        if not self.images:
            return self.tokens
        keys = self.tokens.astype(np.int64)
        for image in self.images:
            keys[image.start : image.stop] += (int(image.digest[:10], 16) + 1) << 22
        return keys


class ScoreStatus(StrEnum):
    """Outcome of grading: scored, dropped, not scored, or broken."""

    SCORED = "scored"
    DROPPED = "dropped"  # what scores whole groups wants none of its group to be trained on: the group is filtered
    UNGRADED = "ungraded"  # the grader had nothing to say: no answer to judge, time-out, its own error
    INFRASTRUCTURE = "infrastructure"  # the machinery around it failed

    @property
    def is_verdict(self) -> bool:
        """True if the attempt is not tried again for a score."""
        return self in (ScoreStatus.SCORED, ScoreStatus.DROPPED)


@quick_to_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A grader's verdict; `value` is None unless the status is scored: a reward is never invented."""

    status: ScoreStatus
    value: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[float, ...] = ()
    detail: str = ""
    raised: bool = False  # the reward raised an error, which `detail` describes
    grader: str = field(default="", compare=False)  # process that gave it, and its node

    def __post_init__(self) -> None:
        scored = self.status is ScoreStatus.SCORED
        if scored != (self.value is not None and math.isfinite(self.value)):
            raise ValueError(f"a {self.status} score cannot have the value {self.value}")

    @staticmethod
    def of(value: float, **parts: float) -> "Score":
        """Return a scored verdict with its named parts."""
        return Score(status=ScoreStatus.SCORED, value=float(value), parts=parts)

    @staticmethod
    def ungraded(detail: str, *, raised: bool = False) -> "Score":
        """Return an ungraded score; `detail` says why."""
        return Score(status=ScoreStatus.UNGRADED, detail=detail, raised=raised)


class AttemptStatus(StrEnum):
    """The statuses of an attempt, whose causes are in `docs/statuses.md`. It ends in exactly one of those after `finished`."""

    RUNNING = "running"
    FINISHED = "finished"  # it has a score, and waits for its group or its step
    TRAINED = "trained"  # the weights of its step were published; `why` says if it had a gradient
    FILTERED = (
        "filtered"  # `rollout.filter`, `mean_range` of its task, or what scores its group rejected the complete group
    )
    STALE = "stale"  # its group became too old
    REDUNDANT = "redundant"  # its group was complete without it, or `rollout.sampler` did not reward it
    CANCELLED = "cancelled"  # the run was over
    FAILED = "failed"  # it failed, or its group did
    LOST = "lost"  # the run broke off


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Reason why a rollout has nothing to train on: data, not an exception."""

    source: Literal["engine", "environment", "agent", "reward", "episode"]
    message: str


class AttemptId(NamedTuple):
    """Numbers of the group, of the sibling in it, and of the try at that sibling."""

    group: int  # below 0: of an evaluation, of which nothing is recorded
    sibling: int
    attempt: int  # number of the try, from 0; the ledger's column `try`

    def __str__(self) -> str:
        return f"{self.group}.{self.sibling}.{self.attempt}"


class TextStatistics(NamedTuple):
    """Statistics of sampled tokens for `rollout.reward_monitor`, where the tokens themselves are elsewhere."""

    repetition: float
    digest: int | None  # None: too few tokens to tell


@quick_to_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryMeta:
    """The part of a trajectory that the scheduler and the ledger see."""

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
    """True if a limit ended it: the last reply hit its token limit; or the episode ended by its length, tokens, turns or
    seconds, or by the environment's `truncated`, before the environment terminated."""
    timing: Timing = Timing()
    wording: TextStatistics | None = None  # if its payload does not travel with it


@dataclass(frozen=True, slots=True)
class PayloadReference:
    """Location of a payload that does not travel with its meta: durable, in a file of the run's record."""

    file: str
    attempt: AttemptId  # that the file has it under: the one that made it
    digest: int  # see `record.trajectories.digest`


@quick_to_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt's outcome: `meta`, and its segments or a reference to them."""

    meta: TrajectoryMeta
    payload: tuple[Segment, ...] | PayloadReference

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments; `ValueError` if only a reference to them is here."""
        if isinstance(self.payload, PayloadReference):
            raise ValueError(f"the payload of attempt {self.meta.id} lies in {self.payload.file}; fetch it first")
        return self.payload


class GroupOutcome(StrEnum):
    """Final outcome of a group: what became of it, as `AttemptStatus` says it of attempts."""

    COMPLETE = "complete"
    FILTERED = "filtered"
    FAILED = "failed"
    STALE = "stale"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The sibling trajectories that answer one prompt."""

    id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]  # [G]
    outcome: GroupOutcome

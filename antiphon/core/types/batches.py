"""Training data: samples, the packs that they are concatenated to, and the batch of one training step.

A token's share in the loss has three parts. `Sample.weights` are its loss weights: masks and difficulty weights, set by
stages. The aggregation (`algorithm.aggregation`) gives each trajectory a divisor. `Pack.coefficients` are weight / divisor:
the learner multiplies each token's loss by its coefficient and sums.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from antiphon.core.types.arrays import BoolArray, FloatArray, IntArray, is_within, require_length
from antiphon.core.types.completions import PlacedImage, require_places
from antiphon.core.types.streams import Streams
from antiphon.core.types.trajectories import AttemptId, Segment, TrajectoryMeta


class Credit(NamedTuple):
    """Reward, advantage and loss weight of one trajectory in a training step; `antiphon why` shows them."""

    attempt: AttemptId
    reward: float  # as the stages left it
    advantage: float  # mean over its sampled tokens
    weight: float  # mean over its sampled tokens of what each counts in the loss; 0: it is masked
    tokens: int  # sampled
    signal: int  # of these, with a weight and an advantage other than 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One segment of one trajectory, as a training step sees it.

    Attributes:
        weights: Loss weight of each token; 0 masks it.
        reward: Reward of its trajectory: the score, shaped by the `rewards` stage, minus the KL penalty with
            `kl.place: reward`.
        task_reward: The reward without the KL penalty; None if there is no penalty.
        turn_divisor: What the rewards of its turns are divided by; None if the reward of the trajectory was changed in a
            way that cannot be divided among turns.
    """

    meta: TrajectoryMeta
    segment: Segment
    streams: Streams  # [L]
    advantages: FloatArray  # [L]
    weights: FloatArray  # [L]
    reward: float = 0.0
    task_reward: float | None = None
    turn_divisor: float | None = 1.0

    def __post_init__(self) -> None:
        length = len(self.segment.tokens)
        require_length("Sample", length, advantages=self.advantages, weights=self.weights)
        self.streams.check_length("Sample", length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One micro-batch: samples concatenated without padding.

    A prefix that several samples share is present once: the pack is a forest of spans, and a sample is the path from a
    root to its last span. The divisors in `coefficients` are counts of the whole update, so the sum over packs is the
    update's loss however it is divided into packs.
    """

    tokens: IntArray  # [T]
    lengths: IntArray  # [S] of the spans, sums to T
    parents: IntArray  # [S] the span that each one continues, which comes before it; -1 for a beginning
    owners: IntArray  # [S] index of the sample that has the loss of each span
    ends: IntArray  # [samples] the last span of each
    loss_mask: BoolArray  # [T] true where the coefficient is not 0
    logprobs: FloatArray  # [T] with which the tokens were sampled: `LossInputs.old_logprobs`
    advantages: FloatArray  # [T]
    coefficients: NDArray[
        np.float64
    ]  # [T] loss weight / divisor; double, so that tests in double precision see no rounding
    temperatures: FloatArray  # [T]
    streams: Streams = field(default_factory=Streams)  # [T]
    images: tuple[PlacedImage, ...] = ()  # in the order of their tokens

    def __post_init__(self) -> None:
        require_places("Pack", len(self.tokens), self.images)
        require_length(
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
                f"Pack.parents {self.parents.tolist()} are not a forest of {len(self.lengths)} spans in order"
            )
        if len(self.owners) != len(self.lengths) or not is_within(self.owners, self.ends):
            raise ValueError(f"Pack.owners {self.owners.tolist()} are not those of {len(self.lengths)} spans")
        if not is_within(self.ends, self.lengths):
            raise ValueError(f"Pack.ends {self.ends.tolist()} are none of {len(self.lengths)} spans")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimiser step: the packs of each data-parallel rank, and the counts of the whole update."""

    packs: tuple[tuple[Pack, ...], ...]  # [ranks][micro-batches]
    loss_tokens: int
    trajectories: int
    groups: int
    sequences: int  # samples that are trained on
    forward_only: tuple[tuple[Pack, ...], ...] = ()  # as `packs`: samples without gradient, for metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """All updates of one training step: mini-batches × epochs."""

    updates: tuple[Update, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens in all packs, prompts included."""
        return sum(len(pack.tokens) for update in self.updates for rank in update.packs for pack in rank)

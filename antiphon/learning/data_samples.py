"""Samples and batches from data sets, for supervised fine-tuning and the offline verbs. Pure numpy."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from antiphon.core.types import (
    PAIR,
    AttemptId,
    AttemptStatus,
    IntArray,
    PlacedImage,
    PolicyVersion,
    Sample,
    Score,
    Segment,
    Streams,
    TrainBatch,
    TrajectoryMeta,
)
from antiphon.learning.batch import BatchOptions, build_batch

Example = tuple[IntArray, IntArray] | tuple[IntArray, IntArray, tuple[PlacedImage, ...]]


def supervised_batch(examples: Sequence[Example], tokens_per_pack: int, ranks: int = 1) -> TrainBatch:
    """One update on (prompt [P], response [C]) pairs, some with images: the mean negative log-likelihood of response tokens."""
    return token_mean_batch(
        [make_response(number, *given) for number, given in enumerate(examples)], tokens_per_pack, ranks
    )


def token_mean_batch(groups: Sequence[Sequence[Sample]], tokens_per_pack: int, ranks: int = 1) -> TrainBatch:
    """Return one update whose loss is the mean over all response tokens."""
    return build_batch(
        groups, BatchOptions(aggregation="token_mean", max_tokens=1, tokens_per_pack=tokens_per_pack, ranks=ranks)
    )


def pair_mean_batch(pairs: Sequence[Sequence[Sample]], tokens_per_pack: int, ranks: int = 1) -> TrainBatch:
    """Return one update whose loss is the mean over pairs, see `make_pair`.

    The coefficients of each pair sum to one over the number of pairs, and no pair is split between packs.
    """
    return build_batch(
        pairs,
        BatchOptions(
            aggregation="sequence_mean_token_mean",
            max_tokens=1,
            tokens_per_pack=tokens_per_pack,
            whole_groups=True,
            ranks=ranks,
        ),
    )


def make_pair(number: int, prompt: IntArray, chosen: IntArray, rejected: IntArray) -> list[Sample]:
    """Two responses to a prompt, tokens [P] and [C] each, the better one first, as `learning.objectives.pairs` wants them."""
    return [
        replace(
            sample,
            streams=Streams({PAIR: np.full(len(sample.advantages), number, dtype=np.int32)}),
            advantages=sample.advantages + np.float32(sign),
        )
        for sibling, (response, sign) in enumerate(((chosen, 1), (rejected, -1)))
        for sample in [sample_from_tokens(AttemptId(number, sibling, 0), prompt, response)]
    ]


def make_scored_pair(number: int, prompt: IntArray, chosen: IntArray, rejected: IntArray) -> list[Sample]:
    """The same, with no token in the loss but the last of each response, at which a reward model is asked for its score."""
    return [
        replace(sample, weights=(np.arange(len(sample.weights)) == len(sample.weights) - 1).astype(np.float32))
        for sample in make_pair(number, prompt, chosen, rejected)
    ]


def make_response(
    number: int, prompt: IntArray, response: IntArray, images: tuple[PlacedImage, ...] = ()
) -> list[Sample]:
    """The one response to a prompt, tokens [P] and [C], and the prompt's images."""
    return [sample_from_tokens(AttemptId(number, 0, 0), prompt, response, images)]


def make_text(number: int, prompt: IntArray, response: IntArray) -> list[Sample]:
    """The same, with the tokens of the prompt in the loss too."""
    return make_response(number, prompt[:0], np.concatenate([prompt, response]))


def sample_from_tokens(
    identity: AttemptId, prompt: IntArray, response: IntArray, images: tuple[PlacedImage, ...] = ()
) -> Sample:
    """A response that was written, tokens [P] and [C]: those of the response are in the loss."""
    tokens = np.concatenate([prompt, response])
    zeros = np.zeros(len(tokens), dtype=np.float32)
    version = PolicyVersion(0, 0)
    return Sample(
        meta=TrajectoryMeta(
            id=identity,
            prompt_id=str(identity.group),
            task="",
            started=version,
            newest=version,
            status=AttemptStatus.FINISHED,
            score=Score.ungraded("an example"),
        ),
        segment=Segment(
            tokens=tokens,
            loss_mask=np.arange(len(tokens)) >= len(prompt),
            logprobs=zeros,
            versions=zeros.astype(np.int32),
            turns=(),
            images=images,
        ),
        streams=Streams(),
        advantages=zeros,
        weights=zeros + 1,
    )

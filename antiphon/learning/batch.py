"""From groups to packs: samples, counts, coefficients, mini-batches, micro-batches. Pure numpy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.algorithms.config import Aggregation
from antiphon.types import (
    FloatArray,
    Group,
    IntArray,
    Pack,
    Sample,
    Segment,
    TrainBatch,
    Update,
    concatenate,
)


def samples_of(groups: Sequence[Group]) -> list[list[Sample]]:
    """The samples of each group: every token at weight 1, no advantages yet."""
    return [
        [
            Sample(
                meta=trajectory.meta,
                segment=segment,
                streams=segment.streams,
                advantages=np.zeros(len(segment.tokens), dtype=np.float32),
                weights=np.ones(len(segment.tokens), dtype=np.float32),
            )
            for trajectory in group.trajectories
            for segment in trajectory.segments
        ]
        for group in groups
    ]


def pack_samples(samples: Sequence[Sample], tokens_per_pack: int) -> tuple[list[list[int]], list[Pack]]:
    """Packs that cover all samples, for scoring; and which samples are in each."""
    members = _fill([len(sample.segment.tokens) for sample in samples], tokens_per_pack)
    return members, [_pack([(samples[i], _counted(samples[i])) for i in pack]) for pack in members]


def split_packs(members: Sequence[Sequence[int]], packs: Sequence[Pack], scored: Sequence[FloatArray]) -> dict[int, FloatArray]:
    """Per-token results of packs, cut back into those of the samples, by index."""
    result: dict[int, FloatArray] = {}
    for indices, pack, values in zip(members, packs, scored, strict=True):
        result |= dict(zip(indices, np.split(values, np.cumsum(pack.lengths)[:-1]), strict=True))
    return result


def build_batch(
    groups: Sequence[Sequence[Sample]],
    *,
    aggregation: Aggregation,
    max_tokens: int,
    minibatches: int = 1,
    epochs: int = 1,
    tokens_per_pack: int,
    skip_zero_advantage: bool = False,
    ranks: int = 1,
) -> TrainBatch:
    """Cut the groups of a step into updates, and each update into packs of at most `tokens_per_pack` tokens.

    `max_tokens` is the constant divisor of `sequence_mean_token_sum_norm`. With `skip_zero_advantage` sequences without
    advantage are counted but not computed: right for losses that are zero there.
    """
    parts = [groups[i * len(groups) // minibatches : (i + 1) * len(groups) // minibatches] for i in range(minibatches)]
    updates = [_update(part, aggregation, max_tokens, tokens_per_pack, skip_zero_advantage, ranks) for part in parts]
    return TrainBatch(updates=tuple(updates * epochs))


def _update(
    groups: Sequence[Sequence[Sample]],
    aggregation: Aggregation,
    max_tokens: int,
    tokens_per_pack: int,
    skip_zero_advantage: bool,
    ranks: int,
) -> Update:
    samples = [sample for group in groups for sample in group]
    counted = [int(_counted(sample).sum()) for sample in samples]
    trajectories: dict[object, int] = {}
    for sample, tokens in zip(samples, counted, strict=True):
        trajectories[sample.meta.id] = trajectories.get(sample.meta.id, 0) + tokens
    trained = sum(tokens > 0 for tokens in trajectories.values())  # those with a token that counts
    total = sum(counted)

    def divisor(sample: Sample) -> int:
        """What the loss of one token of this sample is divided by."""
        match aggregation:
            case "token_mean":
                return total
            case "sequence_mean_token_mean":
                return trained * trajectories[sample.meta.id]
            case "sequence_mean_token_sum":
                return trained
            case "sequence_mean_token_sum_norm":
                return trained * max_tokens

    rows = [
        (sample, _counted(sample) * sample.weights / max(divisor(sample), 1))
        for sample, tokens in zip(samples, counted, strict=True)
        if tokens and not (skip_zero_advantage and not sample.advantages.any())
    ]
    packs = [_pack([rows[i] for i in members]) for members in _fill([len(s.segment.tokens) for s, _ in rows], tokens_per_pack)]
    per_rank = tuple(tuple(packs[rank::ranks]) for rank in range(ranks))
    return Update(packs=per_rank, loss_tokens=total, samples=len(trajectories), groups=len(groups))


def _counted(sample: Sample) -> NDArray[np.float64]:
    """1 where a token takes part in the loss, [L]. The first token has nothing before it to be predicted from."""
    counted: NDArray[np.float64] = (sample.segment.loss_mask & (sample.weights != 0)).astype(np.float64)
    counted[:1] = 0
    return counted


def _fill(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: indices of the sequences of each pack. A sequence over the budget has a pack to itself."""
    packs: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for position, (used, members) in enumerate(packs):
            if used + lengths[index] <= budget:
                members.append(index)
                packs[position] = (used + lengths[index], members)
                break
        else:
            packs.append((lengths[index], [index]))
    return [members for _, members in packs]


def _pack(rows: Sequence[tuple[Sample, NDArray[np.float64]]]) -> Pack:
    samples = [sample for sample, _ in rows]
    segments = [sample.segment for sample in samples]
    lengths: IntArray = np.array([len(segment.tokens) for segment in segments], dtype=np.int32)
    return Pack(
        tokens=np.concatenate([segment.tokens for segment in segments]),
        lengths=lengths,
        loss_mask=np.concatenate([coefficients != 0 for _, coefficients in rows]),
        logprobs=np.concatenate([segment.logprobs for segment in segments]),
        advantages=np.concatenate([sample.advantages for sample in samples]),
        coefficients=np.concatenate([coefficients for _, coefficients in rows]),
        temperatures=np.concatenate([_temperatures(segment) for segment in segments]),
        streams=concatenate([sample.streams for sample in samples]),
    )


def _temperatures(segment: Segment) -> FloatArray:
    """The temperature each token was sampled at, 1 where it was not sampled, [L]."""
    temperatures = np.ones(len(segment.tokens), dtype=np.float32)
    for turn in segment.turns:
        temperatures[turn.start : turn.stop] = turn.sampling.temperature or 1.0
    return temperatures


def supervised_batch(examples: Sequence[tuple[IntArray, IntArray]], tokens_per_pack: int) -> TrainBatch:
    """One update on (prompt [P], response [C]) pairs: the mean negative log-likelihood of all response tokens."""
    total = sum(len(response) for _, response in examples)
    members = _fill([len(prompt) + len(response) for prompt, response in examples], tokens_per_pack)
    packs = tuple(_supervised_pack([examples[i] for i in pack], total) for pack in members)
    return TrainBatch(updates=(Update(packs=(packs,), loss_tokens=total, samples=len(examples), groups=len(examples)),))


def _supervised_pack(examples: Sequence[tuple[IntArray, IntArray]], total: int) -> Pack:
    tokens = np.concatenate([part for example in examples for part in example]).astype(np.int32)
    mask = np.concatenate([np.repeat([False, True], [len(prompt), len(response)]) for prompt, response in examples])
    nothing = np.zeros(len(tokens), dtype=np.float32)
    return Pack(
        tokens=tokens,
        lengths=np.array([len(prompt) + len(response) for prompt, response in examples], dtype=np.int32),
        loss_mask=mask,
        logprobs=nothing,
        advantages=nothing,
        coefficients=mask / total,
        temperatures=np.ones(len(tokens), dtype=np.float32),
    )

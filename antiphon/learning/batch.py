"""Training batches: the groups of a step, cut into updates and packs, with the loss coefficient of each token. Pure numpy."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.algorithms.config import Aggregation
from antiphon.algorithms.trajectories import trajectories
from antiphon.core.types import Credit, Group, Sample, TrainBatch, Update
from antiphon.learning.packing import PACK_ARRAYS, WeightedSample, loss_tokens, pack_weighted
from antiphon.learning.rank_balance import balance_packs


def make_samples(groups: Sequence[Group]) -> list[list[Sample]]:
    """Return the samples of each group: every token at weight 1, without advantages."""
    return [
        [
            Sample(
                meta=trajectory.meta,
                segment=segment,
                streams=segment.streams,
                advantages=np.zeros(len(segment.tokens), dtype=np.float32),
                weights=np.ones(len(segment.tokens), dtype=np.float32),
                reward=trajectory.meta.score.value or 0.0,  # `or` for the type checker: a usable trajectory has a value
            )
            for trajectory in group.trajectories
            for segment in trajectory.segments
        ]
        for group in groups
    ]


def summarize_credit(groups: Sequence[Sequence[Sample]]) -> list[Credit]:
    """Return what became of each trajectory of a step, for the record."""
    return [_summarize(samples) for group in groups for samples in trajectories(group)]


def _summarize(samples: Sequence[Sample]) -> Credit:
    masks = [sample.segment.loss_mask for sample in samples]
    advantages = np.concatenate([sample.advantages[mask] for sample, mask in zip(samples, masks, strict=True)])
    weights = np.concatenate([sample.weights[mask] for sample, mask in zip(samples, masks, strict=True)])
    tokens = len(weights)
    return Credit(
        attempt=samples[0].meta.id,
        reward=float(samples[0].reward),
        advantage=float(advantages.mean(dtype=np.float64)) if tokens else 0.0,
        weight=float(weights.mean(dtype=np.float64)) if tokens else 0.0,
        tokens=tokens,
        signal=int(np.count_nonzero(advantages * weights)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of cutting the groups of a step into updates and packs.

    Attributes:
        aggregation: How token losses are summed.
        max_tokens: Constant divisor of `sequence_mean_token_sum_norm`.
        minibatches: Updates in one pass over the groups.
        epochs: Passes over the groups.
        tokens_per_pack: Most tokens of a pack, unless one sample has more.
        skip_zero_advantage: Count and measure samples without advantage, but compute no gradient of them. Correct for losses
            that are zero there.
        whole_groups: Have the samples of a group in one pack, for losses that compare them.
        ranks: Data-parallel ranks that the packs are divided among.
        share_prefixes: Have common prefixes, a prompt or an agent's history, once in a pack.
    """

    aggregation: Aggregation
    max_tokens: int
    tokens_per_pack: int
    minibatches: int = 1
    epochs: int = 1
    skip_zero_advantage: bool = False
    whole_groups: bool = False
    ranks: int = 1
    share_prefixes: bool = True


def build_batch(groups: Sequence[Sequence[Sample]], options: BatchOptions) -> TrainBatch:
    """Divide the groups of a step, each a list of samples, into updates, and each update into packs."""
    count = options.minibatches
    parts = [groups[i * len(groups) // count : (i + 1) * len(groups) // count] for i in range(count)]
    return TrainBatch(updates=tuple([_build_update(part, options) for part in parts] * options.epochs))


def _build_update(groups: Sequence[Sequence[Sample]], options: BatchOptions) -> Update:
    counts: dict[object, int] = {}  # loss tokens of each trajectory
    for sample in (sample for group in groups for sample in group):
        counts[sample.meta.id] = counts.get(sample.meta.id, 0) + int(np.count_nonzero(loss_tokens(sample)))
    divisors = _divisors(counts, options)
    everything = [
        [WeightedSample(each, loss_tokens(each) * each.weights / divisors[each.meta.id]) for each in group]
        for group in groups
    ]
    weighted = [[each for each in group if each.coefficients.any()] for group in everything]
    skip = options.skip_zero_advantage
    trained = [[each for each in group if each.sample.advantages.any() or not skip] for group in weighted]
    whole, single = [group for group in trained if group], [[each] for group in trained for each in group]
    bundles = whole if options.whole_groups else single
    skipped = [[each] for group in weighted for each in group if skip and not each.sample.advantages.any()]
    _, packs = pack_weighted(bundles, options.tokens_per_pack, options.share_prefixes)
    _, forward_only = pack_weighted(skipped, options.tokens_per_pack, options.share_prefixes)
    return Update(
        packs=balance_packs(packs, options.ranks),
        loss_tokens=sum(counts.values()),
        trajectories=len(counts),
        groups=len(groups),
        sequences=sum(map(len, bundles)),
        forward_only=balance_packs(forward_only, options.ranks),
    )


def _divisors(counts: Mapping[object, int], options: BatchOptions) -> dict[object, int]:
    """Return what the loss of each token is divided by, for each trajectory, from the loss tokens of all trajectories."""
    total, nonempty = sum(counts.values()), sum(tokens > 0 for tokens in counts.values())
    match options.aggregation:
        case "token_mean":
            divisors = dict.fromkeys(counts, total)
        case "sequence_mean_token_mean":
            divisors = {trajectory: nonempty * tokens for trajectory, tokens in counts.items()}
        case "sequence_mean_token_sum":
            divisors = dict.fromkeys(counts, nonempty)
        case "sequence_mean_token_sum_norm":
            divisors = dict.fromkeys(counts, nonempty * options.max_tokens)
    return {trajectory: max(divisor, 1) for trajectory, divisor in divisors.items()}


def digest_batches(batches: Sequence[TrainBatch]) -> str:
    """Return a digest of what the learner is trained on: equal for equal bytes in equal order."""
    found = hashlib.blake2b(digest_size=16)
    for update in (update for batch in batches for update in batch.updates):
        found.update(repr((update.loss_tokens, update.trajectories, update.groups)).encode())
        for pack in (pack for rank in update.packs for pack in rank):
            for name in PACK_ARRAYS:
                found.update(np.ascontiguousarray(getattr(pack, name)).data)
            found.update(repr([(image.start, image.stop, image.digest) for image in pack.images]).encode())
            for spec in sorted(pack.streams, key=lambda spec: spec.name):
                found.update(repr(spec).encode())
                found.update(np.ascontiguousarray(pack.streams[spec]).data)
    return found.hexdigest()

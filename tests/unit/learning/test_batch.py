"""Cutting groups into updates and packs: nothing lost, nothing twice, budgets kept, counts of the whole."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.types import AttemptId
from antiphon.learning.batch import BatchOptions, build_batch, digest_batches
from antiphon.learning.data_samples import sample_from_tokens, supervised_batch
from antiphon.learning.packing import pack_samples, split_packs

from .conftest import histories, make_sample


def sequence_lengths(pack):
    """Lengths of the sequences that the forest of pieces spells."""
    ends = [int(n) for n in pack.lengths]
    for piece, parent in enumerate(pack.parents):
        ends[piece] += ends[parent] if parent >= 0 else 0
    return [end for piece, end in enumerate(ends) if piece not in pack.parents]


def groups_of(rng, lengths):
    samples = [make_sample(rng, length, i) for i, length in enumerate(lengths)]
    return [samples[i : i + 2] for i in range(0, len(samples), 2)]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=4, max_size=16),
    budget=st.integers(1, 80),
    minibatches=st.integers(1, 2),
    epochs=st.integers(1, 2),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_sequence_is_packed_once_an_epoch(lengths, budget, minibatches, epochs, ranks, seed):
    groups = groups_of(np.random.default_rng(seed), lengths)
    batch = build_batch(
        groups,
        BatchOptions(
            aggregation="token_mean",
            max_tokens=30,
            minibatches=minibatches,
            epochs=epochs,
            tokens_per_pack=budget,
            ranks=ranks,
        ),
    )
    assert len(batch.updates) == minibatches * epochs
    for epoch in range(epochs):
        updates = batch.updates[epoch * minibatches : (epoch + 1) * minibatches]
        assert all(len({len(rank) for rank in update.packs}) == 1 for update in updates), "ranks compute at once"
        packs = [pack for update in updates for rank in update.packs for pack in rank if pack.loss_mask.any()]
        assert sorted(n for pack in packs for n in sequence_lengths(pack)) == sorted(lengths)
        assert all(len(pack.tokens) <= budget or len(sequence_lengths(pack)) == 1 for pack in packs)
        for update in updates:
            assert len(update.packs) == ranks
            mask = sum(int(pack.loss_mask.sum()) for rank in update.packs for pack in rank)
            total = sum(float(pack.coefficients.sum()) for rank in update.packs for pack in rank)
            assert mask == update.loss_tokens
            assert np.isclose(total, 1.0), "coefficients of a token mean sum to one over the whole update"
        assert sum(update.groups for update in updates) == len(groups)


@given(costs=st.lists(st.integers(2, 60), min_size=1, max_size=40), ranks=st.integers(2, 5))
def test_ranks_differ_by_at_most_one_pack(costs, ranks):
    groups = groups_of(np.random.default_rng(0), costs)
    (update,) = build_batch(
        groups, BatchOptions(aggregation="token_mean", max_tokens=60, tokens_per_pack=1, ranks=ranks)
    ).updates  # a pack a sequence
    work = [sum(len(pack.tokens) for pack in rank) for rank in update.packs]
    assert max(work) - min(work) <= max(costs)


def test_weights_take_tokens_out_of_the_count():
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, 10, i) for i in range(4)]
    samples[1].weights[:] = 0
    batch = build_batch(
        [samples], BatchOptions(aggregation="sequence_mean_token_mean", max_tokens=10, tokens_per_pack=100)
    )
    (update,) = batch.updates
    ((pack,),) = update.packs
    assert len(sequence_lengths(pack)) == 3
    assert np.isclose(pack.coefficients.sum(), 1.0)
    assert update.trajectories == 4


@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=10),
    alike=st.integers(0, 12),
    budget=st.integers(1, 60),
    share=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_scores_of_packs_go_back_to_their_samples(lengths, alike, budget, share, seed):
    samples = [make_sample(np.random.default_rng(i), length, i) for i, length in enumerate(lengths)]
    samples += histories(np.random.default_rng(seed), alike)
    members, packs = pack_samples(samples, budget, share=share)
    assert all(len(pack.tokens) <= budget or len(pack.ends) == 1 for pack in packs)
    back = split_packs(samples, members, [pack.logprobs * 2 for pack in packs], share)
    for sample, values in zip(samples, back, strict=True):
        np.testing.assert_array_equal(values, sample.segment.logprobs * 2)


def test_supervised_batch_predicts_responses_only():
    rng = np.random.default_rng(0)
    examples = [(rng.integers(0, 9, n).astype(np.int32), rng.integers(0, 9, 3).astype(np.int32)) for n in (2, 5, 9)]
    (update,) = supervised_batch(examples, tokens_per_pack=10).updates
    (packs,) = update.packs
    assert len(packs) > 1
    assert sum(int(pack.loss_mask.sum()) for pack in packs) == 9
    assert np.isclose(sum(float(pack.coefficients.sum()) for pack in packs), 1.0)


def test_what_an_agent_has_seen_is_packed_once():
    """A turn that was sampled in one segment is in another's history, and a fork has half of that history."""
    rng = np.random.default_rng(0)
    seen = np.arange(30, dtype=np.int32)
    trunk, later, fork = (make_sample(rng, length, 0) for length in (20, 34, 18))
    trunk = replaced(trunk, seen[:20], (10, 15))
    later = replaced(later, np.concatenate([seen, [5, 5, 5, 5]]), (30, 34))
    fork = replaced(fork, np.concatenate([seen[:15], [7, 7, 7]]), (15, 18))
    ((pack,),) = (
        build_batch([[trunk, later, fork]], BatchOptions(aggregation="token_mean", max_tokens=1, tokens_per_pack=100))
        .updates[0]
        .packs
    )
    assert len(pack.tokens) == 30 + 4 + 3
    assert int(pack.loss_mask.sum()) == 5 + 4 + 3
    owners = np.repeat(pack.owners, pack.lengths)[pack.loss_mask]
    assert sorted(np.bincount(owners)) == [3, 4, 5]


def test_a_history_is_shared_with_the_segment_that_has_most_of_it():
    """Two responses that begin alike cannot share tokens, since both are trained on them; a third has one as history."""
    rng = np.random.default_rng(0)
    short, long, later = (make_sample(rng, length, 0) for length in (3, 12, 14))
    seen = np.arange(12, dtype=np.int32)
    short = replaced(short, np.array([0, 1, 9]), (1, 3))
    long = replaced(long, seen, (1, 12))
    later = replaced(later, np.concatenate([seen, [7, 7]]), (12, 14))
    for order in itertools.permutations([short, long, later]):
        batch = build_batch([list(order)], BatchOptions(aggregation="token_mean", max_tokens=1, tokens_per_pack=100))
        ((pack,),) = batch.updates[0].packs
        assert len(pack.tokens) == 1 + 2 + 11 + 2, "the prompt, and what each has sampled, once"


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=12))
def test_what_segments_have_in_common_is_there_once(texts):
    """Where nobody's tokens are trained on but each one's last: as many tokens as there are different beginnings."""
    rng = np.random.default_rng(0)
    samples = []
    for number, text in enumerate(texts):
        tokens = np.array([*text, 10 + number])  # a last token of its own
        samples.append(replaced(make_sample(rng, len(tokens), number), tokens, (len(text), len(tokens))))
    _, (pack,) = pack_samples(samples, 1000)
    beginnings = {tuple(text[:end]) for text in texts for end in range(1, len(text) + 1)}
    assert len(pack.tokens) == len(beginnings) + len(texts)


def replaced(sample, tokens, turn):
    mask = (np.arange(len(tokens)) >= turn[0]) & (np.arange(len(tokens)) < turn[1])
    segment = replace(sample.segment, tokens=tokens.astype(np.int32), loss_mask=mask)
    return replace(sample, segment=segment, advantages=mask.astype(np.float32))


def test_a_prompt_is_packed_once_for_its_siblings():
    rng = np.random.default_rng(0)
    examples = [(np.arange(20, dtype=np.int32), rng.integers(0, 9, n).astype(np.int32)) for n in (3, 4, 5)]
    other = (np.arange(1, 11, dtype=np.int32), rng.integers(0, 9, 2).astype(np.int32))
    (update,) = supervised_batch([*examples, other], tokens_per_pack=100).updates
    (((pack,),)) = update.packs
    assert len(pack.tokens) == 20 + 3 + 4 + 5 + 10 + 2
    assert sorted(sequence_lengths(pack)) == [12, 23, 24, 25]
    (update,) = supervised_batch([*examples, other], tokens_per_pack=28).updates
    (packs,) = update.packs
    assert all(len(pack.tokens) <= 28 for pack in packs)


def test_siblings_fill_a_pack_to_its_last_token():
    """Four of ten tokens with a prompt of forty, and another prompt's: what they share costs a pack once."""
    first, second = (np.arange(place, place + 40) for place in (0, 100))
    siblings = [
        sample_from_tokens(AttemptId(group, number, 0), prompt, np.arange(200 + number, 210 + number))
        for group, prompt in enumerate((first, second))
        for number in range(4)
    ]
    members, packs = pack_samples(siblings, 80)
    assert [len(pack.tokens) for pack in packs] == [80, 80]
    assert sorted(map(sorted, members)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_digest_tells_apart_batches_that_differ_in_a_count():
    """What a loss is divided by is no array of a pack, and changes the gradient like one."""
    batch = build_batch(
        groups_of(np.random.default_rng(0), [5, 9, 4, 7]),
        BatchOptions(aggregation="token_mean", max_tokens=1, tokens_per_pack=64, ranks=1),
    )
    (update,) = batch.updates
    assert digest_batches([batch]) == digest_batches([replace(batch, updates=[replace(update)])])
    for name in ("loss_tokens", "trajectories", "groups"):
        other = replace(update, **{name: getattr(update, name) + 1})
        assert digest_batches([replace(batch, updates=[other])]) != digest_batches([batch]), name

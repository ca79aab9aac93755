"""Packs divided among ranks, against the best division that there is."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from antiphon.learning.packing import pack_samples
from antiphon.learning.rank_balance import PAIRS_PER_TOKEN, balance_packs, estimate_work
from tests.unit.learning.conftest import make_sample


def make_packs(rng, count):
    """Packs of one sample each, most of them short and some long."""
    lengths = [int(root) ** 2 for root in rng.integers(2, 31, count)]
    return [pack_samples([make_sample(rng, length, 0)], length)[1][0] for length in lengths]


def best_of_two(works):
    """Return the least work of the busier of two ranks with equally many packs, by trying all divisions."""
    indices = range(len(works))
    halves = itertools.combinations(indices, len(works) // 2)
    return min(max(sum(works[i] for i in half), sum(works[i] for i in {*indices} - {*half})) for half in halves)


def test_two_ranks_are_nearly_as_even_as_can_be():
    rng = np.random.default_rng(0)
    ratios = []
    for count in rng.choice([4, 6, 8, 10], 200):
        packs = make_packs(rng, count)
        shares = balance_packs(packs, 2)
        assert sorted(map(id, itertools.chain(*shares))) == sorted(map(id, packs))
        busier = max(sum(map(estimate_work, share)) for share in shares)
        ratios.append(busier / best_of_two(list(map(estimate_work, packs))))
    assert np.mean(ratios) < 1.02  # dealt out in turn, by their work, it is 1.14


def test_work_counts_the_tokens_that_each_piece_sees():
    """A shared beginning is computed once; what follows it sees it, and itself."""
    shared, tails = 40, (7, 90)
    samples = []
    for number, tail in enumerate(tails):
        sample = make_sample(np.random.default_rng(0), shared + tail, number)
        tokens = np.concatenate([np.arange(shared), 1000 * (number + 1) + np.arange(tail)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= shared
        samples.append(replace(sample, segment=replace(sample.segment, tokens=tokens, loss_mask=mask)))
    _, (pack,) = pack_samples(samples, 1000)
    assert sorted(pack.lengths) == sorted([shared, *tails])
    pairs = shared * shared + sum(tail * (shared + tail) for tail in tails)
    assert estimate_work(pack) == pytest.approx(shared + sum(tails) + pairs / PAIRS_PER_TOKEN)


@pytest.mark.parametrize("count", [1, 5, 6, 7])
def test_ranks_have_equally_many_packs(count):
    packs = make_packs(np.random.default_rng(0), count)
    shares = balance_packs(packs, 3)
    assert len({len(share) for share in shares}) == 1 and sum(map(len, shares)) == -(-count // 3) * 3
    padding = [
        pack for pack in itertools.chain(*shares) if not pack.loss_mask.any() and all(pack is not p for p in packs)
    ]
    assert len(padding) == -count % 3

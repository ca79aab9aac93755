"""Packs divided among data-parallel ranks, as evenly as can be."""

from collections.abc import Sequence

import numpy as np

from antiphon.core.types import Pack
from antiphon.learning.packing import padding_pack

# Pairs of tokens whose attention costs as much as everything else of one token, in a dense model 4,096 wide.
PAIRS_PER_TOKEN = 50_000


def balance_packs(packs: Sequence[Pack], ranks: int) -> tuple[tuple[Pack, ...], ...]:
    """Return the packs of each rank: the same number for each, since all compute at once, and similar work.

    Where they do not come out even, some ranks get a padding pack. Source of the differencing method: Karmarkar and Karp 1982;
    with parts of equal number Michiels et al. 2003, "Performance ratios for the differencing method".
    """
    if ranks == 1 or not packs:
        return (tuple(packs),) * ranks
    filled = [*packs, *[padding_pack(packs[0])] * (-len(packs) % ranks)]
    work = sorted(((estimate_work(pack), index) for index, pack in enumerate(filled)), reverse=True)
    # Partial divisions of packs among ranks: the work and the packs of each rank.
    divisions = [[(cost, [index]) for cost, index in work[i : i + ranks]] for i in range(0, len(work), ranks)]
    while len(divisions) > 1:
        divisions.sort(key=lambda division: max(division)[0] - min(division)[0])
        one, other = sorted(divisions.pop()), sorted(divisions.pop(), reverse=True)
        divisions.append([(a + b, [*own, *more]) for (a, own), (b, more) in zip(one, other, strict=True)])
    shares = sorted(divisions[0], key=lambda share: min(share[1]))
    return tuple(tuple(filled[index] for index in sorted(own)) for _, own in shares)


def estimate_work(pack: Pack) -> float:
    """Return what a pack costs to compute, in tokens: its own, and the pairs of tokens in attention."""
    depth = np.zeros(len(pack.lengths))  # tokens from the beginning of each span's sequence to its end
    for span, (length, parent) in enumerate(zip(pack.lengths, pack.parents, strict=True)):
        depth[span] = length + (depth[parent] if parent >= 0 else 0)
    return float(pack.lengths.sum() + (pack.lengths * depth).sum() / PAIRS_PER_TOKEN)

"""Arrays over all sampled tokens of a batch: flatten, whiten, select. Pure numpy."""

from collections.abc import Sequence

import numpy as np

from antiphon.algorithms.normalization import normalize
from antiphon.algorithms.trajectories import Arrays, Samples, gather_sampled, scatter_sampled


def whiten(groups: Samples, arrays: Arrays) -> Arrays:
    """Subtract the mean over all sampled tokens of the batch and divide by the standard deviation; other tokens stay 0."""
    values = flatten_sampled(groups, arrays)
    return unflatten_sampled(groups, normalize(values, correction=0)) if len(values) else arrays


def select_lowest(groups: Samples, arrays: Arrays, share: float) -> list[list[np.ndarray]]:
    """Select the lowest `share` of the values of all sampled tokens of the batch, [L] a sample.

    As many as fit the share are selected; of equal values the first.
    """
    values = flatten_sampled(groups, arrays)
    chosen = np.zeros(len(values), dtype=np.bool_)
    chosen[np.argsort(values, kind="stable")[: int(share * len(values))]] = True
    return unflatten_sampled(groups, chosen)


def flatten_sampled(groups: Samples, arrays: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Return the values of all sampled tokens of the batch, from arrays [group][sample] -> [L], in double precision."""
    flat = [sample for group in groups for sample in group]
    return gather_sampled(flat, [array for per_group in arrays for array in per_group]) if flat else np.zeros(0)


def unflatten_sampled(groups: Samples, values: np.ndarray) -> list[list[np.ndarray]]:
    """Invert `flatten_sampled`."""
    left = scatter_sampled([sample for group in groups for sample in group], values)
    return [[next(left) for _ in group] for group in groups]

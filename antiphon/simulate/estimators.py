"""Statistical estimators of the probe."""

import itertools
from collections.abc import Sequence
from statistics import fmean

import numpy as np


def fit_nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Fit coefficients of at least 0 with the least relative error.

    Tries all subsets of the columns, of which there are few, and takes the best one without a negative coefficient.

    Args:
        rows: Matrix [N, C].
        values: Targets [N], all positive.

    Returns:
        Coefficients [C].
    """
    wanted = np.asarray(values, float)
    matrix = np.asarray(rows, float) / wanted[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    best, error = np.zeros(matrix.shape[1]), float("inf")
    columns = range(matrix.shape[1])
    for size in range(1, len(columns) + 1):
        for subset in map(list, itertools.combinations(columns, size)):
            found = np.linalg.lstsq(matrix[:, subset] / scale[subset], np.ones(len(wanted)))[0] / scale[subset]
            squared_error = float(((matrix[:, subset] @ found - 1) ** 2).sum())
            if (found >= 0).all() and squared_error < error * (1 - 1e-9):
                best, error = np.zeros(len(columns)), squared_error
                best[subset] = found
    return [float(number) for number in best]


def estimate_variances(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the variance between groups, without the part that the means of small groups owe to chance, and within them."""
    sized = [np.asarray(group, float) for group in groups if len(group) > 1]
    if len(sized) < 2:
        return 0.0, 0.0
    within = fmean(float(group.var(ddof=1)) for group in sized)
    between = float(np.var([group.mean() for group in sized], ddof=1)) - within / fmean(map(len, sized))
    return max(between, 0.0), within


def estimate_correlation(groups: Sequence[Sequence[float]]) -> float:
    """Return the intraclass correlation of groups, between 0 and 1."""
    between, within = estimate_variances(groups)
    return between / (between + within) if between else 0.0


def shrink_success_rates(groups: Sequence[Sequence[float]]) -> list[float]:
    """Estimate the success probability of each group of scores.

    The means of a few scores are further apart than the probabilities behind them, so they are shrunk towards their mean until
    their variance is the variance between groups.
    """
    means = np.array([fmean(group) for group in groups])
    between, _ = estimate_variances(groups)
    observed = float(means.var(ddof=1)) if len(means) > 1 else 0.0
    factor = (between / observed) ** 0.5 if observed else 0.0
    return [float(chance) for chance in np.clip(means.mean() + factor * (means - means.mean()), 0.0, 1.0)]

"""Means, deviations and differences from them, in double precision, that never take rounding for a signal.

Equal values are exactly 0 apart however large they are, and small differences on a large offset are kept.
"""

import numpy as np

EPSILON = 1e-4  # of TRL and of DeepSeekMath's public code; a deviation below it counts as none


def stable_mean(values: np.ndarray) -> float:
    """Return the mean of values [N], 0 of none. That of equal values is the value itself, which a sum divided by N need not be.

    >>> stable_mean(np.array([0.1, 0.1, 0.1])), float(np.mean([0.1, 0.1, 0.1]))
    (0.1, 0.10000000000000002)
    """
    if not len(values):
        return 0.0
    first = float(values[0])
    return first + float((values.astype(np.float64) - first).mean())


def center(values: np.ndarray) -> np.ndarray:
    """Return values [N] less their mean.

    >>> center(np.array([0, 1, 2])), center(np.array([0.1, 0.1, 0.1]))
    (array([-1.,  0.,  1.]), array([0., 0., 0.]))
    """
    if not len(values) or values.min() == values.max():
        return np.zeros(len(values))
    found = values.astype(np.float64)
    found = found - found.mean()
    centre: np.ndarray = found - found.mean()  # the first mean was rounded to what the offset leaves of a number
    return centre


def standard_deviation(values: np.ndarray, correction: int = 1) -> float:
    """Return the standard deviation of values [N], with Bessel's correction; 0 where there are too few to have one.

    >>> [standard_deviation(np.array(values)) for values in ([0, 1, 2], [0.1, 0.1, 0.1], [5])]
    [1.0, 0.0, 0.0]
    """
    count = len(values) - correction
    return float(np.sqrt(np.square(center(values)).sum() / count)) if count > 0 else 0.0


def normalize(values: np.ndarray, correction: int = 1) -> np.ndarray:
    """Return values [N] less their mean, divided by their deviation and epsilon; 0 for one alone.

    >>> normalize(np.array([0, 1, 2])).round(3)
    array([-1.,  0.,  1.])
    """
    return center(values) / (standard_deviation(values, correction) + EPSILON)


def rescale(values: np.ndarray) -> np.ndarray:
    """Return values [N] with the same mean, and differences from it divided by their deviation and epsilon.

    >>> rescale(np.array([4, 8])).round(3)
    array([5., 7.])
    """
    return normalize(values, correction=0) + stable_mean(values)


def leave_one_out(values: np.ndarray) -> np.ndarray:
    """Return values [N], each less the mean of the others.

    >>> leave_one_out(np.array([0, 1, 2]))
    array([-1.5,  0. ,  1.5])
    """
    count = len(values)
    return center(values) * (count / max(count - 1, 1))

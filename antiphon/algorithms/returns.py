"""Discounted sums of rewards, and generalized advantages. Pure numpy, one array [T]."""

import numpy as np


def discounted_sums(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Σ_{k≥t} gamma^(k-t) r_k of each t, [T] in double precision; in log T passes over the array.

    >>> discounted_sums(np.array([1.0, 0.0, 4.0]), 0.5)
    array([2., 2., 4.])
    """
    found = rewards.astype(np.float64)
    if gamma == 1:
        return found[::-1].cumsum()[::-1]
    reach = 1
    while reach < len(found) and gamma**reach > 0:
        found[:-reach] += gamma**reach * found[reach:]
        reach *= 2
    return found


def generalized_advantages(rewards: np.ndarray, values: np.ndarray, gamma: float, lambda_: float) -> np.ndarray:
    """Generalised advantages [T] of rewards [T] and the values [T] of the states in which the tokens were chosen.

    >>> generalized_advantages(np.array([0.0, 1.0]), np.array([0.5, 0.6]), 1.0, 0.5)  # δ = 0.1, 0.4
    array([0.3, 0.4])
    """
    after = np.append(values[1:], 0.0) if len(values) else values
    return discounted_sums(rewards + gamma * after - values, gamma * lambda_)

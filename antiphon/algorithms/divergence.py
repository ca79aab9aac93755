"""Estimates of the divergence of one policy from another, from the log-probs of the tokens that were sampled."""

from typing import Any

MAX_LOG_RATIO = 20.0  # |log ratio| beyond which a probability has lost all meaning


def estimate_kl(policy: Any, reference: Any, estimator: str, library: Any) -> Any:
    """KL(policy ‖ reference) at each token [N], estimated from log-probs [N] of either; `library` is numpy or torch.

    With d = log policy - log reference: k1 = d, abs = |d|, k2 = mse = d² / 2, k3 = exp(-d) + d - 1, which is unbiased as k1 is,
    and never negative.

    Source: Schulman 2020, "Approximating KL divergence".

    >>> import numpy as np
    >>> policy, reference = np.log([0.5, 0.5]), np.log([0.25, 1.0])
    >>> [estimate_kl(policy, reference, name, np).round(4).tolist() for name in ("k1", "abs", "k2", "k3")]
    [[0.6931, -0.6931], [0.6931, 0.6931], [0.2402, 0.2402], [0.1931, 0.3069]]
    """
    difference = log_ratio(policy, reference, library)
    match estimator:
        case "k1":
            return difference
        case "abs":
            return abs(difference)
        case "k2" | "mse":
            return difference * difference / 2
        case _:
            return library.exp(-difference) + difference - 1


def log_ratio(numerator: Any, denominator: Any, library: Any) -> Any:
    """Log of the ratio of probabilities [N], kept within ±`MAX_LOG_RATIO`; 0 of two that are impossible."""
    return library.clip(library.nan_to_num(numerator - denominator, nan=0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)

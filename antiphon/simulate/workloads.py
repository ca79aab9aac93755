"""Distributions of lengths and latencies, drawn by name: equal seeds and names give equal numbers, in any order of calls."""

import math
from statistics import NormalDist
from typing import Literal

from pydantic import Field, model_validator

from antiphon.core.config import Config
from antiphon.core.rng import derive

_STANDARD = NormalDist()


class DistributionConfig(Config):
    """A distribution of numbers, clipped to `minimum` and `maximum`."""

    kind: Literal["constant", "uniform", "normal", "lognormal", "pareto", "trace"] = "constant"
    mean: float = Field(1.0, ge=0.0)
    """Mean before clipping. The values of a trace are scaled to this mean; 0 leaves them as they are."""
    spread: float = Field(0.0, ge=0.0)
    """uniform: half the width. normal: standard deviation. lognormal: standard deviation of the logarithm. pareto: exponent of
    the tail, above 1."""
    values: tuple[float, ...] = ()
    """trace: measured values."""
    minimum: float = 0.0
    maximum: float = Field(math.inf, allow_inf_nan=True)
    shared: float = Field(0.0, ge=0.0, le=1.0)
    """Correlation of draws that share a key (responses to one prompt), before the distribution is applied."""

    @model_validator(mode="after")
    def _check_parameters(self) -> "DistributionConfig":
        if self.kind == "trace" and not (self.values and (sum(self.values) or not self.mean)):
            raise ValueError("a trace needs values, and their mean cannot be scaled if it is 0")
        if self.kind == "pareto" and self.spread <= 1:
            raise ValueError("a pareto distribution has a mean only if spread, the exponent of its tail, is above 1")
        if self.minimum > self.maximum:
            raise ValueError(f"minimum {self.minimum:g} is above maximum {self.maximum:g}")
        return self

    def quantile(self, share: float) -> float:
        """Return the number that a `share` in (0, 1) of draws does not exceed."""
        match self.kind:
            case "constant":
                number = self.mean
            case "uniform":
                number = self.mean + self.spread * (2 * share - 1)
            case "normal":
                number = self.mean + self.spread * _STANDARD.inv_cdf(share)
            case "lognormal":
                number = self.mean * math.exp(self.spread * _STANDARD.inv_cdf(share) - self.spread**2 / 2)
            case "pareto":
                number = self.mean * (self.spread - 1) / self.spread * (1 - share) ** (-1 / self.spread)
            case "trace":
                scale = self.mean * len(self.values) / sum(self.values) if self.mean else 1.0
                number = scale * sorted(self.values)[int(share * len(self.values))]
        return min(max(number, self.minimum), self.maximum)

    def draw_correlated(self, key: int, seed: int) -> float:
        """Draw with `seed`, correlated with other seeds' draws for the same `key`."""
        if not self.shared:
            return self.draw(seed)
        common, own = (_STANDARD.inv_cdf(_to_unit_interval(number)) for number in (key, derive(seed)))
        mixed = math.sqrt(self.shared) * common + math.sqrt(1 - self.shared) * own
        return self.quantile(min(max(_STANDARD.cdf(mixed), 1e-12), 1 - 1e-12))

    def draw(self, seed: int, *names: str | int) -> float:
        """Draw from the stream `names` of a seed."""
        if self.kind == "constant":
            return self.quantile(0.5)
        return self.quantile(_to_unit_interval(derive(seed, *names)))


def _to_unit_interval(number: int) -> float:
    """Map a seed to a number between 0 and 1."""
    return (number + 0.5) / 2**63

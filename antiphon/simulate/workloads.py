"""Distributions of lengths and latencies, drawn by name: equal seeds and names give equal numbers, in any order of asking."""

import math
from statistics import NormalDist
from typing import Literal

from pydantic import Field, model_validator

from antiphon.core.config import Config
from antiphon.core.rng import derive

_STANDARD = NormalDist()


class DistributionConfig(Config):
    """A distribution of numbers of at least `minimum` and at most `maximum`; what lies beyond is moved to the bound."""

    kind: Literal["constant", "uniform", "normal", "lognormal", "pareto", "trace"] = "constant"
    mean: float = Field(1.0, ge=0.0)
    """Of the distribution before its bounds; of a trace, what its values are scaled to, and 0 leaves them as they are."""
    spread: float = Field(0.0, ge=0.0)
    """uniform: half the width. normal: standard deviation. lognormal: that of the logarithm. pareto: the exponent of the
    tail, above 1."""
    values: tuple[float, ...] = ()
    """trace: what was measured."""
    minimum: float = 0.0
    maximum: float = math.inf
    shared: float = Field(0.0, ge=0.0, le=1.0)
    """How alike draws for one thing are (answers to one prompt): their correlation, before the distribution is applied."""

    @model_validator(mode="after")
    def _whole(self) -> "DistributionConfig":
        if self.kind == "trace" and not (self.values and (sum(self.values) or not self.mean)):
            raise ValueError("a trace needs values, and their mean cannot be scaled if it is 0")
        if self.kind == "pareto" and self.spread <= 1:
            raise ValueError("a pareto distribution has a mean only if spread, the exponent of its tail, is above 1")
        if self.minimum > self.maximum:
            raise ValueError(f"minimum {self.minimum:g} is above maximum {self.maximum:g}")
        return self

    def quantile(self, share: float) -> float:
        """The number that a `share` in (0, 1) of draws does not exceed."""
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

    def draw_alike(self, thing: int, seed: int) -> float:
        """A draw of `seed`, correlated with other seeds' draws for the same `thing`."""
        if not self.shared:
            return self.draw(seed)
        common, own = (_STANDARD.inv_cdf(_share(number)) for number in (thing, derive(seed)))
        mixed = math.sqrt(self.shared) * common + math.sqrt(1 - self.shared) * own
        return self.quantile(min(max(_STANDARD.cdf(mixed), 1e-12), 1 - 1e-12))

    def draw(self, seed: int, *names: str | int) -> float:
        """The draw of the stream `names` of the run seeded with `seed`."""
        if self.kind == "constant":
            return self.quantile(0.5)
        return self.quantile(_share(derive(seed, *names)))


def _share(number: int) -> float:
    """A seed as a number between 0 and 1."""
    return (number + 0.5) / 2**63

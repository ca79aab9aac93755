"""Configuration of what to optimise. Importing it imports no torch."""

from typing import Any, Literal

from pydantic import Field, model_validator

from antiphon.algorithms.recipes import RECIPES
from antiphon.config import Config

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]


# Losses that are zero where the advantage is.
VANISHING = frozenset({"ppo_clip", "decoupled_ppo", "policy_gradient", "tis", "topr", "cispo"})


class AlgorithmConfig(Config):
    """Advantages, loss, and how token losses are summed."""

    recipe: str = "grpo"
    """What is not given here is that of `antiphon/algorithms/recipes.py`; `algorithm: dapo` is short for it."""
    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `reinforce`, or package.module:attribute."""
    advantage_clip: float = Field(0.0, ge=0.0)
    """Bound on |advantage|; 0 is none."""
    mask_truncated: bool = False
    """Give completions that hit the token limit no weight."""
    loss: str = "ppo_clip"
    """`ppo_clip`, `decoupled_ppo`, `policy_gradient`, `tis`, `topr`, `cispo`, `kimi`, or package.module:attribute."""
    ratio_level: Literal["token", "sequence", "turn"] = "token"
    """Of `ppo_clip` and `decoupled_ppo`: whose ratio is clipped."""
    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    clip_high: float = Field(0.2, ge=0.0)
    dual_clip: float = Field(0.0, ge=0.0)
    """Of the same: the loss where the advantage is negative is at most this times its size; above 1, and 0 is none."""
    ratio_low: float = Field(0.0, ge=0.0)
    ratio_high: float = Field(1.0, gt=0.0)
    """Bounds of the importance weight in `tis` and `topr`; the upper one that of the weight in `decoupled_ppo`."""
    positive_weight: float = Field(1.0, ge=0.0)
    negative_weight: float = Field(1.0, ge=0.0)
    """Of `topr`."""
    kimi_tau: float = Field(0.1, ge=0.0)
    aggregation: Aggregation = "token_mean"
    """How token losses become one number; counts are those of the whole update."""
    entropy_coefficient: float = 0.0
    kl_coefficient: float = Field(0.0, ge=0.0)
    """Weight of the k3 divergence from the reference model in the loss; 0 computes no reference."""

    @model_validator(mode="before")
    @classmethod
    def _of_recipe(cls, given: Any) -> Any:
        given = {"recipe": given} if isinstance(given, str) else given
        if not isinstance(given, dict) or "recipe" not in given:
            return given
        if given["recipe"] not in RECIPES:
            raise ValueError(f"recipe {given['recipe']!r}: there are {', '.join(sorted(RECIPES))}")
        return {**RECIPES[given["recipe"]], **given}

    @model_validator(mode="after")
    def _possible(self) -> "AlgorithmConfig":
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip:g} is not above 1; 0 is none")
        if self.ratio_low > self.ratio_high:
            raise ValueError(f"ratio_low {self.ratio_low:g} is above ratio_high {self.ratio_high:g}")
        return self

    @property
    def needs_proximal(self) -> bool:
        """Whether log-probs of before the step's first update are asked for."""
        return self.loss == "decoupled_ppo"

    @property
    def zero_without_advantage(self) -> bool:
        """Whether a token without advantage makes no gradient, so that it need not be computed."""
        return self.loss in VANISHING and not (self.kl_coefficient or self.entropy_coefficient)

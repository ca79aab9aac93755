"""Configuration of what to optimise. Importing it imports no torch."""

from typing import Any, Literal

from pydantic import Field, model_validator

from antiphon.algorithms.recipes import RECIPES
from antiphon.config import Config

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]


Level = Literal["token", "turn", "sequence", "product"]


class CorrectionConfig(Config):
    """Weights and filters by r, the ratio of a token's probability before the step to that when it was sampled: what the
    engine and the learner do not agree on, and what training has changed since."""

    level: Level | None = None
    """Whose ratio weighs the loss: the token's, the geometric mean over its turn or its sequence, or the product over its
    sequence; null weighs nothing."""
    high: float = Field(2.0, gt=0.0)
    """Greatest weight."""
    filter_level: Level | None = None
    """Whose ratio says whether a token is trained on; null trains on all."""
    keep_low: float = Field(0.5, ge=0.0)
    keep_high: float = Field(2.0, gt=0.0)

    @property
    def on(self) -> bool:
        """Whether there is anything to do."""
        return self.level is not None or self.filter_level is not None


class RhythmConfig(Config):
    """Credit by the rhythm of attention, see `algorithms/rhythm.py`: some tokens of a response have their advantage
    amplified. Defaults are the paper's (arXiv 2510.13554) where it has one."""

    kind: Literal["local", "global", "coupled", "random", "entropy"] | None = None
    """Which tokens: those where a chunk begins, those that later tokens look back on, or both, tied together; null changes
    nothing. The paper's baselines: as many tokens at random, or those of the highest entropy, for which stands the
    negative log-prob that the token was sampled with."""
    amplification: float = Field(1.5, gt=0.0)
    """What the advantage of a chosen token is multiplied with."""
    share: float = Field(0.4, gt=0.0, le=1.0)
    """Of a response's tokens, that are chosen: q."""
    positive_only: bool = False
    """Leave negative advantages as they are: the paper's first version. The second amplifies both signs, and is better."""
    window: int = Field(10, gt=0)
    """Distance at which WAAD is cut off: W."""
    horizon_low: int = Field(10, ge=0)
    horizon_high: int = Field(100, ge=0)
    """How far behind a token those are whose looking back counts for FAI, both included: H_lo and H_hi. The paper's first
    version had 50."""
    waad_quantile: float = Field(0.5, ge=0.0, le=1.0)
    """Of `coupled`: an anchor lies inside a chunk if its WAAD is at most this quantile of the response's: tau_waad. The
    paper leaves it open; the median is ours."""
    delta_quantile: float = Field(0.6, ge=0.0, le=1.0)
    """Of `coupled`: a chunk begins where Delta is at least this quantile of the response's: tau_Delta. The paper leaves it
    open; ours is 1 - `share`, so that it is what `local` chooses."""
    back: float = Field(0.5, ge=0.0, le=1.0)
    """Of `coupled`: the part of such an anchor's amplification that goes to the token which began the chunk: a. The paper
    leaves it open; a public re-implementation has 0.5."""
    lookback: int = Field(3, gt=0)
    """Of `coupled`: how many tokens before an anchor its chunk may have begun: k. The paper names 1 to 3."""

    @model_validator(mode="after")
    def _possible(self) -> "RhythmConfig":
        if self.horizon_low > self.horizon_high:
            raise ValueError(f"horizon_low {self.horizon_low} is above horizon_high {self.horizon_high}")
        return self

    @property
    def reads_attention(self) -> bool:
        """Whether the learner is asked for WAAD and FAI."""
        return self.kind in ("local", "global", "coupled")


# Losses that are zero where the advantage is.
VANISHING = frozenset({"ppo_clip", "policy_gradient", "tis", "topr", "cispo"})


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
    """`ppo_clip`, `policy_gradient`, `tis`, `topr`, `cispo`, `kimi`, or package.module:attribute."""
    ratio_level: Literal["token", "sequence", "turn"] = "token"
    """Of `ppo_clip`: whose ratio is clipped."""
    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    clip_high: float = Field(0.2, ge=0.0)
    dual_clip: float = Field(0.0, ge=0.0)
    """Of `ppo_clip`: the loss where the advantage is negative is at most this times its size; above 1, and 0 is none."""
    ratio_low: float = Field(0.0, ge=0.0)
    ratio_high: float = Field(1.0, gt=0.0)
    """Bounds of the importance weight in `tis` and `topr`."""
    positive_weight: float = Field(1.0, ge=0.0)
    negative_weight: float = Field(1.0, ge=0.0)
    """Of `topr`."""
    kimi_tau: float = Field(0.1, ge=0.0)
    correction: CorrectionConfig = CorrectionConfig()
    """For tokens that another policy has sampled than the one before the step."""
    rhythm: RhythmConfig = RhythmConfig()
    """For credit that differs between the tokens of a response."""
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
        parts = RECIPES[given["recipe"]]
        return parts | {key: _over(parts.get(key), value) for key, value in given.items()}

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
        return self.correction.on

    @property
    def zero_without_advantage(self) -> bool:
        """Whether a token without advantage makes no gradient, so that it need not be computed."""
        return self.loss in VANISHING and not (self.kl_coefficient or self.entropy_coefficient)


def _over(part: Any, given: Any) -> Any:
    """What is given, with the rest of a recipe's section around it."""
    return {**part, **given} if isinstance(part, dict) and isinstance(given, dict) else given

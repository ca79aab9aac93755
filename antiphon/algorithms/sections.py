"""Sections of the configuration of an algorithm. Importing it imports no torch."""

from typing import Literal

from pydantic import Field, model_validator

from antiphon.core.config import Config

Level = Literal["token", "turn", "sequence", "product"]


class CorrectionConfig(Config):
    """Weights and filters by r, the ratio of a token's probability before the step to that when it was sampled.

    It corrects for the disagreement of engine and learner, and for what training has changed since sampling.
    """

    level: Level | None = None
    """Whose ratio weighs the loss: the token's, the geometric mean over its turn or its sequence, or the product over its
    sequence; null weighs nothing."""
    high: float = Field(2.0, gt=0.0)
    """Greatest weight."""
    filter_level: Level | None = None
    """Whose ratio says whether a token is trained on; null trains on all."""
    keep_low: float = Field(0.5, ge=0.0)
    keep_high: float = Field(2.0, gt=0.0)
    proximal: Literal["computed", "interpolated"] = "computed"
    """Log-probs of before the step: by a forward pass, where the step has several updates; or between those of sampling and
    those of now, by the age of the token."""

    @model_validator(mode="after")
    def _possible(self) -> "CorrectionConfig":
        if self.keep_low > self.keep_high:
            raise ValueError(f"keep_low {self.keep_low:g} is above keep_high {self.keep_high:g}: nothing would be kept")
        if self.proximal == "interpolated" and not self.on:
            raise ValueError("proximal: interpolated is for what level or filter_level say, and neither is given")
        return self

    @property
    def on(self) -> bool:
        """True if there is anything to correct."""
        return self.level is not None or self.filter_level is not None


NormalizationScope = Literal["none", "group", "batch", "running"]


class RewardConfig(Config):
    """Shaping of scores before advantages are computed."""

    overlong_tokens: int = Field(0, ge=0)
    """Completions that come nearer than this to the token limit lose up to `overlong_penalty`; 0 takes nothing off."""
    overlong_penalty: float = Field(1.0, ge=0.0)
    baseline: NormalizationScope = "none"
    """Whose mean is taken off: the group's, the batch's, or that of all scores so far. Not where turns are paid."""
    scale: NormalizationScope = "none"
    """Whose standard deviation they are divided by, and with them what each turn earned."""
    clip: float = Field(0.0, ge=0.0)
    """Bound on their size, after that; 0 is none. Not where turns are paid."""

    @property
    def without_turns(self) -> tuple[str, ...]:
        """The keys in use that change the reward of a whole trajectory and have no share for each of its turns."""
        used = {"baseline": self.baseline != "none", "clip": self.clip > 0}
        return tuple(key for key, on in used.items() if on)


class LossWeightConfig(Config):
    """Weight of each trajectory in the loss."""

    by: Literal["none", "difficulty", "length"] = "none"
    """Property that raises the weight: a low mean score of the group, or a short completion."""
    mask_truncated: bool = False
    """Give trajectories no weight that were truncated: by a limit of tokens, turns or seconds, or by their environment."""
    mask_difficulty: tuple[float, float] | None = None
    """Give groups no weight whose mean score is not strictly between these."""
    mask_wrong_over: int = Field(0, ge=0)
    """Give completions no weight that score 0 or less and have more tokens than this; 0 gives all some."""

    @model_validator(mode="after")
    def _possible(self) -> "LossWeightConfig":
        if self.mask_difficulty is not None and self.mask_difficulty[0] >= self.mask_difficulty[1]:
            raise ValueError(f"mask_difficulty {list(self.mask_difficulty)} has nothing between its ends")
        return self


class KlConfig(Config):
    """The divergence from the reference model, which is the model that the run began with."""

    coefficient: float = Field(0.0, ge=0.0)
    """0 computes no reference."""
    place: Literal["loss", "reward"] = "loss"
    """`loss` adds it to the loss, `reward` subtracts it from the reward of each token."""
    estimator: Literal["k1", "k2", "k3", "abs", "mse"] = "k3"
    """See `divergence`; `mse` is another name of k2. In the loss, the gradient of k1 is 0 on average."""
    target: float = Field(0.0, ge=0.0)
    """Divergence a token that the coefficient is adapted to, in the reward only; 0 keeps the coefficient."""
    horizon: float = Field(10_000.0, gt=0.0)
    """Trajectories over which it is adapted."""

    @property
    def in_reward(self) -> bool:
        """True if it is subtracted from rewards."""
        return self.coefficient > 0 and self.place == "reward"

    @property
    def in_loss(self) -> bool:
        """True if it is a term of the loss."""
        return self.coefficient > 0 and self.place == "loss"

    @model_validator(mode="after")
    def _possible(self) -> "KlConfig":
        if self.target and (self.place == "loss" or not self.coefficient):
            raise ValueError("target adapts the coefficient of place: reward, which must be above 0")
        return self


class RhythmConfig(Config):
    """Credit by the rhythm of attention: the advantages of some tokens of a response are amplified.

    See `algorithms/attention_credit.py`. Defaults are the paper's (arXiv 2510.13554) where it has one.
    """

    kind: Literal["local", "global", "coupled", "random", "entropy"] | None = None
    """Tokens that are amplified: those where a chunk begins, those that later tokens look back on, or both, tied together; null
    amplifies none. `random` and `entropy` are the baselines of the paper: as many tokens at random, or those of the highest
    entropy, estimated by the negative log-prob that the token was sampled with.
    """
    amplification: float = Field(1.5, gt=0.0)
    """Factor of the advantage of a selected token."""
    share: float = Field(0.4, gt=0.0, le=1.0)
    """Share of a response's tokens that is selected: q."""
    positive_only: bool = False
    """Leave negative advantages as they are: the paper's first version. The second amplifies both signs, and is better."""
    window: int = Field(10, gt=0)
    """Distance at which WAAD is cut off: W."""
    horizon_low: int = Field(10, ge=0)
    horizon_high: int = Field(100, ge=0)
    """Distances behind a token whose attention counts for FAI, both included: H_lo and H_hi. The paper's first version had
    50."""
    waad_quantile: float = Field(0.5, ge=0.0, le=1.0)
    """Quantile of the response's WAAD up to which an anchor lies inside a chunk, of `coupled`: tau_waad. The paper leaves it
    open; the median is ours.
    """
    delta_quantile: float = Field(0.6, ge=0.0, le=1.0)
    """Quantile of the response's Delta from which a chunk begins, of `coupled`: tau_Delta. The paper leaves it open; ours is
    1 - `share`, so that it is what `local` selects.
    """
    back: float = Field(0.5, ge=0.0, le=1.0)
    """Part of such an anchor's amplification that goes to the token which began the chunk, of `coupled`: a. The paper leaves it
    open; a public re-implementation has 0.5.
    """
    lookback: int = Field(3, gt=0)
    """Most tokens before an anchor at which its chunk may have begun, of `coupled`: k. The paper names 1 to 3."""

    @model_validator(mode="after")
    def _possible(self) -> "RhythmConfig":
        if self.horizon_low > self.horizon_high:
            raise ValueError(f"horizon_low {self.horizon_low} is above horizon_high {self.horizon_high}")
        return self

    @property
    def reads_attention(self) -> bool:
        """True if WAAD and FAI are needed."""
        return self.kind in ("local", "global", "coupled")

"""Sections of `algorithm` in a configuration: correction, reward, weight, kl, rhythm. Importing it imports no torch.

`algorithms/config.py` has the keys of `algorithm` itself, such as `loss`, `loss_options` and `streams`.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from antiphon.core.config import Config, unit
from antiphon.core.errors import ValidatorError

Level = Literal["token", "turn", "sequence", "product"]


class FilterConfig(Config):
    """A filter of off-policy tokens."""

    level: Level
    """Level of r, as in `filter_level`."""
    keep_low: Annotated[float, unit("ratio")] = Field(0.5, ge=0.0)
    """Lower bound of r."""
    keep_high: Annotated[float, unit("ratio")] = Field(2.0, gt=0.0, allow_inf_nan=True)
    """Upper bound of r; `.inf` for none."""
    keep_difference: Annotated[float, unit("probability")] = Field(1.0, ge=0.0, le=1.0)
    """Upper bound of the difference of the two probabilities, as in the correction's `keep_difference`."""

    @model_validator(mode="after")
    def _possible(self) -> "FilterConfig":
        if self.keep_low > self.keep_high:
            raise ValidatorError([("keep_low", f"{self.keep_low:g} must not be above keep_high = {self.keep_high:g}")])
        return self


class CorrectionConfig(Config):
    """Importance weights and filters for off-policy tokens.

    Both use r, the probability of a token under the proximal policy (the policy before the step) over the probability with
    which it was sampled. They correct for the mismatch between engine and learner and for the training since sampling.
    """

    level: Level | None = None
    """Level of r as a weight of the loss: of the token, the geometric mean over its turn or its sequence, or the product
    over its sequence. null applies no weight."""
    high: Annotated[float, unit("ratio")] = Field(2.0, gt=0.0, allow_inf_nan=True)
    """Upper bound of the weight; `.inf` for none."""
    filter_level: Level | None = None
    """Level of r as a filter: tokens whose r is not between `keep_low` and `keep_high` are left out. null filters nothing."""
    keep_low: Annotated[float, unit("ratio")] = Field(0.5, ge=0.0)
    """Lower bound of the filter."""
    keep_high: Annotated[float, unit("ratio")] = Field(2.0, gt=0.0, allow_inf_nan=True)
    """Upper bound of the filter; `.inf` for none."""
    keep_difference: Annotated[float, unit("probability")] = Field(1.0, ge=0.0, le=1.0)
    """Another bound of the filter: tokens are left out if the two probabilities differ by more. At the level `turn` it is the
    mean of the differences over the turn, at `sequence` and `product` over the sequence; 1 leaves out none."""
    filters: tuple[FilterConfig, ...] = ()
    """More filters, such as at other levels; a token must pass all."""
    proximal: Literal["computed", "interpolated"] = "computed"
    """How log-probs under the proximal policy are obtained: `computed` by a forward pass, if the step has several updates;
    `interpolated` between the log-probs of sampling and the current ones, by the age of the token."""

    @model_validator(mode="after")
    def _possible(self) -> "CorrectionConfig":
        if self.keep_low > self.keep_high:
            raise ValidatorError([("keep_low", f"{self.keep_low:g} must not be above keep_high = {self.keep_high:g}")])
        if self.proximal == "interpolated" and not self.on:
            raise ValidatorError([("proximal", "'interpolated' has no effect without level or a filter")])
        return self

    @property
    def all_filters(self) -> tuple[FilterConfig, ...]:
        """The filter at `filter_level`, if it is set, and `filters`."""
        if self.filter_level is None:
            return self.filters
        bounds = {"keep_low": self.keep_low, "keep_high": self.keep_high, "keep_difference": self.keep_difference}
        return (FilterConfig(level=self.filter_level, **bounds), *self.filters)

    @property
    def on(self) -> bool:
        """True if tokens are weighted or filtered."""
        return self.level is not None or bool(self.all_filters)


NormalizationScope = Literal["none", "group", "task", "batch", "running"]


class RewardConfig(Config):
    """Shaping of scores before advantages are computed."""

    overlong_tokens: Annotated[int, unit("tokens")] = Field(0, ge=0)
    """Length of the zone before the token limit in which a completion is penalized, in tokens; 0 penalizes none."""
    overlong_penalty: Annotated[float, unit("reward")] = Field(1.0, ge=0.0)
    """Penalty at the token limit; it grows linearly in that zone."""
    baseline: NormalizationScope = "none"
    """Subtract the mean of the group, of its task's groups in the batch, of the batch, or of all scores so far (`running`). Not
    with rewards of turns."""
    scale: NormalizationScope = "none"
    """Divide by the standard deviation of the same; rewards of turns too."""
    clip: Annotated[float, unit("reward")] = Field(0.0, ge=0.0)
    """Clip to this absolute value, after `scale`; 0 does not clip. Not with rewards of turns."""
    whiten: bool = False
    """Rescale the rewards of tokens to a standard deviation of 1 over the sampled tokens of the batch, before `gae` and the
    targets of critics add them up; their mean is kept."""

    @property
    def without_turns(self) -> tuple[str, ...]:
        """The keys in use that change the reward of a whole trajectory and cannot be divided among its turns."""
        used = {"baseline": self.baseline != "none", "clip": self.clip > 0}
        return tuple(key for key, on in used.items() if on)


class LossWeightConfig(Config):
    """Weight of each trajectory in the loss."""

    by: Literal["none", "difficulty", "length"] = "none"
    """Property that increases the weight: `difficulty` is a low mean score of the group, `length` a short completion."""
    mask_truncated: bool = False
    """Mask trajectories that were truncated by a limit of tokens, turns or seconds, or by their environment."""
    mask_difficulty: tuple[float, float] | None = None
    """Mask groups whose mean score is not strictly between these bounds."""
    mask_wrong_over: Annotated[int, unit("tokens")] = Field(0, ge=0)
    """Mask completions with a score of 0 or less and more tokens than this; 0 masks none."""

    @model_validator(mode="after")
    def _possible(self) -> "LossWeightConfig":
        if self.mask_difficulty is not None and self.mask_difficulty[0] >= self.mask_difficulty[1]:
            message = f"{list(self.mask_difficulty)} must be a lower and a greater upper bound"
            raise ValidatorError([("mask_difficulty", message)])
        return self


class KlConfig(Config):
    """KL divergence from the reference model, which is the model that the run began with."""

    coefficient: Annotated[float, unit("factor")] = Field(0.0, ge=0.0)
    """Factor of the KL divergence; 0 uses no reference model."""
    place: Literal["loss", "reward"] = "loss"
    """`loss` adds the divergence to the loss, `reward` subtracts it from the reward of each token."""
    estimator: Literal["k1", "k2", "k3", "abs", "mse"] = "k3"
    """Estimator of the divergence (`algorithms/divergence.py`); `mse` is k2. In the loss, k1 has a mean gradient of 0."""
    target: Annotated[float, unit("nats per token")] = Field(0.0, ge=0.0)
    """Divergence per token that the coefficient is adapted to, with `place: reward`; 0 keeps the coefficient constant."""
    horizon: Annotated[float, unit("trajectories")] = Field(10_000.0, gt=0.0)
    """Number of trajectories over which the coefficient is adapted."""

    @property
    def in_reward(self) -> bool:
        """True if the divergence is subtracted from rewards."""
        return self.coefficient > 0 and self.place == "reward"

    @property
    def in_loss(self) -> bool:
        """True if the divergence is a term of the loss."""
        return self.coefficient > 0 and self.place == "loss"

    @model_validator(mode="after")
    def _possible(self) -> "KlConfig":
        if self.target and (self.place == "loss" or not self.coefficient):
            raise ValidatorError([("target", f"{self.target:g} needs place: reward and a coefficient above 0")])
        return self


class RhythmConfig(Config):
    """Credit by the rhythm of attention: the advantages of some tokens of a response are amplified.

    See `algorithms/attention_credit.py`. Defaults are the paper's (arXiv 2510.13554) where it has one.
    """

    kind: Literal["local", "global", "coupled", "random", "entropy"] | None = None
    """Tokens that are amplified: `local` where a chunk begins, `global` where later tokens look back, `coupled` as `global`,
    with part of an anchor's credit at the beginning of its chunk; null amplifies none. `random` and `entropy` are the
    baselines of the paper: as many tokens at random, or those at which the policy's entropy before the step is highest."""
    amplification: Annotated[float, unit("factor")] = Field(1.5, gt=0.0)
    """Factor of the advantage of a selected token."""
    share: Annotated[float, unit("share")] = Field(0.4, gt=0.0, le=1.0)
    """Share of a response's tokens that is selected: q."""
    positive_only: bool = False
    """Amplify positive advantages only, as the paper's first version does. The second version amplifies both signs."""
    window: Annotated[int, unit("tokens")] = Field(10, gt=0)
    """Largest distance in WAAD: W."""
    horizon_low: Annotated[int, unit("tokens")] = Field(10, ge=0)
    """Smallest distance of later tokens whose attention counts in FAI: H_lo."""
    horizon_high: Annotated[int, unit("tokens")] = Field(100, ge=0)
    """Largest distance of later tokens whose attention counts in FAI: H_hi. The paper's first version has 50."""
    waad_quantile: Annotated[float, unit("share")] = Field(0.5, ge=0.0, le=1.0)
    """For `coupled`: an anchor whose WAAD is at most this quantile lies inside a chunk: tau_waad. The paper gives no value; the
    median is our choice.
    """
    delta_quantile: Annotated[float, unit("share")] = Field(0.6, ge=0.0, le=1.0)
    """For `coupled`: a chunk begins where Delta reaches this quantile: tau_Delta. The paper gives no value; ours is 1 -
    `share`, so that the same tokens are selected as by `local`."""
    back: Annotated[float, unit("share")] = Field(0.5, ge=0.0, le=1.0)
    """For `coupled`: share of an anchor's amplification that moves to the token where its chunk begins: a. The paper gives no
    value; a public re-implementation has 0.5.
    """
    lookback: Annotated[int, unit("tokens")] = Field(3, gt=0)
    """For `coupled`: how many tokens before an anchor its chunk may begin: k. The paper names 1 to 3."""

    @model_validator(mode="after")
    def _possible(self) -> "RhythmConfig":
        if self.horizon_low > self.horizon_high:
            message = f"{self.horizon_low} must not be above horizon_high = {self.horizon_high}"
            raise ValidatorError([("horizon_low", message)])
        return self

    @property
    def reads_attention(self) -> bool:
        """True if WAAD and FAI are needed."""
        return self.kind in ("local", "global", "coupled")

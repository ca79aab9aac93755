"""Configuration of what to optimise. Importing it imports no torch."""

from typing import Any, Literal

from pydantic import Field, model_validator

from antiphon.algorithms.declarations import Declaration
from antiphon.algorithms.recipes import RECIPES
from antiphon.algorithms.registry import ADVANTAGES, LOSSES, built_in_declaration
from antiphon.core.config import Config
from antiphon.core.types import (
    ATTENTION_RHYTHM,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    STREAMS,
    TEACHER_LOGPROBS,
    TOKEN_AGE,
    VALUES,
    StreamSpec,
)

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
        """Whether there is anything to do."""
        return self.level is not None or self.filter_level is not None


NormalizationScope = Literal["none", "group", "batch", "running"]


class RewardConfig(Config):
    """What becomes of scores before advantages are made of them."""

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
    """How much each trajectory counts in the loss."""

    by: Literal["none", "difficulty", "length"] = "none"
    """What raises it: a low mean score of the group, or a short completion."""
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
    """Whether it is a term of the loss, or taken off the reward of each token."""
    estimator: Literal["k1", "k2", "k3", "abs", "mse"] = "k3"
    """See `divergence`; `mse` is another name of k2. In the loss, the gradient of k1 is 0 on average."""
    target: float = Field(0.0, ge=0.0)
    """Divergence a token that the coefficient is adapted to, in the reward only; 0 keeps the coefficient."""
    horizon: float = Field(10_000.0, gt=0.0)
    """Trajectories over which it is adapted."""

    @property
    def in_reward(self) -> bool:
        """Whether it is taken off the rewards."""
        return self.coefficient > 0 and self.place == "reward"

    @property
    def in_loss(self) -> bool:
        """Whether it is a term of the loss."""
        return self.coefficient > 0 and self.place == "loss"

    @model_validator(mode="after")
    def _possible(self) -> "KlConfig":
        if self.target and (self.place == "loss" or not self.coefficient):
            raise ValueError("target adapts the coefficient of place: reward, which must be above 0")
        return self


class RhythmConfig(Config):
    """Credit by the rhythm of attention, see `algorithms/attention_credit.py`: some tokens of a response have their advantage
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


# Streams that a step can be asked for, whatever the algorithm: those of models that every run may have.
ON_REQUEST = tuple(spec.name for spec in STREAMS.values() if spec.producer in ("reference", "policy", "critics"))


class AlgorithmConfig(Config):
    """Rewards, advantages, loss, and how token losses are summed."""

    recipe: str = "grpo"
    """What is not given here is that of `antiphon/algorithms/recipes.py`; `algorithm: dapo` is short for it."""
    reward: RewardConfig = RewardConfig()
    weight: LossWeightConfig = LossWeightConfig()
    advantage: str = "grpo"
    """A name in `antiphon/algorithms/registry.py`, or package.module:attribute."""
    gamma: float = Field(1.0, ge=0.0, le=1.0)
    """Discount from one sampled token to the next."""
    turn_gamma: float = Field(1.0, ge=0.0, le=1.0)
    """Discount from one turn to the next, of the advantages that look at turns."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Of `gae`: 1 looks to the end, 0 one token ahead."""
    step_weight: float = Field(1.0, ge=0.0)
    """Of `gigpo`: what a step's own advantage counts beside that of its episode."""
    teacher_coefficient: float = Field(0.0, ge=0.0)
    """What is added to the advantage of each token for every nat by which its teachers think it more likely than the policy
    did; 0 asks no teacher."""
    advantage_whiten: bool = False
    """Take off their mean over all sampled tokens of the batch and divide by the deviation."""
    advantage_clip: float = Field(0.0, ge=0.0)
    """Bound on |advantage|, before `rhythm` amplifies some; 0 is none."""
    rhythm: RhythmConfig = RhythmConfig()
    """For credit that differs between the tokens of a response."""
    agreement_mask: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the batch's tokens, those on whose value the critics agree most, that get no advantage."""
    disagreement_mask: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of them, those on whose value the critics agree least, whose entropy is not rewarded."""
    loss: str = "ppo_clip"
    """A name in `antiphon/algorithms/registry.py`, or package.module:attribute."""
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
    aggregation: Aggregation = "token_mean"
    """How token losses become one number; counts are those of the whole update."""
    entropy_coefficient: float = 0.0
    expert_balance: float = Field(0.0, ge=0.0)
    """Of models with a mixture of experts: weight of a loss, in each layer and on average over sequences, that is least where
    the tokens of a sequence are spread evenly over the experts; 0 is none."""
    kl: KlConfig = KlConfig()
    streams: tuple[str, ...] = ()
    """Streams that a loss or an advantage of your own reads, where it does not declare them itself."""

    @model_validator(mode="before")
    @classmethod
    def _of_recipe(cls, given: Any) -> Any:
        given = {"recipe": given} if isinstance(given, str) else given
        if not isinstance(given, dict):
            return given
        given = {key: _tuples(value) for key, value in given.items()}
        if "recipe" not in given:
            return given
        if not isinstance(given["recipe"], str) or given["recipe"] not in RECIPES:
            raise ValueError(f"recipe {given['recipe']!r}: there are {', '.join(sorted(RECIPES))}")
        parts = RECIPES[given["recipe"]]
        return parts | {key: _over(parts.get(key), value) for key, value in given.items()}

    @model_validator(mode="after")
    def _possible(self) -> "AlgorithmConfig":
        if self.disagreement_mask and not self.entropy_coefficient:
            raise ValueError("disagreement_mask is of the reward of entropy, and entropy_coefficient is 0")
        if unknown := [name for name in self.streams if name not in ON_REQUEST]:
            raise ValueError(f"streams {unknown[0]!r}: a model can be asked for {', '.join(ON_REQUEST)}")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip:g} is not above 1; 0 is none")
        if self.ratio_low > self.ratio_high:
            raise ValueError(f"ratio_low {self.ratio_low:g} is above ratio_high {self.ratio_high:g}")
        return self

    @property
    def advantage_declaration(self) -> Declaration:
        """What the advantage function declares, if it is a built-in one."""
        return built_in_declaration(ADVANTAGES, self.advantage)

    @property
    def required_streams(self) -> frozenset[StreamSpec]:
        """The streams that the settings and the built-in functions need."""
        correction, masked = self.correction, self.agreement_mask or self.disagreement_mask
        by_setting = {
            REFERENCE_LOGPROBS: self.kl.coefficient > 0,
            PROXIMAL_LOGPROBS: correction.on and correction.proximal == "computed",
            TOKEN_AGE: correction.on and correction.proximal == "interpolated",
            TEACHER_LOGPROBS: self.teacher_coefficient > 0,
            VALUES: masked > 0,
            ATTENTION_RHYTHM: self.rhythm.reads_attention,
        }
        declared = (*self.advantage_declaration.needs, *built_in_declaration(LOSSES, self.loss).needs)
        return frozenset(
            (
                *declared,
                *(STREAMS[name] for name in self.streams),
                *(spec for spec, needed in by_setting.items() if needed),
            )
        )

    def skips_zero_advantage(self, loss: Declaration) -> bool:
        """Return True if tokens without advantage need no backward pass, with a loss that declares this."""
        return loss.zero_at_zero_advantage and not (self.kl.in_loss or self.entropy_coefficient)


def _tuples(value: Any) -> Any:
    """With tuples for lists: what a validator has had in hand is not looked upon as JSON any more."""
    if isinstance(value, dict):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _over(part: Any, given: Any) -> Any:
    """What is given, with the rest of a recipe's section around it."""
    return {**part, **given} if isinstance(part, dict) and isinstance(given, dict) else given


class PreferenceConfig(Config):
    """Learning from pairs of responses, see `algorithms/preference_losses.py`."""

    loss: Literal["dpo", "ipo"] = "dpo"
    beta: float = Field(0.1, gt=0.0)
    """How much it costs to leave the reference model, which is the model that the run begins with."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Of `dpo`: the share of pairs that are taken to be labelled the wrong way round."""

    @model_validator(mode="after")
    def _possible(self) -> "PreferenceConfig":
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(f"label_smoothing {self.label_smoothing:g} is of loss: dpo; with ipo it is 0")
        return self


class DistillationConfig(Config):
    """Learning from a teacher's distributions, see `algorithms/distillation_losses.py`."""

    teacher: str
    """A directory or Hugging Face id of a model with the tokenizer of the one that is trained; or package.module:function."""
    divergence: Literal[
        "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "skewed_forward_kl", "skewed_reverse_kl"
    ] = "forward_kl"
    skew: float = Field(0.1, gt=0.0, lt=1.0)
    """Of the skewed divergences: how much of the one distribution is mixed into the other."""
    student_temperature: float = Field(1.0, gt=0.0)
    teacher_temperature: float = Field(1.0, gt=0.0)
    top_k: int = Field(64, ge=0)
    """So many of the teacher's likeliest tokens are told apart, all others count as one; 0 tells all apart."""
    sft_weight: float = Field(0.0, ge=0.0, lt=1.0)
    """Of the negative log-likelihood of the responses; the divergence has the rest."""

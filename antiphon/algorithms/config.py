"""The `algorithm` section of a configuration. Importing it imports no torch.

`algorithms/sections.py` has its nested sections. What an own function declares is checked in `run/config_checks/algorithms.py`.
"""

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from antiphon.algorithms.declarations import Declaration
from antiphon.algorithms.recipes import RECIPES
from antiphon.algorithms.registry import ADVANTAGES, LOSSES, STREAM_SPECS, built_in_declaration
from antiphon.algorithms.sections import (
    CorrectionConfig,
    KlConfig,
    LossWeightConfig,
    RewardConfig,
    RhythmConfig,
)
from antiphon.core.config import Config, unit
from antiphon.core.errors import ConfigError, Mistake, ValidatorError
from antiphon.core.types import (
    ATTENTION_RHYTHM,
    ENTROPY_WEIGHT,
    POLICY_ENTROPY,
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


class AlgorithmConfig(Config):
    """Rewards, advantages, loss, and how token losses are summed."""

    SHORT_FOR = "recipe"

    recipe: str = "grpo"
    """Named set of defaults in `antiphon/algorithms/recipes.py`; `algorithm: dapo` is short for it."""
    reward: RewardConfig = RewardConfig()
    """What becomes of scores before advantages are computed."""
    weight: LossWeightConfig = LossWeightConfig()
    """Weight of each trajectory in the loss."""
    advantage: str = "grpo"
    """`grpo` or another that `docs/algorithms.md` lists, or package.module:function."""
    advantage_options: dict[str, Any] = {}
    """Keyword-only arguments of an advantage function of your own."""
    gamma: Annotated[float, unit("factor")] = Field(1.0, ge=0.0, le=1.0)
    """Discount from one sampled token to the next."""
    turn_gamma: Annotated[float, unit("factor")] = Field(1.0, ge=0.0, le=1.0)
    """Discount from one turn to the next, for advantages that use rewards of turns."""
    gae_lambda: Annotated[float, unit("factor")] = Field(1.0, ge=0.0, le=1.0)
    """Lambda of `gae`: 1 uses the whole return, 0 one token ahead."""
    step_weight: Annotated[float, unit("factor")] = Field(1.0, ge=0.0)
    """Weight of a step's own advantage beside that of its episode, for `gigpo`."""
    teacher_coefficient: Annotated[float, unit("factor")] = Field(0.0, ge=0.0)
    """Factor of (teacher log-prob - policy log-prob), which is added to the advantage of each token; 0 uses no teacher."""
    advantage_whiten: bool = False
    """Whiten advantages over all sampled tokens of the batch: subtract the mean, divide by the standard deviation."""
    advantage_clip: Annotated[float, unit("advantage")] = Field(0.0, ge=0.0)
    """Clip advantages to this absolute value, before `rhythm` amplifies some; 0 does not clip."""
    rhythm: RhythmConfig = RhythmConfig()
    """Amplification of the advantages of some tokens of a response."""
    agreement_mask: Annotated[float, unit("share")] = Field(0.0, ge=0.0, lt=1.0)
    """Share of the batch's tokens whose advantage is set to 0: those on whose value the critics agree most."""
    disagreement_mask: Annotated[float, unit("share")] = Field(0.0, ge=0.0, lt=1.0)
    """Share of the batch's tokens that get no entropy bonus: those on whose value the critics agree least."""
    loss: str = "ppo_clip"
    """`ppo_clip` or another that `docs/algorithms.md` lists, or package.module:function."""
    loss_options: dict[str, Any] = {}
    """Keyword-only arguments of a loss function of your own."""
    ratio_level: Literal["token", "sequence", "turn"] = "token"
    """Level of the ratio that `ppo_clip` clips."""
    clip_low: Annotated[float, unit("ratio")] = Field(0.2, ge=0.0, le=1.0)
    """Ratios of `ppo_clip` and `cispo` are clipped at 1 - this."""
    clip_high: Annotated[float, unit("ratio")] = Field(0.2, ge=0.0, allow_inf_nan=True)
    """Ratios of `ppo_clip` and `cispo` are clipped at 1 + this; `.inf` for no upper bound."""
    cispo_mask: bool = False
    """Tokens whose ratio has gone beyond the bounds of `cispo` in the direction of their advantage have no gradient."""
    dual_clip: Annotated[float, unit("factor")] = Field(0.0, ge=0.0)
    """Bound of the `ppo_clip` loss for negative advantages, in multiples of |advantage|; above 1, or 0 for no bound."""
    ratio_low: Annotated[float, unit("ratio")] = Field(0.0, ge=0.0)
    """Lower bound of the importance weight in `tis` and `topr`."""
    ratio_high: Annotated[float, unit("ratio")] = Field(1.0, gt=0.0, allow_inf_nan=True)
    """Upper bound of the importance weight in `tis` and `topr`; `.inf` for none."""
    positive_weight: Annotated[float, unit("factor")] = Field(1.0, ge=0.0)
    """Weight of positive advantages in `topr`."""
    negative_weight: Annotated[float, unit("factor")] = Field(1.0, ge=0.0)
    """Weight of negative advantages in `topr`."""
    kimi_tau: Annotated[float, unit("factor")] = Field(0.1, ge=0.0)
    """Weight of the squared log ratio in `kimi`."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights and filters for tokens that an older policy, or an engine with other rounding, sampled."""
    aggregation: Aggregation = "token_mean"
    """How token losses are reduced to one number; counts are those of the whole update."""
    entropy_coefficient: Annotated[float, unit("factor")] = 0.0
    """Factor of the entropy bonus."""
    expert_balance: Annotated[float, unit("factor")] = Field(0.0, ge=0.0)
    """Weight of the load-balancing loss of a mixture of experts, per layer and averaged over sequences. It is 1 if the
    tokens of a sequence are spread evenly over the experts, and as a rule more where some are preferred; 0 adds none.
    """
    kl: KlConfig = KlConfig()
    """KL divergence from the reference model."""
    streams: tuple[str, ...] = ()
    """Streams that a loss or an advantage of your own reads without a declaration: names in `antiphon/core/types/streams.py`,
    or package.module:attribute of a `StreamSpec` of your own. Declared streams are added when the run starts.
    """

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
            name, names = given["recipe"], tuple(sorted(RECIPES))
            message = f"{name!r} is no recipe. Valid are {', '.join(names)}"
            nearest = tuple(difflib.get_close_matches(str(name), names, n=1))
            raise ValidatorError([Mistake("recipe", message, name, names, suggestions=nearest)])
        parts = RECIPES[given["recipe"]]
        return parts | {key: _over(parts.get(key), value) for key, value in given.items()}

    @model_validator(mode="after")
    def _possible(self) -> "AlgorithmConfig":
        if self.disagreement_mask and not self.entropy_coefficient:
            raise ValidatorError([("disagreement_mask", "needs an entropy bonus: set entropy_coefficient")])
        for index, name in enumerate(self.streams):
            try:
                STREAM_SPECS.check(name, f"streams.{index}")
            except ConfigError as error:
                raise ValidatorError(error.mistakes) from error
        if 0 < self.dual_clip <= 1:
            raise ValidatorError([("dual_clip", f"{self.dual_clip:g} must be above 1, or 0 for no bound")])
        if self.ratio_low > self.ratio_high:
            message = f"{self.ratio_low:g} must not be above ratio_high = {self.ratio_high:g}"
            raise ValidatorError([("ratio_low", message)])
        return self

    @property
    def advantage_declaration(self) -> Declaration:
        """The declaration of the advantage function, if it is built in."""
        return built_in_declaration(ADVANTAGES, self.advantage)

    @property
    def required_streams(self) -> frozenset[StreamSpec]:
        """The streams of Antiphon that the settings, the built-in functions and `streams` need."""
        correction, masked = self.correction, self.agreement_mask or self.disagreement_mask
        by_setting = {
            REFERENCE_LOGPROBS: self.kl.coefficient > 0,
            PROXIMAL_LOGPROBS: correction.on and correction.proximal == "computed",
            TOKEN_AGE: correction.on and correction.proximal == "interpolated",
            TEACHER_LOGPROBS: self.teacher_coefficient > 0,
            VALUES: masked > 0,
            ATTENTION_RHYTHM: self.rhythm.reads_attention,
            POLICY_ENTROPY: self.rhythm.kind == "entropy",
        }
        declared = (*self.advantage_declaration.needs, *built_in_declaration(LOSSES, self.loss).needs)
        return frozenset(
            (
                *declared,
                *(STREAMS[name] for name in self.streams if name in STREAMS),
                *(spec for spec, needed in by_setting.items() if needed),
            )
        )

    @property
    def loss_term_streams(self) -> frozenset[StreamSpec]:
        """The streams that the terms beside the loss read (`algorithms/token_loss.py`), where they are there."""
        by_setting = {
            REFERENCE_LOGPROBS: self.kl.in_loss,
            PROXIMAL_LOGPROBS: self.correction.on,
            TOKEN_AGE: self.correction.on,
            ENTROPY_WEIGHT: self.entropy_coefficient != 0,
        }
        return frozenset(spec for spec, needed in by_setting.items() if needed)

    def skips_zero_advantage(self, loss: Declaration) -> bool:
        """Return True if tokens without advantage need no backward pass, with a loss that declares this."""
        return loss.zero_at_zero_advantage and not (self.kl.in_loss or self.entropy_coefficient or self.expert_balance)


def _tuples(value: Any) -> Any:
    """Return the value with tuples for lists: a validator that has seen it gets no JSON any more."""
    if isinstance(value, dict):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _over(part: Any, given: Any) -> Any:
    """Return the given value, completed by a recipe's section."""
    return {**part, **given} if isinstance(part, dict) and isinstance(given, dict) else given

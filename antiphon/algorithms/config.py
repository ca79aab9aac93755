"""Configuration of what to optimise. Importing it imports no torch."""

from typing import Any, Literal

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
from antiphon.core.config import Config
from antiphon.core.errors import ConfigError, Mistake, ValidatorError
from antiphon.core.types import (
    ATTENTION_RHYTHM,
    ENTROPY_WEIGHT,
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

    recipe: str = "grpo"
    """Named set of defaults in `antiphon/algorithms/recipes.py`; `algorithm: dapo` is short for it."""
    reward: RewardConfig = RewardConfig()
    weight: LossWeightConfig = LossWeightConfig()
    advantage: str = "grpo"
    """A name in `antiphon/algorithms/registry.py`, or package.module:function."""
    advantage_options: dict[str, Any] = {}
    """Keyword-only arguments of an advantage function of your own."""
    gamma: float = Field(1.0, ge=0.0, le=1.0)
    """Discount from one sampled token to the next."""
    turn_gamma: float = Field(1.0, ge=0.0, le=1.0)
    """Discount from one turn to the next, of the advantages that look at turns."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Lambda of `gae`: 1 looks to the end, 0 one token ahead."""
    step_weight: float = Field(1.0, ge=0.0)
    """Weight of a step's own advantage beside that of its episode, for `gigpo`."""
    teacher_coefficient: float = Field(0.0, ge=0.0)
    """Amount added to the advantage of each token for each nat by which its teachers find it more likely than the policy did;
    0 asks no teacher.
    """
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
    """A name in `antiphon/algorithms/registry.py`, or package.module:function."""
    loss_options: dict[str, Any] = {}
    """Keyword-only arguments of a loss function of your own."""
    ratio_level: Literal["token", "sequence", "turn"] = "token"
    """Level of the ratio that `ppo_clip` clips."""
    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    clip_high: float = Field(0.2, ge=0.0)
    dual_clip: float = Field(0.0, ge=0.0)
    """Bound of the `ppo_clip` loss where the advantage is negative, in multiples of its size; above 1, and 0 is none."""
    ratio_low: float = Field(0.0, ge=0.0)
    ratio_high: float = Field(1.0, gt=0.0)
    """Bounds of the importance weight in `tis` and `topr`."""
    positive_weight: float = Field(1.0, ge=0.0)
    negative_weight: float = Field(1.0, ge=0.0)
    """Weights of positive and negative advantages in `topr`."""
    kimi_tau: float = Field(0.1, ge=0.0)
    correction: CorrectionConfig = CorrectionConfig()
    """For tokens that another policy has sampled than the one before the step."""
    aggregation: Aggregation = "token_mean"
    """Rule by which token losses become one number; counts are those of the whole update."""
    entropy_coefficient: float = 0.0
    expert_balance: float = Field(0.0, ge=0.0)
    """Weight of the load-balancing loss of a mixture of experts, in each layer and averaged over sequences. It is least where
    the tokens of a sequence are spread evenly over the experts; 0 is none.
    """
    kl: KlConfig = KlConfig()
    streams: tuple[str, ...] = ()
    """Streams that a loss or an advantage of your own reads and does not declare: names in `antiphon/core/types/streams.py`, or
    package.module:attribute of a `StreamSpec` of your own. What your functions declare is added when the run starts.
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
            raise ValueError(f"recipe {given['recipe']!r}: there are {', '.join(sorted(RECIPES))}")
        parts = RECIPES[given["recipe"]]
        return parts | {key: _over(parts.get(key), value) for key, value in given.items()}

    @model_validator(mode="after")
    def _possible(self) -> "AlgorithmConfig":
        if self.disagreement_mask and not self.entropy_coefficient:
            raise ValueError("disagreement_mask is of the reward of entropy, and entropy_coefficient is 0")
        for index, name in enumerate(self.streams):
            try:
                STREAM_SPECS.check(name, f"streams.{index}")
            except ConfigError as error:
                raise ValidatorError(error.mistakes) from error
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip:g} is not above 1; 0 is none")
        if self.ratio_low > self.ratio_high:
            raise ValueError(f"ratio_low {self.ratio_low:g} is above ratio_high {self.ratio_high:g}")
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
        return loss.zero_at_zero_advantage and not (self.kl.in_loss or self.entropy_coefficient)


def _tuples(value: Any) -> Any:
    """Return the value with tuples for lists: a validator that has seen it gets no JSON any more."""
    if isinstance(value, dict):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _over(part: Any, given: Any) -> Any:
    """Return the given value, completed by a recipe's section."""
    return {**part, **given} if isinstance(part, dict) and isinstance(given, dict) else given

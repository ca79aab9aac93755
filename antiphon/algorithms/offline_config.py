"""Configuration of the objectives of the offline verbs. Importing it imports no torch."""

from typing import Literal

from pydantic import Field, model_validator

from antiphon.core.config import Config
from antiphon.core.errors import ValidatorError


class PreferenceConfig(Config):
    """Objective of learning from pairs of responses."""

    loss: Literal["dpo", "ipo"] = "dpo"
    beta: float = Field(0.1, gt=0.0)
    """Strength of the penalty for leaving the reference model, which is the model that the run begins with."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Share of pairs that are assumed to be labelled the wrong way round, for `dpo`."""

    @model_validator(mode="after")
    def _possible(self) -> "PreferenceConfig":
        if self.loss == "ipo" and self.label_smoothing:
            raise ValidatorError([("label_smoothing", f"{self.label_smoothing:g} must be 0 with loss: ipo")])
        return self


class DistillationConfig(Config):
    """Objective of learning from a teacher's distributions."""

    teacher: str
    """A directory or Hugging Face id of a model with the tokenizer of the one that is trained; or package.module:function."""
    divergence: Literal[
        "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "skewed_forward_kl", "skewed_reverse_kl"
    ] = "forward_kl"
    skew: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of one distribution that is mixed into the other, for the skewed divergences."""
    student_temperature: float = Field(1.0, gt=0.0)
    teacher_temperature: float = Field(1.0, gt=0.0)
    top_k: int = Field(64, ge=0)
    """Number of the teacher's likeliest tokens that are told apart; all others count as one. 0 tells all apart."""
    sft_weight: float = Field(0.0, ge=0.0, lt=1.0)
    """Weight of the negative log-likelihood of the responses; the divergence has the rest."""

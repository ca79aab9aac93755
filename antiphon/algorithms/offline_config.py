"""Configuration of the objectives of the offline verbs. Importing it imports no torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from antiphon.core.config import Config, unit
from antiphon.core.errors import ValidatorError


class PreferenceConfig(Config):
    """Objective of learning from pairs of responses."""

    loss: Literal["dpo", "ipo"] = "dpo"
    """`dpo` (Rafailov et al. 2023), or `ipo` (Azar et al. 2023)."""
    beta: Annotated[float, unit("factor")] = Field(0.1, gt=0.0)
    """Strength of the penalty for leaving the reference model, which is the model that the run begins with."""
    label_smoothing: Annotated[float, unit("probability")] = Field(0.0, ge=0.0, lt=0.5)
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
        "forward_kl",
        "reverse_kl",
        "adaptive_kl",
        "jensen_shannon",
        "total_variation",
        "skewed_forward_kl",
        "skewed_reverse_kl",
    ] = "forward_kl"
    """Divergence between the token distributions of teacher and student; forward is KL(teacher || student)."""
    skew: Annotated[float, unit("share")] = Field(0.1, gt=0.0, lt=1.0)
    """Share of one distribution that is mixed into the other, for the skewed divergences."""
    student_temperature: Annotated[float, unit("factor")] = Field(1.0, gt=0.0)
    """Temperature of the student's distribution."""
    teacher_temperature: Annotated[float, unit("factor")] = Field(1.0, gt=0.0)
    """Temperature of the teacher's distribution."""
    top_k: Annotated[int, unit("tokens")] = Field(64, ge=0)
    """Number of the teacher's likeliest tokens that are told apart; all others count as one. 0 tells all apart."""
    sft_weight: Annotated[float, unit("share")] = Field(0.0, ge=0.0, lt=1.0)
    """Weight of the negative log-likelihood of the responses; the divergence has the rest."""
    on_prompts: bool = False
    """Learn from the tokens of prompts too, but for the first of each, which nothing predicts."""

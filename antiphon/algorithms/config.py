"""Configuration of what to optimise. Importing it imports no torch."""

from typing import Literal

from pydantic import Field

from antiphon.config import Config

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]


class AlgorithmConfig(Config):
    """Advantages, loss, and how token losses are summed."""

    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, or package.module:attribute."""
    loss: str = "ppo_clip"
    """`ppo_clip`, or package.module:attribute."""
    clip_low: float = Field(0.2, ge=0.0, lt=1.0)
    clip_high: float = Field(0.2, ge=0.0)
    aggregation: Aggregation = "token_mean"
    """How token losses become one number; counts are those of the whole update."""
    advantage_clip: float = Field(0.0, ge=0.0)
    """Bound on |advantage|; 0 is none."""
    entropy_coefficient: float = 0.0
    kl_coefficient: float = Field(0.0, ge=0.0)
    """Weight of the k3 divergence from the reference model in the loss; 0 computes no reference."""
    mask_truncated: bool = False
    """Give completions that hit the token limit no weight."""

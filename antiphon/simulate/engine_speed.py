"""Configuration of a simulated engine's speed."""

from pydantic import Field

from antiphon.core.config import Config


class EngineSpeed(Config):
    """Speed of a simulated engine, in seconds and tokens."""

    slots: int = Field(256, gt=0)
    """Sequences that run at once."""
    iteration: float = Field(0.01, ge=0.0)
    """Seconds of a decode iteration, without the terms below."""
    per_sequence: float = Field(0.0, ge=0.0)
    """Seconds of an iteration per running sequence."""
    per_token: float = Field(0.0, ge=0.0)
    """Seconds of an iteration per token in the cache."""
    prefill: float = Field(0.0, ge=0.0)
    """Seconds per token of prefill."""
    memory: int = Field(1 << 40, gt=0)
    """Tokens that the cache holds; when it is full, the newest sequence is preempted and prefilled again later."""
    load: float = Field(0.0, ge=0.0)
    """Seconds to load new weights, in which nothing runs."""
    beside_learner: float = Field(1.0, gt=0.0)
    """Factor on all other seconds while the learner trains on the same machine."""

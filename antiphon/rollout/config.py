"""Configuration of producing samples. Importing it imports no torch."""

import math
from typing import Literal

from pydantic import Field

from antiphon.config import Config
from antiphon.types import OnUpdate, Sampling


class SamplingConfig(Config):
    """How tokens are drawn in rollouts."""

    max_tokens: int = Field(gt=0)
    """Most tokens of one completion."""
    temperature: float = Field(1.0, ge=0.0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 means no limit."""
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    stop: tuple[str, ...] = ()
    """Strings that end a completion; kept in it."""

    def sampling(self, **changes: object) -> Sampling:
        """The record that travels with every completion."""
        return Sampling(**{**self.model_dump(), **changes})


class RolloutConfig(Config):
    """Scheduling and freshness."""

    groups_per_step: int = Field(gt=0)
    """B: groups that one training step consumes."""
    group_size: int = Field(8, gt=0)
    """G: siblings that answer one prompt."""
    async_ratio: float = Field(1.0, ge=0.0)
    """alpha: 0 is synchronous; a trajectory is at most ceil(alpha) versions old when it is trained on."""
    extra_groups: int = Field(0, ge=0)
    """Live groups beyond (1 + alpha) B."""
    redundancy: int = Field(0, ge=0)
    """Siblings started beyond the group size; the first to finish win."""
    order: Literal["fifo", "ready"] = "fifo"
    """Groups are consumed as admitted, or as they become ready."""
    on_expiry: Literal["abort", "wait"] = "abort"
    """A group that would become too old is dropped, or the step waits for it."""
    on_update: OnUpdate = OnUpdate.KEEP
    """What happens to requests in flight when weights arrive."""
    filter: str | None = None
    """Which complete groups are trained on: `spread` drops groups whose scores are all equal; or package.module:function."""
    max_attempts: int = Field(3, gt=0)
    """Tries at one sibling before its group fails."""
    max_turns: int = Field(1, gt=0)
    """Completions in one episode."""
    timeout: float = Field(600.0, gt=0.0)
    """Seconds after which any wait fails the run."""
    engine_timeout: float = Field(60.0, gt=0.0)
    """Seconds an engine may be silent; then it is killed, and its requests go on elsewhere. Longer than any engine step."""
    sampling: SamplingConfig

    @property
    def capacity(self) -> int:
        """Groups that may be alive at once: ceil((1 + alpha) B) + extra groups."""
        return _ceil((1 + self.async_ratio) * self.groups_per_step) + self.extra_groups

    @property
    def max_age(self) -> int:
        """Versions that may be published between the start of a trajectory and the step that uses it: ceil(alpha)."""
        return _ceil(self.async_ratio)

    @property
    def max_oldest(self) -> int:
        """Groups of one step that may have the greatest age: frac(alpha) B, rounded up, or all where alpha is whole."""
        fraction = self.async_ratio - math.floor(self.async_ratio)
        return _ceil(fraction * self.groups_per_step) if fraction else self.groups_per_step


def _ceil(number: float) -> int:
    """The next whole number, forgiving the rounding of products such as 1.1 * 10."""
    return math.ceil(number - 1e-9)

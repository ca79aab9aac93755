"""Speeds of a run's parts, measured by a probe or estimated from sizes."""

from collections.abc import Sequence

from antiphon.core.config import Config
from antiphon.simulate.engine_speed import EngineSpeed
from antiphon.simulate.environment import EnvironmentConfig
from antiphon.simulate.learner import LearnerSpeed
from antiphon.simulate.workloads import DistributionConfig


class Speeds(Config):
    """Speeds of a run's parts, the learner on all its ranks, and distributions of their work.

    Where the run's configuration also has a value, such as `engine.slots`, the configuration decides.
    """

    engine: EngineSpeed = EngineSpeed()
    learner: LearnerSpeed = LearnerSpeed()
    prompt_tokens: DistributionConfig = DistributionConfig(mean=100)
    response_tokens: DistributionConfig = DistributionConfig(mean=100)
    reward_seconds: DistributionConfig = DistributionConfig(mean=0)
    success: DistributionConfig = DistributionConfig(mean=0.5)
    environment: EnvironmentConfig | None = None


def parallel_share(alone: LearnerSpeed, together: LearnerSpeed, devices: int) -> float:
    """Return the share of a token's seconds that devices divide, from the speeds of one device and of several."""
    return min((1 - together.per_token / alone.per_token) / (1 - 1 / devices), 1.0) if alone.per_token else 1.0


def make_trace(values: Sequence[float], points: int = 100, shared: float = 0.0) -> DistributionConfig:
    """Return the distribution of measured values, as at most `points` quantiles."""
    ordered = sorted(values)
    kept = (
        [ordered[int((i + 0.5) / points * len(ordered))] for i in range(points)] if len(ordered) > points else ordered
    )
    return DistributionConfig(
        kind="trace", mean=0, values=tuple(round(float(value), 6) for value in kept), shared=shared
    )

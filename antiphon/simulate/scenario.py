"""Configuration of a simulation: a run's schedule, how fast its simulated parts are, and which faults happen."""

from pathlib import Path

from pydantic import Field

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.config import Config
from antiphon.learning.config import CheckpointConfig, LearnerConfig
from antiphon.rollout.config import RolloutConfig
from antiphon.run.config import EvaluationConfig, ModelConfig, RunConfig
from antiphon.simulate.engine_speed import EngineSpeed
from antiphon.simulate.environment import EnvironmentConfig
from antiphon.simulate.faults import FaultConfig
from antiphon.simulate.learner import LearnerSpeed
from antiphon.simulate.workloads import DistributionConfig
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.weights.config import WeightSyncConfig

TASK = "simulated"


class EnginesConfig(Config):
    """The engines of a scenario, which are all alike."""

    count: int = Field(1, gt=0)
    lent: int = Field(0, ge=0)
    """Number of engines that share their devices with the learner, and sleep while it trains."""
    speed: EngineSpeed = EngineSpeed()
    start_seconds: float = Field(0.0, ge=0.0)
    """Seconds until the replacement of a lost engine is ready."""


class ScenarioConfig(Config):
    """A scenario of `antiphon simulate`: a run's schedule, the speeds of its parts, and faults."""

    name: str = "scenario"
    seed: int = Field(0, ge=0)
    steps: int = Field(10, gt=0)
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: LearnerConfig = LearnerConfig()
    """Packing and stages of a step; the learner's speed is in `learner`."""
    engines: EnginesConfig = EnginesConfig()
    learner: LearnerSpeed = LearnerSpeed()
    prompts: int = Field(1000, gt=0)
    """Number of different prompts; each is drawn once an epoch."""
    test_prompts: int = Field(0, ge=0)
    """Number of further prompts, which are only evaluated."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When test prompts are evaluated, and how many attempts of an evaluation run at once beside training."""
    prompt_tokens: DistributionConfig = DistributionConfig(mean=100)
    response_tokens: DistributionConfig = DistributionConfig(kind="lognormal", mean=1000, spread=1.0)
    reward_seconds: DistributionConfig = DistributionConfig(mean=0)
    success: DistributionConfig = DistributionConfig(mean=0.5)
    """Probability that a response to a prompt is correct."""
    environment: EnvironmentConfig | None = None
    """The environment of an agent; without one, an attempt is one response."""
    faults: tuple[FaultConfig, ...] = ()
    checkpoint: CheckpointConfig = CheckpointConfig(every=0)
    weights: WeightSyncConfig = WeightSyncConfig()
    """When engines are updated; how long that takes is in `learner.publish` and `engines.speed.load`."""

    def run_config(self, directory: Path) -> RunConfig:
        """Return the configuration of the run that is simulated, recorded in `directory`."""
        prompts = PromptsConfig(source="jsonl", path=TASK)
        test = prompts if self.test_prompts else None
        return RunConfig(
            name=self.name,
            seed=self.seed,
            steps=self.steps,
            model=ModelConfig(path=TASK),
            tasks=(TaskConfig(name=TASK, prompts=prompts, test=test),),
            rollout=self.rollout,
            algorithm=self.algorithm,
            learner=self.training,
            evaluation=self.evaluation,
            checkpoint=self.checkpoint,
            weights=self.weights,
            record={"directory": str(directory), "live": "off"},
        )

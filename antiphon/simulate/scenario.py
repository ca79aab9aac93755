"""A scenario: a run's schedule, and how fast its simulated parts are. `simulate` plays it and says what it came to."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from antiphon.algorithms.registry import ADVANTAGES
from antiphon.config import Config
from antiphon.errors import UnsupportedError
from antiphon.learning.stages import STAGES
from antiphon.loop import Parts, Run
from antiphon.record.metrics import Metrics
from antiphon.record.run_dir import RunDirectory
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.episode import Episodes
from antiphon.rollout.filters import FILTERS
from antiphon.rollout.pool import EnginePool
from antiphon.run_config import ModelConfig, RunConfig
from antiphon.seeds import derive
from antiphon.simulate.clock import run
from antiphon.simulate.engine import EngineSpeed, SimulatedEngine
from antiphon.simulate.parts import (
    LearnerSpeed,
    SimulatedJudge,
    SimulatedLearner,
    SimulatedTokenizer,
    simulated_prompts,
)
from antiphon.simulate.workloads import DistributionConfig
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.mixture import Mixture, MixtureTask
from antiphon.types import GenerateRequest, IntArray
from antiphon.waits import Waits

TASK = "simulated"


class EnginesConfig(Config):
    """The engines of a scenario, all alike."""

    count: int = Field(1, gt=0)
    speed: EngineSpeed = EngineSpeed()


class ScenarioConfig(Config):
    """What `antiphon simulate` reads."""

    name: str = "scenario"
    seed: int = Field(0, ge=0)
    steps: int = Field(10, gt=0)
    rollout: RolloutConfig
    engines: EnginesConfig = EnginesConfig()
    learner: LearnerSpeed = LearnerSpeed()
    prompts: int = Field(1000, gt=0)
    """Different prompts; they come again an epoch later."""
    prompt_tokens: DistributionConfig = DistributionConfig(mean=100)
    response_tokens: DistributionConfig = DistributionConfig(kind="lognormal", mean=1000, spread=1.0)
    reward_seconds: DistributionConfig = DistributionConfig(mean=0)
    success: DistributionConfig = DistributionConfig(mean=0.5)
    """A prompt's probability of a right answer."""

    def run_config(self, directory: Path) -> RunConfig:
        """The configuration of the run that is simulated."""
        return RunConfig(
            name=self.name,
            seed=self.seed,
            steps=self.steps,
            model=ModelConfig(path=TASK),
            tasks=(TaskConfig(name=TASK, prompts=PromptsConfig(source="jsonl", path=TASK)),),
            rollout=self.rollout,
            record={"directory": str(directory), "trackers": (), "live": "off"},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated run came to. Seconds are virtual."""

    summary: dict[str, Any]
    steps: list[dict[str, float]]  # the metrics of each
    sampled_tokens: int
    read_tokens: int
    preemptions: int

    def table(self) -> dict[str, float | int]:
        """What a person wants to know of it."""

        def column(name: str) -> list[float]:
            return [step[name] for step in self.steps]

        seconds = sum(column("step/seconds"))
        return {
            "steps": len(self.steps),
            "seconds a step": seconds / len(self.steps),
            "tokens a second, trained": sum(column("learner/tokens")) / seconds,
            "tokens a second, sampled": self.sampled_tokens / seconds,
            "share of the learner's time spent waiting": fmean(column("step/wait_groups_share")),
            "age, mean": fmean(column("age/mean")),
            "age, greatest": max(column("age/max")),
            "groups dropped: stale": sum(column("groups/stale")),
            "groups dropped: filtered": sum(column("groups/filtered")),
            "groups dropped: failed": sum(column("groups/failed")),
            "tokens read": self.read_tokens,
            "preemptions": self.preemptions,
        }


class _Silent:
    """A `View` that keeps each step's metrics instead of showing them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def start(self, name: str, note: str = "") -> None: ...

    def step(self, step: int, steps: int, metrics: Mapping[str, float], waits: Waits) -> None:
        self.steps.append(dict(metrics))

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


def simulate(scenario: ScenarioConfig) -> Outcome:
    """Play a scenario from its first version to its last, in virtual time."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return run(_play(scenario, directory, stack))


async def _play(scenario: ScenarioConfig, root: Path, stack: ExitStack) -> Outcome:
    config = scenario.run_config(root)
    waits, view = Waits(), _Silent()
    engines = [SimulatedEngine(scenario.engines.speed, _length(scenario)) for _ in range(scenario.engines.count)]
    pool = EnginePool(engines, waits, config.rollout.timeout)
    judge = SimulatedJudge(scenario.reward_seconds, scenario.success, derive(scenario.seed, "judge"))
    tokenizer = SimulatedTokenizer()
    prompts = simulated_prompts(scenario.prompts, scenario.prompt_tokens, scenario.seed, TASK)
    directory = RunDirectory.create(root, config.name)
    parts = Parts(
        config=config,
        waits=waits,
        workers=(),
        learner=SimulatedLearner(scenario.learner),
        reference=None,
        pool=pool,
        episodes=Episodes(
            tokenizer=tokenizer,
            generate=pool.generate,
            grade=judge.score,
            environments={},
            config=config.rollout,
            max_length=1 << 40,
            seed=config.seed,
        ),
        mixture=Mixture([MixtureTask(name=TASK, prompts=prompts)], config.seed),
        next_example=_no_examples,
        validation=(),
        test=(),
        keep=FILTERS.resolve(config.rollout.filter) if config.rollout.filter else None,
        stages=[STAGES.resolve(name) for name in config.learner.stages],
        estimate=ADVANTAGES.resolve(config.algorithm.advantage),
        directory=directory,
        exchange=root,
        metrics=stack.enter_context(Metrics(directory.metrics)),
        trackers=(),
        view=view,
    )
    summary = await Run(parts).train()
    return Outcome(
        summary=summary,
        steps=view.steps,
        sampled_tokens=sum(engine.sampled_tokens for engine in engines),
        read_tokens=sum(engine.read_tokens for engine in engines),
        preemptions=sum(engine.preemptions for engine in engines),
    )


def _no_examples() -> tuple[IntArray, IntArray]:
    raise UnsupportedError("a simulation has no supervised fine-tuning")


def _length(scenario: ScenarioConfig) -> Callable[[GenerateRequest], int]:
    def length(request: GenerateRequest) -> int:
        return round(scenario.response_tokens.draw(request.sampling.seed))

    return length

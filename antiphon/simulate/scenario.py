"""A scenario: a run's schedule, how fast its simulated parts are, and what goes wrong. `simulate` plays it and says what it
came to."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from pydantic import Field

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.config import Config, dump
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import UnsupportedError
from antiphon.core.registry import import_path
from antiphon.core.rng import derive
from antiphon.core.types import GenerateRequest, IntArray, Prompt
from antiphon.learning.config import CheckpointConfig, LearnerConfig
from antiphon.learning.learner import ModelRoles
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger, LedgerStore, run_synchronously
from antiphon.record.metrics import Metrics
from antiphon.record.resume import open_first_lineage, open_next_lineage
from antiphon.record.run_dir import RunDirectory
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_supervisor import EngineSupply
from antiphon.rollout.episode import EnvironmentFactory, EpisodeRunner
from antiphon.rollout.filters import FILTERS
from antiphon.rollout.pool import EnginePool
from antiphon.run.config import ModelConfig, RunConfig
from antiphon.run.device_sharing import SharedDevices
from antiphon.run.loop import Components, Run, make_step_pipeline
from antiphon.simulate.clock import run
from antiphon.simulate.components import (
    NUMBERED,
    EnvironmentConfig,
    LearnerSpeed,
    LockStep,
    SimulatedEnvironment,
    SimulatedJudge,
    SimulatedLearner,
    SimulatedTokenizer,
    make_prompts,
)
from antiphon.simulate.engine import EngineSpeed, SimulatedEngine
from antiphon.simulate.faults import FaultConfig, Faults
from antiphon.simulate.workloads import DistributionConfig
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.mixture import Mixture, MixtureTask
from antiphon.weights.base import TransferContext

TASK = "simulated"


class EnginesConfig(Config):
    """The engines of a scenario, all alike."""

    count: int = Field(1, gt=0)
    lent: int = Field(0, ge=0)
    """Of them, those that sleep while the learner trains: it has their devices then."""
    speed: EngineSpeed = EngineSpeed()
    start_seconds: float = Field(0.0, ge=0.0)
    """Of one that takes the place of another."""


class ScenarioConfig(Config):
    """What `antiphon simulate` reads."""

    name: str = "scenario"
    seed: int = Field(0, ge=0)
    steps: int = Field(10, gt=0)
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: LearnerConfig = LearnerConfig()
    """How a step's samples are cut, and its stages; the learner's speed stands under `learner`."""
    engines: EnginesConfig = EnginesConfig()
    learner: LearnerSpeed = LearnerSpeed()
    prompts: int = Field(1000, gt=0)
    """Different prompts; they come again an epoch later."""
    prompt_tokens: DistributionConfig = DistributionConfig(mean=100)
    response_tokens: DistributionConfig = DistributionConfig(kind="lognormal", mean=1000, spread=1.0)
    reward_seconds: DistributionConfig = DistributionConfig(mean=0)
    success: DistributionConfig = DistributionConfig(mean=0.5)
    """A prompt's probability of a right answer."""
    environment: EnvironmentConfig | None = None
    """The world of an agent; without one, an attempt is one answer."""
    faults: tuple[FaultConfig, ...] = ()
    checkpoint: CheckpointConfig = CheckpointConfig(every=0)

    def run_config(self, directory: Path) -> RunConfig:
        """The configuration of the run that is simulated."""
        return RunConfig(
            name=self.name,
            seed=self.seed,
            steps=self.steps,
            model=ModelConfig(path=TASK),
            tasks=(TaskConfig(name=TASK, prompts=PromptsConfig(source="jsonl", path=TASK)),),
            rollout=self.rollout,
            algorithm=self.algorithm,
            learner=self.training,
            checkpoint=self.checkpoint,
            record={"directory": str(directory), "trackers": (), "live": "off"},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated run came to. Seconds are virtual."""

    summary: dict[str, Any]
    steps: list[dict[str, float]]  # the metrics of each
    attempts: int  # dispatched before the last step
    sampled_tokens: int
    read_tokens: int
    requeued_tokens: int
    preemptions: int
    engines_idle: float  # share of the run's time, over all engines
    learner_idle: float

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
            "share of the learner's time without work": self.learner_idle,
            "share of the engines' time without work": self.engines_idle,
            "age, mean": fmean(column("age/mean")),
            "age, greatest": max(column("age/max")),
            "groups dropped: stale": sum(column("groups/stale")),
            "groups dropped: filtered": sum(column("groups/filtered")),
            "groups dropped: failed": sum(column("groups/failed")),
            "length of trained against finished attempts": self.steps[-1]["bias/length"],
            "prompts tried and never trained on": self.steps[-1]["bias/prompts_never_trained"],
            "tokens read": self.read_tokens,
            "tokens carried over from dead engines": self.requeued_tokens,
            "preemptions": self.preemptions,
        }


class _Silent:
    """A `View` that keeps each step's metrics instead of showing them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def start(self, name: str, note: str = "") -> None: ...

    def step(self, step: int, steps: int, metrics: Mapping[str, float], deadlines: Deadlines) -> None:
        self.steps.append(dict(metrics))

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


def simulate(
    scenario: ScenarioConfig,
    events: TextIO | None = None,
    deadlines: Deadlines | None = None,
    keep: Path | None = None,
    resume: bool = False,
) -> Outcome:
    """Play a scenario from its first version to its last, in virtual time; its events go to `events`, one a line. The run's
    directory is left in `keep`, if that is given; with `resume` the run that lies there goes on."""
    with ExitStack() as stack:
        directory = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return run(_play(scenario, directory, stack, events, deadlines or Deadlines(), resume))


async def _play(
    scenario: ScenarioConfig, root: Path, stack: ExitStack, sink: TextIO | None, deadlines: Deadlines, resume: bool
) -> Outcome:
    config, loop = scenario.run_config(root), asyncio.get_running_loop()
    events = Events(loop.time, sink)
    faults = Faults(scenario.faults, scenario.seed, events)
    engines: list[SimulatedEngine] = []
    length = _length(scenario)

    def engine() -> SimulatedEngine:
        lent = sum(engine.colocated for engine in engines if engine.dead is None) < scenario.engines.lent
        engines.append(SimulatedEngine(scenario.engines.speed, length, colocated=lent))
        engines[-1].load_failures = lambda: faults.should_fail("engine.load")
        return engines[-1]

    async def respawn() -> SimulatedEngine:
        await asyncio.sleep(scenario.engines.start_seconds)
        return engine()

    first = [engine() for _ in range(scenario.engines.count)]
    pool = EnginePool(first, deadlines, config.rollout, events=events, supply=EngineSupply(start=respawn))
    judge = SimulatedJudge(scenario.reward_seconds, scenario.success, derive(scenario.seed, "judge"), faults)
    learner = SimulatedLearner(scenario.learner, faults, lambda: engines)
    prompts = make_prompts(scenario.prompts, scenario.prompt_tokens, scenario.seed, TASK)
    models = ModelRoles(learner=learner)
    view = _Silent()
    directory = RunDirectory.resume(root, config.name) if resume else RunDirectory.create(root, config.name)
    directory.write_config(dump(config))
    store = LedgerStore(directory.path)
    stack.callback(store.close)
    resumption = (
        open_next_lineage(store, directory.checkpoints, config.rollout.max_age, view.message) if resume else None
    )
    lineage, step = (resumption.lineage, resumption.state["step"]) if resumption else (0, 0)
    if resumption is None:
        open_first_lineage(store)
    parts = Components(
        config=config,
        deadlines=deadlines,
        workers=(),
        models=models,
        lease=SharedDevices(models, pool, (), shared=scenario.engines.lent > 0),
        training=make_step_pipeline(config, learner),
        pool=pool,
        episodes=EpisodeRunner(
            tokenizer=SimulatedTokenizer(),
            generate=pool.generate,
            grade=judge.score,
            environments=_environments(scenario, faults),
            config=config.rollout,
            max_length=1 << 40,
            seed=config.seed,
        ),
        mixture=Mixture([MixtureTask(name=TASK, prompts=prompts)], config.seed),
        next_example=_no_examples,
        validation=(),
        test=(),
        keep=FILTERS.resolve(config.rollout.filter) if config.rollout.filter else None,
        sampler=import_path(config.rollout.sampler, "sampler") if config.rollout.sampler else None,
        directory=directory,
        ledger=Ledger(store, events, lineage=lineage, step=step, run=run_synchronously),
        resumption=resumption,
        exchange=TransferContext(root),
        metrics=stack.enter_context(Metrics(directory.metrics, lineage=lineage)),
        trackers=(),
        view=view,
        in_thread=run_synchronously,
    )
    trouble = asyncio.create_task(faults.inject(lambda: engines), name="faults")
    summary = await Run(parts).train()
    trouble.cancel()
    await parts.ledger.commit()
    return Outcome(
        summary=summary,
        steps=view.steps,
        attempts=int(view.steps[-1]["attempts/dispatched"]) if view.steps else 0,
        sampled_tokens=sum(engine.sampled_tokens for engine in engines),
        read_tokens=sum(engine.read_tokens for engine in engines),
        requeued_tokens=pool.requeued_tokens,
        preemptions=sum(engine.preemptions for engine in engines),
        engines_idle=1 - sum(engine.busy_seconds for engine in engines) / (scenario.engines.count * loop.time()),
        learner_idle=1 - learner.busy_seconds / loop.time(),
    )


def _no_examples() -> tuple[IntArray, IntArray]:
    raise UnsupportedError("a simulation has no supervised fine-tuning")


def _length(scenario: ScenarioConfig) -> Callable[[GenerateRequest], int]:
    prompts = [derive(scenario.seed, "length", number) for number in range(scenario.prompts)]

    def length(request: GenerateRequest) -> int:
        prompt = prompts[int(request.tokens[0]) - NUMBERED]
        return round(scenario.response_tokens.draw_alike(prompt, request.sampling.seed))

    return length


def _environments(scenario: ScenarioConfig, faults: Faults) -> dict[str, EnvironmentFactory]:
    config, numbers = scenario.environment, count()
    if config is None:
        return {}
    together = LockStep() if config.lock_step else None

    def environment(_: Prompt) -> SimulatedEnvironment:
        return SimulatedEnvironment(config, derive(scenario.seed, "environment", next(numbers)), faults, together)

    return {TASK: environment}

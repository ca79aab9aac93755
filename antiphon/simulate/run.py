"""Simulate a scenario: the real loop, scheduler and ledger on a virtual clock, with simulated engines and learner."""

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from antiphon.core.config import dump
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import RolloutError, WorkerDiedError
from antiphon.core.rng import derive
from antiphon.core.types import GenerateRequest, Prompt
from antiphon.learning.learner import ModelRoles
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger, run_synchronously
from antiphon.record.metrics import Metrics
from antiphon.record.resume import open_first_lineage, open_next_lineage
from antiphon.record.run_dir import RunDirectory
from antiphon.record.store import LedgerStore
from antiphon.rollout.backend import LocalRollouts
from antiphon.rollout.engine_supervisor import EngineSupply
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.episode_loop import EnvironmentFactory, EpisodeContext
from antiphon.rollout.group_hooks import load_group_hooks
from antiphon.rollout.pool import EnginePool
from antiphon.rollout.prompt_encoding import PromptEncoder
from antiphon.run.components import Components
from antiphon.run.device_sharing import SharedDevices
from antiphon.run.launch.models import make_local_training
from antiphon.run.launch.record import RunRecord
from antiphon.run.launch.tasks import TaskData
from antiphon.run.loop import Run
from antiphon.run.publisher import WeightPublisher
from antiphon.run.waits import RunWaits
from antiphon.simulate import clock
from antiphon.simulate.engine import SimulatedEngine
from antiphon.simulate.environment import LockStep, SimulatedEnvironment
from antiphon.simulate.faults import Faults
from antiphon.simulate.learner import SimulatedLearner
from antiphon.simulate.outcome import MetricsView, Outcome
from antiphon.simulate.prompts import FIRST_NUMBER, SimulatedJudge, SimulatedTokenizer, make_prompts
from antiphon.simulate.scenario import TASK, ScenarioConfig
from antiphon.tasks.mixture import Mixture, MixtureTask
from antiphon.weights.base import TransferContext

MAX_LENGTH = 1 << 40  # tokens of a sequence


def simulate(
    scenario: ScenarioConfig,
    events: TextIO | None = None,
    deadlines: Deadlines | None = None,
    keep: Path | None = None,
    resume: bool = False,
) -> Outcome:
    """Simulate a scenario from its first version to its last, in virtual time.

    Args:
        scenario: The scenario.
        events: Receives every event, one JSON object a line.
        deadlines: Deadlines of all waits; by default those of a run.
        keep: Directory for the run directory; by default it is removed at the end.
        resume: Continue the run that is in `keep`.
    """
    with ExitStack() as stack:
        root = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return clock.run(_simulate(scenario, root, stack, events, deadlines or Deadlines(), resume))


async def _simulate(
    scenario: ScenarioConfig, root: Path, stack: ExitStack, sink: TextIO | None, deadlines: Deadlines, resume: bool
) -> Outcome:
    simulation = _Simulation(scenario, root, sink, deadlines)
    record = simulation.open_record(root, stack, resume)
    injecting = asyncio.create_task(simulation.faults.inject(lambda: simulation.engines), name="faults")
    try:
        summary = await Run(simulation.make_components(record)).train()
    except (WorkerDiedError, RolloutError):  # the process lives, and writes how the run ended
        await record.ledger.commit()
        raise
    injecting.cancel()
    await record.ledger.commit()
    return simulation.make_outcome(summary)


class _Simulation:
    """The simulated parts of one run."""

    def __init__(self, scenario: ScenarioConfig, root: Path, sink: TextIO | None, deadlines: Deadlines) -> None:
        self.scenario = scenario
        self.config = scenario.run_config(root)
        self.deadlines = deadlines
        self.events = Events(asyncio.get_running_loop().time, sink)
        self.faults = Faults(scenario.faults, scenario.seed, self.events)
        self.view = MetricsView()
        self.engines: list[SimulatedEngine] = []
        self._length = _make_length(scenario)
        first = [self._start_engine() for _ in range(scenario.engines.count)]
        self.pool = EnginePool(
            first, deadlines, self.config.rollout, events=self.events, supply=EngineSupply(start=self._replace_engine)
        )
        self.learner = SimulatedLearner(scenario.learner, self.faults, lambda: self.engines)

    def _start_engine(self) -> SimulatedEngine:
        config = self.scenario.engines
        colocated = sum(engine.colocated for engine in self.engines if engine.dead is None) < config.lent
        engine = SimulatedEngine(config.speed, self._length, colocated=colocated)
        engine.load_failures = lambda: self.faults.should_fail("engine.load")
        self.engines.append(engine)
        return engine

    async def _replace_engine(self) -> SimulatedEngine:
        await asyncio.sleep(self.scenario.engines.start_seconds)
        return self._start_engine()

    def open_record(self, root: Path, stack: ExitStack, resume: bool) -> RunRecord:
        """Create the run directory, or open it to continue; `stack` closes its files."""
        config = self.config
        directory = RunDirectory.resume(root, config.name) if resume else RunDirectory.create(root, config.name)
        directory.write_config(dump(config))
        store = LedgerStore(directory.path)
        stack.callback(store.close)
        resumption, lineage, step = None, 0, 0
        if resume:
            resumption = open_next_lineage(store, directory.checkpoints, config.rollout.max_age, self.view.message)
            lineage, step = resumption.lineage, resumption.state["step"]
        else:
            open_first_lineage(store)
        return RunRecord(
            directory=directory,
            ledger=Ledger(store, self.events, lineage=lineage, step=step, run=run_synchronously),
            metrics=stack.enter_context(Metrics(directory.metrics, lineage=lineage)),
            view=self.view,
            resumption=resumption,
            in_thread=run_synchronously,
        )

    def make_components(self, record: RunRecord) -> Components:
        """Assemble the run from simulated parts."""
        scenario, config = self.scenario, self.config
        judge = SimulatedJudge(scenario.reward_seconds, scenario.success, derive(scenario.seed, "judge"), self.faults)
        count = scenario.prompts
        prompts = make_prompts(count + scenario.test_prompts, scenario.prompt_tokens, scenario.seed, TASK)
        episodes = EpisodeRunner(
            EpisodeContext(
                encoder=PromptEncoder(SimulatedTokenizer()),
                generate=self.pool.generate,
                config=config.rollout,
                max_length=MAX_LENGTH,
                seed=config.seed,
            ),
            grade=judge.score,
            environments=_make_environments(scenario, self.faults),
        )
        rollouts = LocalRollouts(self.pool, episodes)
        wait = partial(RunWaits(config, self.deadlines), name="step", on="the learner")
        training = make_local_training(config, ModelRoles(learner=self.learner), wait=wait)
        devices = SharedDevices(training, rollouts, shared=scenario.engines.lent > 0)
        context = TransferContext(record.directory.path.parent)
        mixture = Mixture([MixtureTask(name=TASK, prompts=prompts[:count])], config.seed)
        return Components(
            config=config,
            deadlines=self.deadlines,
            tasks=TaskData(mixture=mixture, test=prompts[count:]),
            rollouts=rollouts,
            weights=WeightPublisher(config, self.deadlines, devices, context, record.first_version),
            record=record,
            hooks=load_group_hooks(config.rollout, config.tasks, config.plan_evaluation(), mixture),
        )

    def make_outcome(self, summary: dict[str, Any]) -> Outcome:
        """Return the measures of the run that has just ended."""
        engines, steps, seconds = self.engines, self.view.steps, asyncio.get_running_loop().time()
        busy = sum(engine.busy_seconds for engine in engines)
        return Outcome(
            summary=summary,
            steps=steps,
            attempts=int(steps[-1]["attempts/dispatched"]) if steps else 0,
            sampled_tokens=sum(engine.sampled_tokens for engine in engines),
            read_tokens=sum(engine.read_tokens for engine in engines),
            requeued_tokens=self.pool.requeued_tokens,
            preemptions=sum(engine.preemptions for engine in engines),
            engines_idle=1 - busy / (self.scenario.engines.count * seconds),
            learner_idle=1 - self.learner.busy_seconds / seconds,
        )


def _make_length(scenario: ScenarioConfig) -> Callable[[GenerateRequest], int]:
    """Return the function that gives a request its number of tokens."""
    count = scenario.prompts + scenario.test_prompts
    prompts = [derive(scenario.seed, "length", number) for number in range(count)]

    def length(request: GenerateRequest) -> int:
        prompt = prompts[int(request.tokens[0]) - FIRST_NUMBER]
        return round(scenario.response_tokens.draw_correlated(prompt, request.sampling.seed))

    return length


def _make_environments(scenario: ScenarioConfig, faults: Faults) -> dict[str, EnvironmentFactory]:
    config, numbers = scenario.environment, count()
    if config is None:
        return {}
    lock_step = LockStep() if config.lock_step else None

    def make_environment(_: Prompt) -> SimulatedEnvironment:
        return SimulatedEnvironment(config, derive(scenario.seed, "environment", next(numbers)), faults, lock_step)

    return {TASK: make_environment}

"""Starting rollouts: engines and episodes in this process, or rollout workers that each have a share of them."""

import itertools
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from antiphon.cluster.placement import gpus_of
from antiphon.core.profiles import ProfiledHandles
from antiphon.record.run_dir import RunLineage
from antiphon.rollout.backend import LocalRollouts
from antiphon.rollout.beam_search import with_beam_search
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.episode_loop import EpisodeContext
from antiphon.rollout.group_scoring import GroupScoring
from antiphon.rollout.prompt_encoding import PromptEncoder
from antiphon.rollout.remote_workers import RolloutWorker, RolloutWorkers
from antiphon.run.config import RunConfig
from antiphon.run.device_assignment import AssignDevices, DeviceAssignment, device_assigner, reassign
from antiphon.run.launch.agents import start_agents
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.engines import EngineStarter, start_engines
from antiphon.run.launch.environments import make_environments
from antiphon.run.launch.graders import Graders, Judges
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.rendering import Renderer

ROLLOUT_WORKER = "antiphon.run.rollout_worker:RolloutWorkerProcess"


async def start_rollouts(
    context: LaunchContext,
    model: Path,
    graders: Graders,
    stack: AsyncExitStack,
    assign: AssignDevices | None = None,
) -> LocalRollouts:
    """Start engines, environments and agents in workers of this process.

    Args:
        context: The run.
        model: Directory of the model that engines load.
        graders: Graders of all tasks.
        stack: Closes what is started here.
        assign: Devices of each engine; by default, those that it is placed on.
    """
    config, renderer = context.config, Renderer(model)
    assign = assign or device_assigner(context.cluster, config, "engine")
    prefers = {task.name: task.prefers for task in config.tasks if task.prefers}
    starter = EngineStarter(context.cluster, "engine", model, config.engine, config.weights.channel, assign)
    context.profiled.append(ProfiledHandles(lambda: starter.workers))
    pool, max_length = await start_engines(
        starter, config.rollout, context.deadlines, context.events, context.report, prefers
    )
    episodes = EpisodeRunner(
        EpisodeContext(
            encoder=PromptEncoder(renderer),
            generate=with_beam_search(pool.generate),
            config=config.rollout,
            max_length=max_length,
            seed=config.seed,
        ),
        grade=graders.router.score,
        environments=make_environments(context),
        agents=await start_agents(context, pool, renderer, max_length, stack),
        sampling={task.name: task.sampling.apply(config.rollout.sampling.sampling()) for task in config.tasks},
    )
    scoring = _make_group_scoring(context, episodes, graders.router)
    return LocalRollouts(pool, episodes, group_scoring=scoring, judges=graders.judges.pools, profiled=context.profiled)


def _make_group_scoring(context: LaunchContext, episodes: EpisodeRunner, router: RewardRouter) -> GroupScoring | None:
    """Return what scores siblings together, if a task asks for that."""
    config = context.config
    tasks = frozenset(task.name for task in config.tasks if task.group_reward)
    if not tasks:
        return None
    rollout = config.rollout
    longest = rollout.timeout + config.learner.timeout + config.weights.timeout  # a step may come in between
    return GroupScoring(episodes, router.score_group, tasks, rollout.group_size, context.deadlines, longest)


def make_rollout_workers(context: LaunchContext, model: Path, lineage: RunLineage, judges: Judges) -> RolloutWorkers:
    """Return rollout workers, of which each starts its share of the engines with `start_rollouts`; all ask the same judges."""
    starter = _WorkerStarter(context, model, lineage, judges)
    return RolloutWorkers(
        starter.start,
        context.deadlines,
        context.config.rollout,
        report=context.report,
        judges=judges.pools,
        profiled=context.profiled,
    )


class _WorkerStarter:
    """Starts rollout workers, each with an equal share of the engines."""

    def __init__(self, context: LaunchContext, model: Path, lineage: RunLineage, judges: Judges) -> None:
        self._context = context
        self._judges = judges
        self._model = model
        self._lineage = lineage
        self._share = context.config.engine.replicas // context.config.rollout.workers
        engine = context.config.engine.model_copy(update={"replicas": self._share})
        self._config: RunConfig = context.config.model_copy(update={"engine": engine})
        self._serials = itertools.count()

    async def start(self, number: int) -> RolloutWorker:
        """Start the worker that has share `number` of the engines. `WorkerDiedError` if its devices are gone."""
        context, serial = self._context, next(self._serials)
        devices = self._assign_devices(number)
        at = devices[0].place
        place = at and replace(at, cores=(), gpus=gpus_of(each.place for each in devices))
        args = (serial, str(self._model), self._config, devices, self._lineage, context.events.enabled)
        handle = context.cluster.spawn(f"rollout-{serial}", ROLLOUT_WORKER, *args, place=place)
        worker = RolloutWorker(handle, number, context.events, context.report, self._judges.answerers)
        await worker.started_or_killed()
        return worker

    def _assign_devices(self, number: int) -> list[DeviceAssignment]:
        assign = device_assigner(self._context.cluster, self._context.config, "engine", number * self._share)
        return [reassign(assign, engine, f"rollout worker {number}") for engine in range(self._share)]

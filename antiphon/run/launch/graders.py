"""Starting graders, and the engines of the judges among them."""

import itertools
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from antiphon.core.errors import ConfigError, WorkerDiedError
from antiphon.core.profiles import ProfiledHandles
from antiphon.core.rpc import Answerer
from antiphon.rollout.judge import make_generate
from antiphon.rollout.pool import EnginePool
from antiphon.run.device_assignment import device_assigner
from antiphon.run.launch.classifiers import start_classifiers
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.engines import EngineStarter, start_engines
from antiphon.run.launch.model_directory import model_directory
from antiphon.run.placement import resolve_placement
from antiphon.tasks.base import Generate
from antiphon.tasks.config import JudgeConfig
from antiphon.tasks.grading.host import GradingHost, GradingHosts
from antiphon.tasks.grading.pools import GradingPools, Pools
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.grading.worker_process import PoolSettings
from antiphon.tasks.rendering import Renderer
from antiphon.tasks.rewards.remote_judge import RemoteJudges
from antiphon.tasks.rewards.reward_model import ClassifierOptions, Classify

HOST_WORKER = "antiphon.tasks.grading.host:GradingHostWorker"


class Judges(NamedTuple):
    """Models that rewards ask."""

    generate: Mapping[str, Generate] = {}  # asks the judge of a task
    classify: Mapping[ClassifierOptions, Classify] = {}  # asks a reward model
    remote: Mapping[str, Generate] = {}  # asks a judge behind an address, by `remote_judge_key`
    pools: Sequence[EnginePool] = ()  # of the judges
    remote_judges: RemoteJudges = RemoteJudges()  # that `remote` asks, if they run here

    @property
    def answerers(self) -> dict[Hashable, Answerer]:
        """The callables that answer rollout workers, by the task or key of a judge or the options of a reward model."""
        named: list[tuple[Hashable, Answerer]] = [
            *self.generate.items(),
            *self.classify.items(),
            *self.remote.items(),
        ]
        return dict(named)


class Graders(NamedTuple):
    """Running graders of all tasks."""

    router: RewardRouter
    judges: Judges


@asynccontextmanager
async def start_graders(context: LaunchContext, judges: Judges | None = None) -> AsyncIterator[Graders]:
    """Run the graders of all tasks, and the models that they ask unless these run already.

    In a run with a placement, graders see the GPUs that are placed for rewards and no others.
    """
    config = context.config
    async with AsyncExitStack() as stack:
        judges = judges or await start_judges(context, stack)
        router = RewardRouter(
            config.tasks,
            config.grading,
            context.deadlines,
            judges.generate,
            judges.classify,
            judges.remote,
            partial(_make_pools, context),
        )
        context.profiled.append(router)
        stack.callback(context.profiled.remove, router)
        yield Graders(await stack.enter_async_context(router), judges)


def _make_pools(context: LaunchContext, settings: Sequence[PoolSettings]) -> Pools:
    """Return the pools of graders: beside the controller, or in a worker of each node that rewards are placed on."""
    placement = context.placement
    places, here = placement.known_places("reward"), context.cluster.nodes()[0].id
    if all(place.node == here for place in places):
        cores = places[0].cores if places else ()
        gpus = places[0].gpus if places else () if placement.places else None
        return GradingPools(settings, context.deadlines, cores, gpus)
    start, silence = _HostStarter(context, settings).start, context.config.rollout.engine_timeout
    return GradingHosts(start, len(places), context.deadlines, context.report, silence)


class _HostStarter:
    """Starts workers that grade, one on each node that rewards are placed on."""

    def __init__(self, context: LaunchContext, settings: Sequence[PoolSettings]) -> None:
        self._context = context
        self._settings = settings
        self._serials = itertools.count()
        self._hosts: dict[str, str] = {}  # names of live workers by their nodes

    async def start(self, number: int) -> GradingHost:
        """Start a worker on a node that has none. `WorkerDiedError` if all others have left."""
        context, name = self._context, f"reward-{next(self._serials)}"
        nodes = [node.id for node in context.cluster.nodes()]
        try:
            placement = resolve_placement(context.cluster.nodes(), context.config, least=0)
            place = next(place for place in placement.known_places("reward") if place.node not in self._hosts)
        except (ConfigError, StopIteration) as error:
            raise WorkerDiedError(f"{name} has nowhere to run: a node of placement.reward has left") from error
        self._hosts[place.node] = name
        handle = context.cluster.spawn(
            name,
            HOST_WORKER,
            *(self._settings, place, f"{name} on node{nodes.index(place.node)}"),
            place=place,
        )
        handle.on_death(lambda _: self._hosts.__delitem__(place.node))
        host = GradingHost(handle)
        await host.started_or_killed()
        return host


async def start_judges(context: LaunchContext, stack: AsyncExitStack, usage: Path | None = None) -> Judges:
    """Start the models that rewards ask; `stack` ends what the cluster does not.

    `usage` is the file of what the run's remote judges have cost: of the run until now, if it is resumed.
    """
    generate: dict[str, Generate] = {}
    pools: list[EnginePool] = []
    first = 0  # device of the next judge
    for task in context.config.tasks:
        if task.judge is not None:
            pool, generate[task.name] = await _start_judge(context, task.name, task.judge, first)
            first += task.judge.replicas
            pools.append(pool)
    remote = RemoteJudges(context.config.remote_judges, context.config.grading.judge_budget)
    stack.push_async_callback(remote.close)
    if usage is not None:
        remote.read_usage(usage)
        stack.callback(remote.write_usage, usage)
    return Judges(generate, await start_classifiers(context, stack), remote.judges, pools, remote)


async def _start_judge(
    context: LaunchContext, task: str, judge: JudgeConfig, first: int
) -> tuple[EnginePool, Generate]:
    config = context.config
    rollout = config.rollout.model_copy(update={"placement": "spread"})  # questions of a judge are of no group
    model = await model_directory(context.cluster, judge.path, Path(), config.seed)
    engine = config.engine.model_copy(update={"replicas": judge.replicas, "minimum": judge.minimum, "also": ()})
    assign = device_assigner(context.cluster, config, "judge", first)
    name = f"judge-{task}"
    starter = EngineStarter(
        context.cluster, name, model, engine, assign_devices=assign, idle_seconds=judge.idle_seconds
    )
    context.profiled.append(ProfiledHandles(lambda: starter.workers))
    events = context.events.for_pool(name)
    pool, longest = await start_engines(starter, rollout, context.deadlines, events, context.report)
    return pool, make_generate(pool, Renderer(model), longest, judge.max_tokens)

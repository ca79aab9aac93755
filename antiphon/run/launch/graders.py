"""Starting graders, and the engines of the judges among them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from antiphon.rollout.judge import make_generate
from antiphon.rollout.pool import EnginePool
from antiphon.run.device_assignment import device_assigner
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.engines import EngineStarter, start_engines
from antiphon.run.launch.model_directory import model_directory
from antiphon.tasks.base import Generate
from antiphon.tasks.config import JudgeConfig
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.rendering import Renderer


class Graders(NamedTuple):
    """Running graders of all tasks."""

    router: RewardRouter
    judges: list[EnginePool]


@asynccontextmanager
async def start_graders(context: LaunchContext) -> AsyncIterator[Graders]:
    """Run the graders of all tasks, and the engines of their judges.

    In a run with a placement, graders see the GPUs that are placed for rewards and no others.
    """
    config, placement = context.config, context.placement
    generate: dict[str, Generate] = {}
    pools: list[EnginePool] = []
    first = 0  # device of the next judge
    for task in config.tasks:
        if task.judge is not None:
            pool, generate[task.name] = await _start_judge(context, task.name, task.judge, first)
            first += task.judge.replicas
            pools.append(pool)
    reward = placement.place("reward")
    cores = reward.cores if reward else ()
    gpus = reward.gpus if reward else () if placement.places else None
    async with RewardRouter(config.tasks, config.grading, context.deadlines, generate, cores, gpus) as router:
        yield Graders(router, pools)


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
    events = context.events.for_pool(name)
    pool, longest = await start_engines(starter, rollout, context.deadlines, events, context.report)
    return pool, make_generate(pool, Renderer(model), longest, judge.max_tokens)

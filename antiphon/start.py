"""From a configuration to workers: models, graders, engines, environments, each started where the cluster says."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.cluster.base import Cluster
from antiphon.engines.config import EngineConfig
from antiphon.engines.worker import WorkerEngine
from antiphon.errors import DataError
from antiphon.learning.config import LearnerConfig
from antiphon.learning.learner import CRITIC, LEARNERS, BaseOf, Models, Scorer, WorkerLearner
from antiphon.record.events import Events
from antiphon.registry import import_path
from antiphon.rollout.agents import Agent, FunctionAgent, command_agent, play
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.episode import Episodes, MakeEnvironment, PlayAgent
from antiphon.rollout.gateway.server import Gateway
from antiphon.rollout.gateway.sessions import Model as ModelBehind
from antiphon.rollout.judge import asking
from antiphon.rollout.pool import EnginePool
from antiphon.rollout.worlds import Worlds
from antiphon.run_config import RunConfig
from antiphon.sandbox.box_config import BoxConfig
from antiphon.sandbox.rooms import Rooms
from antiphon.seeds import derive
from antiphon.tasks.config import TaskConfig
from antiphon.tasks.environments import blocks, environment_factory
from antiphon.tasks.graders import Graders
from antiphon.tasks.rendering import Renderer
from antiphon.waits import Waits
from antiphon.workers import Worker, WorkerHandle

ENGINE_WORKER = "antiphon.engines.worker:EngineWorker"


async def start_models(cluster: Cluster, model: Path, config: RunConfig) -> tuple[Models, list[WorkerHandle]]:
    """Start the models that the algorithm needs, each in a process of its own. All begin as `model`, but for teachers and for
    critics with a path of theirs."""
    handles: list[WorkerHandle] = []

    def start(name: str, kind: str, path: Path, *more: Any, settings: LearnerConfig = config.learner) -> WorkerLearner:
        handles.append(cluster.spawn(name, kind, str(path), settings, derive(config.seed, name), *more))
        return WorkerLearner(handles[-1])

    async def directory(path: str) -> Path:
        return await model_directory(cluster, path, Path(), config.seed) if path else model

    kind, critic = LEARNERS.built_in.get(config.learner.kind, config.learner.kind), config.critic
    paths = [await directory(teacher.path) for teacher in config.teachers]
    began = await directory(critic.path if critic else "")
    for path in {*paths, began} - {model}:
        check_tokenizers(model, path)
    unadapted = config.learner.model_copy(update={"lora": None})
    learner = start("learner", kind, model)
    reference: Scorer | None = None
    if "reference_logprobs" in config.algorithm.needed:
        reference = BaseOf(learner) if config.learner.lora else start("reference", kind, model)
    models = Models(
        learner=learner,
        reference=reference,
        critics=[start(f"critic-{number}", CRITIC, began, critic) for number in range(critic.count if critic else 0)],
        teachers=[start(f"teacher-{number}", kind, path, settings=unadapted) for number, path in enumerate(paths)],
    )
    return models, handles


def check_tokenizers(model: Path, other: Path) -> None:
    """`DataError` unless the tokens of two model directories are the same: log-probs of others cannot be compared."""
    ours, theirs = (Renderer(directory).vocabulary() for directory in (model, other))
    if ours != theirs:
        token = next(iter(sorted(ours.items() ^ theirs.items())))
        raise DataError(
            f"{other}: its tokenizer is not that of {model} ({token[0]!r} is token {ours.get(token[0])} there and "
            f"{theirs.get(token[0])} here), so what they say of tokens cannot be compared"
        )


@asynccontextmanager
async def graders(
    cluster: Cluster, config: RunConfig, waits: Waits, tell: Callable[[str], None] = print
) -> AsyncIterator[tuple[Graders, list[EnginePool]]]:
    """What grades the tasks of a run, started, and the engines of the judges among it."""
    asked, pools = {}, []
    for task in config.tasks:
        if (judge := task.judge) is not None:
            model = await model_directory(cluster, judge.path, Path(), config.seed)
            engine = config.engine.model_copy(update={"replicas": judge.replicas})
            pool, longest = await start_engines(
                cluster, f"judge-{task.name}", model, (engine, config.rollout), waits, Events(), tell
            )
            asked[task.name] = asking(pool, Renderer(model), longest, judge.max_tokens)
            pools.append(pool)
    async with Graders(config.tasks, config.grading, waits, asked) as grading:
        yield grading, pools


async def start_engines(
    cluster: Cluster,
    name: str,
    model: Path,
    config: tuple[EngineConfig, RolloutConfig],
    waits: Waits,
    events: Events,
    tell: Callable[[str], None],
    channel: str = "shared_memory",
) -> tuple[EnginePool, int]:
    """Engines that run a model, with weights that come by `channel` if others do, and the most tokens that one takes."""
    names = (f"{name}-{number}" for number in itertools.count())
    settings, rollout = config

    async def engine() -> WorkerEngine:
        args = (settings.kind, str(model), settings, channel)
        made = WorkerEngine(cluster.spawn(next(names), ENGINE_WORKER, *args, python=settings.python))
        await made.ready()
        return made

    ready = asyncio.gather(*(engine() for _ in range(settings.replicas)))
    engines = await waits.wait(
        ready, name="start", owner="run", on="engines to load the model", deadline=rollout.timeout
    )
    pool = EnginePool(engines, waits, rollout, events=events, on_loss=tell, respawn=engine)
    return pool, min(engine.max_length for engine in engines)


async def start_rollouts(
    cluster: Cluster,
    model: Path,
    grading: Graders,
    config: RunConfig,
    waits: Waits,
    events: Events,
    stack: AsyncExitStack,
    tell: Callable[[str], None] = print,
) -> tuple[EnginePool, Episodes, Renderer]:
    """Engines, and what runs episodes on them; what is to be closed in the end is left to `stack`."""
    renderer = Renderer(model)
    settings = config.engine, config.rollout
    pool, longest = await start_engines(cluster, "engine", model, settings, waits, events, tell, config.weights.channel)
    episodes = Episodes(
        tokenizer=renderer,
        generate=pool.generate,
        grade=grading.score,
        environments=dict(_environments(cluster, config)),
        agents=await _start_agents(pool, renderer, longest, config, waits, stack),
        config=config.rollout,
        max_length=longest,
        seed=config.seed,
    )
    return pool, episodes, renderer


async def _start_agents(
    pool: EnginePool, renderer: Renderer, longest: int, config: RunConfig, waits: Waits, stack: AsyncExitStack
) -> dict[str, PlayAgent]:
    """What plays the attempts of each task that has an agent: all of them ask at one gateway."""
    tasks = {task.name: task.agent for task in config.tasks if task.agent is not None}
    if not tasks:
        return {}
    answering = ModelBehind(
        generate=pool.generate, tokenizer=renderer, max_length=longest, tools=config.rollout.tool_format
    )
    gateway = await stack.enter_async_context(Gateway(answering, seed=config.seed))
    rooms: Rooms | None = None
    if any(agent.command and not agent.unconfined for agent in tasks.values()):
        rooms = Rooms()
        stack.callback(rooms.close)
    found: dict[str, PlayAgent] = {}
    for name, settings in tasks.items():
        agent: Agent
        if settings.function:
            agent = FunctionAgent(import_path(settings.function, "agent"))
        else:
            box = BoxConfig(image=settings.image, network=settings.network)
            own = None if settings.unconfined else rooms
            agent = command_agent(settings.command, rooms=own, waits=waits, config=box, unconfined=settings.unconfined)
        found[name] = partial(play, agent, gateway, seconds=settings.seconds)
    return found


def _environments(cluster: Cluster, config: RunConfig) -> Iterator[tuple[str, MakeEnvironment]]:
    """What makes the environments of each task that has some: here, or in processes if they block."""
    for task in config.tasks:
        if task.environment:
            make: MakeEnvironment = environment_factory(task.environment, task.environment_options)
            if blocks(task.environment) and not config.rollout.deterministic:
                make = Worlds(task.environment_pool, _spawn_hosts(cluster, task)).make
            yield task.name, make


def _spawn_hosts(cluster: Cluster, task: TaskConfig) -> Callable[[], WorkerHandle]:
    numbers = itertools.count()
    factory = "antiphon.tasks.environments.host:EnvironmentHost"
    return lambda: cluster.spawn(
        f"environment-{task.name}-{next(numbers)}", factory, task.environment, task.environment_options
    )


class ModelBuilder(Worker):
    """Runs the user's function that writes a model, so that what it imports stays out of the controller."""

    def build(self, path: str, target: Path, seed: int) -> None:
        """Call package.module:function with (target, seed)."""
        import_path(path, "model")(target, seed)


async def model_directory(cluster: Cluster, path: str, target: Path, seed: int) -> Path:
    """Where the model lies: `path` itself, what package.module:function writes to `target`, or a download of a Hugging
    Face id."""
    if Path(path).is_dir():
        return Path(path)
    if ":" in path:
        builder = cluster.spawn("model", f"{__name__}:{ModelBuilder.__name__}")
        await builder.call("build", path, target, seed)
        await builder.close()
        return target
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"model {path!r} is no local directory, and cannot be downloaded: {type(error).__name__}"
        ) from error

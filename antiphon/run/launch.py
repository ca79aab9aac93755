"""From a configuration to workers: models, graders, engines, environments, each started where the cluster says."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from antiphon.cluster.base import Cluster
from antiphon.cluster.placement import Placement, gpus_of
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, DataError, SandboxError, WorkerDied
from antiphon.core.registry import import_path
from antiphon.core.rng import derive
from antiphon.core.types import REFERENCE_LOGPROBS
from antiphon.core.workers import Worker, WorkerHandle
from antiphon.learning.config import OPTIONS, LearnerConfig
from antiphon.learning.learner import CRITIC, LEARNERS, LoraBaseReference, ModelRoles, Offloadable, WorkerLearner
from antiphon.learning.parallel.rank_group import RankGroup
from antiphon.learning.remote import RemoteTrainer
from antiphon.record.events import Events
from antiphon.record.run_dir import RunDirectory, RunLineage
from antiphon.rollout.agents import Agent, FunctionAgent, command_agent, run_agent
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_supervisor import EngineSupply
from antiphon.rollout.environment_pool import EnvironmentPool
from antiphon.rollout.episode import EnvironmentFactory, EpisodeRunner, RunAgent
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.rollout.gateway.server import Gateway
from antiphon.rollout.group_scoring import GroupScoring
from antiphon.rollout.judge import make_generate
from antiphon.rollout.pool import EnginePool
from antiphon.rollout.remote_workers import RolloutWorker, RolloutWorkers
from antiphon.run.config import RunConfig
from antiphon.run.device_assignment import AssignDevices, DeviceAssignment, EngineStarter, device_assigner
from antiphon.run.model_files import check_weights, model_shape
from antiphon.sandbox.sessions.box_config import BoxConfig
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.tasks.base import Generate
from antiphon.tasks.config import TaskConfig
from antiphon.tasks.environments import environment_factory, is_blocking
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.rendering import Renderer

NOWHERE = Placement()  # in particular
ROLLOUT_WORKER = "antiphon.run.rollout_worker:RolloutWorkerProcess"
TRAINER, TRAINER_WORKER = "trainer", "antiphon.run.trainer_process:TrainerProcess"


async def start_models(
    cluster: Cluster, model: Path, config: RunConfig, placement: Placement = NOWHERE
) -> tuple[ModelRoles, list[WorkerHandle]]:
    """Start the models that the algorithm needs, each in a process of its own. All begin as `model`, of which `check_model` has
    nothing to say, but for teachers and for critics with a path of theirs."""
    handles: list[WorkerHandle] = []
    meetings: list[Awaitable[None]] = []

    def start(name: str, kind: str, path: Path, *more: Any) -> WorkerLearner:
        role, _, number = name.partition("-")
        settings = config.learner_of(role)
        args = (str(path), settings, derive(config.seed, name), *more)
        ranks = settings.mesh.world
        members = [
            cluster.spawn(
                name if ranks == 1 else f"{name}-rank-{rank}",
                kind,
                *args,
                place=placement.place(role, int(number or 0) * ranks + rank),
            )
            for rank in range(ranks)
        ]
        handles.extend(members)
        if ranks == 1:
            return WorkerLearner(members[0])
        together = RankGroup(members, settings.mesh)
        meetings.append(together.rendezvous(config.weights.host))
        return WorkerLearner(together)

    async def directory(path: str) -> Path:
        return await model_directory(cluster, path, Path(), config.seed) if path else model

    kind, critic = LEARNERS.built_in.get(config.learner.kind, config.learner.kind), config.critic
    paths = [await directory(teacher.path) for teacher in config.teachers]
    began = await directory(critic.path if critic else "")
    for role, path in [("reference", model), ("critic", began), *(("teacher", path) for path in paths)]:
        if path != model:
            check_tokenizers(model, path)
        if config.counts[role] and (path, config.learner_of(role)) != (model, config.learner):
            await check_model(cluster, path, config.learner_of(role), config.mesh_of(role))
    if config.algorithm.expert_balance and not {"num_experts", "num_local_experts"} & model_shape(model).keys():
        raise ConfigError(f"algorithm.expert_balance: the model at {model} has no experts that a loss balances")
    learner = start("learner", kind, model)
    reference: Offloadable | None = None
    if REFERENCE_LOGPROBS in config.algorithm.required_streams:
        reference = LoraBaseReference(learner) if config.learner.lora else start("reference", kind, model)
    models = ModelRoles(
        learner=learner,
        reference=reference,
        critics=[start(f"critic-{number}", CRITIC, began, critic) for number in range(critic.count if critic else 0)],
        teachers=[start(f"teacher-{number}", kind, path) for number, path in enumerate(paths)],
    )
    await asyncio.gather(*meetings)
    return models, handles


async def start_trainer(
    cluster: Cluster,
    model: Path,
    config: RunConfig,
    directory: RunDirectory,
    deadlines: Deadlines,
    placement: Placement,
) -> RemoteTrainer:
    """What starts the models with `start_models`, on the learner's node."""
    at = placement.place("learner")
    place = at and replace(at, cores=(), gpus=placement.training_gpus)
    trainer = RemoteTrainer(
        cluster.spawn(TRAINER, TRAINER_WORKER, str(model), config, directory, placement, place=place)
    )
    on, deadline, key = "the trainer to start its models", config.learner.timeout, "learner.timeout"
    await deadlines.wait(trainer.started(), name="start", owner="run", on=on, deadline=deadline, key=key)
    return trainer


def check_tokenizers(model: Path, other: Path) -> None:
    """`DataError` unless the tokens of two model directories are the same: log-probs of others cannot be compared."""
    ours, theirs = (Renderer(directory).vocabulary() for directory in (model, other))
    if ours != theirs:
        token = next(iter(sorted(ours.items() ^ theirs.items())))
        raise DataError(
            f"{other}: its tokenizer is not that of {model} ({token[0]!r} is token {ours.get(token[0])} there and "
            f"{theirs.get(token[0])} here), so what they say of tokens cannot be compared"
        )


def check_installed(kind: str) -> None:
    """`ConfigError` if a kind of learner needs a package that is not here."""
    if kind in OPTIONS and find_spec(kind) is None:
        raise ConfigError(f"learner.kind: {kind!r} is not installed: pip install -e '.[{kind}]'")


def check_mesh(model: Path, learner: LearnerConfig, at: str = "learner.mesh") -> None:
    """`ConfigError` unless the model in a directory can be learned so, on such a mesh, which is said `at` this place."""
    for key, message in learner.incompatibilities(model_shape(model)):
        place = at + key.removeprefix("mesh") if key.startswith("mesh") else f"learner.{key}"
        raise ConfigError(f"{place}: of the model at {model}, {message}")


def check_layers(model: Path, learner: LearnerConfig, at: str = "learner.mesh") -> None:
    """`UnsupportedError` unless the model in a directory has layers that can be divided on such a mesh, which is said `at` this
    place. Where that is to be seen from them alone, torch is imported."""
    if _divides_layers(learner):
        from antiphon.learning.model.loading import build_on_meta
        from antiphon.learning.parallel.tensor_parallel import check_division

        check_division(build_on_meta(model), learner.mesh, at)


def check_meshes(config: RunConfig, model: Path) -> None:
    """`check_mesh` and `check_layers` of all models of a run that are here, and of the policy in a directory."""
    critic, seen = config.critic.path if config.critic else "", list[tuple[Path, LearnerConfig]]()
    paths = [("learner", model), ("reference", model), ("critic", Path(critic) if critic else model)]
    for role, path in [*paths, *(("teacher", Path(teacher.path)) for teacher in config.teachers)]:
        settings, at = config.learner_of(role), config.mesh_of(role)
        if config.counts[role] and (path / "config.json").is_file() and (path, settings) not in seen:
            seen.append((path, settings))
            check_mesh(path, settings, at)
            check_layers(path, settings, at)


def _divides_layers(learner: LearnerConfig) -> bool:
    return learner.kind == "torch" and learner.mesh.tensor * learner.mesh.expert > 1


class LayersChecker(Worker):
    """Looks at the layers of models, so that torch stays out of the controller."""

    def check(self, model: Path, learner: LearnerConfig, at: str) -> None:
        """See `check_layers`."""
        check_layers(model, learner, at)


async def check_model(cluster: Cluster, model: Path, learner: LearnerConfig, at: str = "learner.mesh") -> None:
    """Refuse a model in a directory that cannot be learned so, before a rank is started; its mesh is said `at` this place."""
    check_mesh(model, learner, at)
    check_shares(model, learner, at)
    if _divides_layers(learner):
        checker = cluster.spawn("layers", f"{__name__}:{LayersChecker.__name__}")
        await checker.call("check", model, learner, at)
        await checker.close()


def check_shares(model: Path, learner: LearnerConfig, at: str = "learner.mesh") -> None:
    """`ConfigError` unless each rank of a mesh, which is said `at` this place, can read its share of the weights in a
    directory; see `learning.model.loading.Checkpoint`."""
    if learner.mesh.world > 1 and learner.kind not in OPTIONS and not any(model.glob("*.safetensors")):
        raise ConfigError(
            f"{at}: the model at {model} has no *.safetensors, of which each of {learner.mesh.world} ranks reads its "
            "share; transformers' save_pretrained writes them"
        )


@asynccontextmanager
async def start_graders(
    cluster: Cluster,
    config: RunConfig,
    deadlines: Deadlines,
    tell: Callable[[str], None] = print,
    placement: Placement = NOWHERE,
    events: Events | None = None,
) -> AsyncIterator[tuple[RewardRouter, list[EnginePool]]]:
    """What grades the tasks of a run, started, and the engines of the judges among it. In a run with a placement it sees the
    GPUs that it has there, and no others."""
    events = events or Events()
    rollout = config.rollout.model_copy(update={"placement": "spread"})  # a judge's questions are of no group
    asked: dict[str, Generate] = {}
    pools: list[EnginePool] = []
    judges = 0
    for task in config.tasks:
        if (judge := task.judge) is not None:
            model = await model_directory(cluster, judge.path, Path(), config.seed)
            several = {"replicas": judge.replicas, "minimum": judge.minimum, "also": ()}
            engine = config.engine.model_copy(update=several)
            seats, judges = device_assigner(cluster, config, "judge", judges), judges + judge.replicas
            name = f"judge-{task.name}"
            starter = EngineStarter(cluster, name, model, engine, seat_of=seats, idle_seconds=judge.idle_seconds)
            pool, longest = await start_engines(starter, rollout, deadlines, events.for_pool(name), tell)
            asked[task.name] = make_generate(pool, Renderer(model), longest, judge.max_tokens)
            pools.append(pool)
    reward = placement.place("reward")
    cores = reward.cores if reward else ()
    gpus = reward.gpus if reward else () if placement.places else None
    async with RewardRouter(config.tasks, config.grading, deadlines, asked, cores, gpus) as grading:
        yield grading, pools


async def start_engines(
    starter: EngineStarter,
    rollout: RolloutConfig,
    deadlines: Deadlines,
    events: Events,
    tell: Callable[[str], None],
    prefers: Mapping[str, str] | None = None,
) -> tuple[EnginePool, int]:
    """A pool of engines, and the most tokens that one takes."""
    engines = await starter.first(deadlines, rollout.timeout, tell)
    pool = EnginePool(
        engines,
        deadlines,
        rollout,
        events=events,
        on_loss=tell,
        supply=EngineSupply(start=starter.another, target=starter.wanted, scaling=starter.scaling),
        preferred_devices=prefers,
    )
    starter.turn = pool.hold_devices
    return pool, min(engine.max_length for engine in engines)


async def start_rollouts(
    cluster: Cluster,
    model: Path,
    grading: RewardRouter,
    config: RunConfig,
    deadlines: Deadlines,
    events: Events,
    stack: AsyncExitStack,
    tell: Callable[[str], None] = print,
    placement: Placement = NOWHERE,
    seats: AssignDevices | None = None,
) -> tuple[EnginePool, EpisodeRunner, Renderer]:
    """Engines, on `seats` or where they are placed, and what runs episodes on them; what is to be closed in the end is left to
    `stack`."""
    renderer = Renderer(model)
    seats = seats or device_assigner(cluster, config, "engine")
    prefers = {task.name: task.prefers for task in config.tasks if task.prefers}
    starter = EngineStarter(cluster, "engine", model, config.engine, config.weights.channel, seats)
    pool, longest = await start_engines(starter, config.rollout, deadlines, events, tell, prefers)
    episodes = EpisodeRunner(
        tokenizer=renderer,
        generate=pool.generate,
        grade=grading.score,
        environments=dict(_environments(cluster, placement, config)),
        agents=await _start_agents(pool, renderer, longest, config, deadlines, stack),
        config=config.rollout,
        max_length=longest,
        seed=config.seed,
    )
    return pool, episodes, renderer


def make_group_scorer(
    episodes: EpisodeRunner, grading: RewardRouter, config: RunConfig, deadlines: Deadlines
) -> GroupScoring | None:
    """What plays the attempts of tasks whose siblings are judged together, and all others, if there are such tasks."""
    rollout, tasks = config.rollout, config.judged_together
    if not tasks:
        return None
    longest = rollout.timeout + config.learner.timeout + config.weights.timeout  # a step may come in between
    return GroupScoring(episodes, grading.score_group, tasks, rollout.group_size, deadlines, longest)


async def start_rollout_workers(
    cluster: Cluster,
    model: Path,
    config: RunConfig,
    life: RunLineage,
    deadlines: Deadlines,
    events: Events,
    tell: Callable[[str], None],
) -> RolloutWorkers:
    """Rollout workers, each with its share of the engines, which it starts with `start_rollouts`."""
    share = config.engine.replicas // config.rollout.workers
    own = config.model_copy(update={"engine": config.engine.model_copy(update={"replicas": share})})
    serials = itertools.count()

    async def start(number: int) -> RolloutWorker:
        seat_of = device_assigner(cluster, config, "engine", number * share)
        try:
            seats = [seat_of(engine) for engine in range(share)]
        except ConfigError as error:  # at the start it could be placed: a node has left since
            raise WorkerDied(f"rollout worker {number} has nowhere to run: {error}") from error
        at = seats[0].place
        place = at and replace(at, cores=(), gpus=gpus_of(seat.place for seat in seats))
        serial = next(serials)
        name = f"rollout-{serial}"
        args = (serial, str(model), own, seats, life, events.enabled)
        handle = cluster.spawn(name, ROLLOUT_WORKER, *args, place=place)
        shard = RolloutWorker(handle, number, events, tell)
        try:
            await shard.started()
        except BaseException:  # it is nobody's, and hangs perhaps
            shard.kill()
            raise
        return shard

    ready = asyncio.gather(*map(start, range(config.rollout.workers)))
    on, deadline, key = "rollout workers to start their engines", config.rollout.timeout, "rollout.timeout"
    shards = await deadlines.wait(ready, name="start", owner="run", on=on, deadline=deadline, key=key)
    return RolloutWorkers(shards, deadlines, config.rollout, start=start, on_loss=tell)


async def _start_agents(
    pool: EnginePool, renderer: Renderer, longest: int, config: RunConfig, deadlines: Deadlines, stack: AsyncExitStack
) -> dict[str, RunAgent]:
    """What plays the attempts of each task that has an agent: all of them ask at one gateway."""
    tasks = {task.name: task.agent for task in config.tasks if task.agent is not None}
    if not tasks:
        return {}
    answering = ServedModel(
        generate=pool.generate, tokenizer=renderer, max_length=longest, tools=config.rollout.tool_format
    )
    gateway = await stack.enter_async_context(Gateway(answering, seed=config.seed))
    rooms: RuntimeDirs | None = None
    if any(agent.command and not agent.unconfined for agent in tasks.values()):
        rooms = RuntimeDirs()
        stack.callback(rooms.close)
    found: dict[str, RunAgent] = {}
    for name, settings in tasks.items():
        agent: Agent
        if settings.function:
            agent = FunctionAgent(import_path(settings.function, "agent"))
        else:
            box = BoxConfig(image=settings.image, network=settings.network)
            own = None if settings.unconfined else rooms
            agent = command_agent(
                settings.command, rooms=own, deadlines=deadlines, config=box, unconfined=settings.unconfined
            )
        found[name] = partial(run_agent, agent, gateway, seconds=settings.seconds)
    return found


def _environments(
    cluster: Cluster, placement: Placement, config: RunConfig
) -> Iterator[tuple[str, EnvironmentFactory]]:
    """What makes the environments of each task that has some: here, or in processes if they block."""
    for task in config.tasks:
        if task.environment:
            make: EnvironmentFactory = environment_factory(task.environment, task.environment_options)
            if is_blocking(task.environment) and not config.rollout.deterministic:
                placed = "environment" in placement.places
                seat_of = (
                    device_assigner(cluster, config, "environment") if placed else lambda number: DeviceAssignment()
                )
                make = EnvironmentPool(task.environment_pool, _spawn_hosts(cluster, seat_of, task)).make
            yield task.name, make


def _spawn_hosts(cluster: Cluster, seat_of: AssignDevices, task: TaskConfig) -> Callable[[], WorkerHandle]:
    numbers = itertools.count()
    factory = "antiphon.tasks.environments.host:EnvironmentHost"

    def spawn() -> WorkerHandle:
        name = f"environment-{task.name}-{next(numbers)}"
        try:
            place = seat_of(0).place
        except ConfigError as error:  # its node has left
            raise SandboxError(f"{name} has nowhere to run: {error}") from error
        return cluster.spawn(name, factory, task.environment, task.environment_options, place=place)

    return spawn


class ModelBuilder(Worker):
    """Runs the user's function that writes a model, so that what it imports stays out of the controller."""

    def build(self, path: str, target: Path, seed: int) -> None:
        """Call package.module:function with (target, seed)."""
        import_path(path, "model")(target, seed)


async def model_directory(cluster: Cluster, path: str, target: Path, seed: int, *, weights: bool = True) -> Path:
    """Where the model lies: `path` itself, what package.module:function writes to `target`, or a download of a Hugging
    Face id. `DataError` if there are no `weights`; where none are needed, none are downloaded."""
    found = Path(path)
    if ":" in path and not found.is_dir():
        builder = cluster.spawn("model", f"{__name__}:{ModelBuilder.__name__}")
        await builder.call("build", path, target, seed)
        await builder.close()
        found = target
    elif not found.is_dir():
        found = _download(path, weights)
    if weights:
        check_weights(found)
    return found


def _download(path: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=None if weights else ["*.json", "*.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"model {path!r} is no local directory, and cannot be downloaded: {type(error).__name__}"
        ) from error

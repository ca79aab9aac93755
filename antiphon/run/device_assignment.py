"""Where engines run, and how each is started there: on the devices of its seat, or on a server that runs already."""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from antiphon.cluster.base import Cluster, Node, Place
from antiphon.cluster.placement import ANYWHERE, BESIDE, GENERATING, TRAINING, Placement, resolve
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, StallError, WorkerDied
from antiphon.engines.base import ENGINES, InferenceEngine
from antiphon.engines.config import PARALLEL_SIZES, PREALLOCATING_KINDS, EngineConfig
from antiphon.engines.remote_engine import RemoteEngine
from antiphon.engines.server import ServerEngine
from antiphon.rollout.engine_supervisor import Scaling
from antiphon.run.config import RunConfig
from antiphon.run.model_files import model_shape

LOOPBACK = "127.0.0.1"
ENGINE_WORKER = "antiphon.engines.worker:EngineWorker"


def resolve_placement(nodes: Sequence[Node], config: RunConfig, *, least: int | None = None) -> Placement:
    """What the run's placement comes to on these machines, the controller's first. `ConfigError` where it cannot be. Of the
    engines at `least` so many must have their devices; by default, as many as the run begins with."""
    if not config.placement.roles:
        return Placement()
    kinds = config.engine.engine_kinds
    least = (config.engine.minimum or len(kinds)) if least is None else least
    judges = sum(task.judge.replicas for task in config.tasks if task.judge is not None)
    one_a_place = {role: count * config.learner_of(role).mesh.world for role, count in config.counts.items()}
    engines = {"engine": len(kinds), "judge": judges}
    patient: tuple[str, ...] = ("engine",) if least < len(kinds) else ()
    if not least:  # somebody asks what there is now: what others have lost is theirs to notice
        patient += GENERATING + BESIDE
    found = resolve(config.placement, nodes, one_a_place | engines, patient)
    threads = dict.fromkeys(one_a_place, config.learner.threads) | dict.fromkeys(
        engines, max(kind.threads for kind in kinds)
    )
    for role in found.places:
        places = found.there(role)
        cores = min((len(place.cores) or math.inf for place in places), default=math.inf)
        if threads.get(role, 0) > cores and not any(place.gpus for place in places):
            raise ConfigError(f"{threads[role]} threads are more than its {cores:g} cores", key=f"placement.{role}")
    _check_meetings(config, found)
    beside = Place(node=nodes[0].id)  # the controller
    _check_engines(config, found, least, beside)
    _check_devices(config, found)
    if config.rollout.workers:
        _check_trainer(found, beside)
    if (reward := found.place("reward")) is not None and reward.node != beside.node:
        raise ConfigError("rewards run beside the controller, on node0", key="placement.reward")
    _check_graders(config, reward)
    return found


def _check_graders(config: RunConfig, reward: Place | None) -> None:
    """`ConfigError` if rewards have GPUs that no process would ever see."""
    own = [task.grading for task in config.tasks if task.grading is not None]
    pools = own + [config.grading] * (len(own) < len(config.tasks))
    processes = sum(max(pool.workers, pool.max_workers) for pool in pools)
    if reward is not None and len(reward.gpus) > processes:
        raise ConfigError(
            f"{len(reward.gpus)} GPUs are more than the {processes} processes that grade at most (workers, "
            "max_workers in grading), each of which sees one",
            key="placement.reward",
        )


def _check_meetings(config: RunConfig, found: Placement) -> None:
    """`ConfigError` unless the ranks of each model reach each other."""
    for role in TRAINING:
        places, ranks = found.there(role), config.learner_of(role).mesh.world
        for number in range(0, len(places), ranks):
            nodes = {place.node for place in places[number : number + ranks]}
            if len(nodes) > 1 and config.weights.host == LOOPBACK:
                raise ConfigError(
                    f"the ranks of the {role} are on several nodes, and meet at an address of the first's: "
                    "127.0.0.1 is reached from that alone",
                    key="weights.host",
                )


def _check_engines(config: RunConfig, found: Placement, least: int, beside: Place) -> None:
    """`ConfigError` unless the engines are enough, of the classes that tasks prefer, and where weights reach them."""
    places = found.there("engine") if "engine" in found.places else [beside]
    if config.placement.engine not in ("", ANYWHERE) and len(places) < least:
        raise ConfigError(
            f"{len(places)} engines have their devices, and the run begins with {least} (engine.minimum)",
            key="placement.engine",
        )
    kinds = {place.kind for place in places}
    for index, task in enumerate(config.tasks):
        if task.prefers and task.prefers not in kinds and least == len(config.engine.engine_kinds):
            raise ConfigError(
                f"no engine is on {task.prefers}; there are {', '.join(sorted(kinds))}", key=f"tasks.{index}.prefers"
            )
    learner, channel = found.place("learner") or beside, config.weights.channel
    away = any(place.node != learner.node for place in places if not place.anywhere)
    if channel == "shared_memory" and not config.weights.directory and (away or learner.node != beside.node):
        raise ConfigError(
            "the shared memory of the controller's node (weights.channel) does not reach learner and engines "
            "on others: use object_store or distributed",
            key="placement.engine",
        )
    if channel == "distributed" and away and config.weights.host == LOOPBACK:
        raise ConfigError(
            "engines are on other nodes than the learner, which they ask for weights: 127.0.0.1 is reached from "
            "its own alone",
            key="weights.host",
        )
    elsewhere = any({*place.gpus} - {*learner.gpus} or (learner.gpus and not place.gpus) for place in places)
    if channel == "device_memory" and (away or elsewhere):
        raise ConfigError(
            "weights.channel device_memory is for engines on the learner's GPU (with learner), and some are "
            "on others: use shared_memory or distributed",
            key="placement.engine",
        )
    share = config.engine.replicas // (config.rollout.workers or 1)
    for number in range(config.rollout.workers):
        if len({place.node for place in places[number * share : (number + 1) * share]}) > 1:
            raise ConfigError(
                f"the {share} engines of rollout worker {number} are on several nodes, and a worker is on one",
                key="placement.engine",
            )


def _check_devices(config: RunConfig, found: Placement) -> None:
    """`ConfigError` unless each engine has as many GPUs as it runs on, and what shares devices can leave them."""
    on_gpus = any(place.gpus for role in found.places for place in found.there(role))
    if found.shared and (config.learner.kind == "megatron" or (config.learner.kind == "deepspeed" and on_gpus)):
        raise ConfigError(
            f"{config.learner.kind!r} does not leave its devices to engines: let nothing share them (placement)",
            key="learner.kind",
        )
    _check_lent(config, found)
    seated = zip(config.engine.engine_kinds, found.places.get("engine", ()), strict=False)  # one place is `anywhere`
    for engine, place in seated:
        if engine.kind in ENGINES.built_in and place and place.gpus and len(place.gpus) != engine.devices_per_engine:
            raise ConfigError(
                f"{len(place.gpus)} GPUs an engine, and each runs on {engine.devices_per_engine} "
                f"({', '.join(PARALLEL_SIZES)} in engine.options)",
                key="placement.engine",
            )
    for role in TRAINING:
        there, ranks = found.there(role), config.learner_of(role).mesh.world
        for number in range(0, len(there), ranks):
            own = [(place.node, place.gpus) for place in there[number : number + ranks] if place.gpus]
            if len({*own}) < len(own) or any(len(gpus) > 1 for _, gpus in own):
                raise ConfigError(
                    f"each of {ranks} ranks ({config.mesh_of(role)}) has one GPU, its own; they would have "
                    f"{', '.join(' + '.join(gpus) for _, gpus in own)}",
                    key=f"placement.{role}",
                )


def _check_lent(config: RunConfig, found: Placement) -> None:
    """`ConfigError` if an engine would sleep, on cores, that gives back its memory on GPUs only."""
    for role, numbers in found.lent.items():
        for number in numbers:
            kind = config.engine.engine_kinds[number].kind if role == "engine" else config.engine.kind
            place = found.places[role][number]
            if kind in PREALLOCATING_KINDS and place and not place.gpus:
                raise ConfigError(
                    f"engines of kind {kind!r} do not give back their memory on a CPU, and cannot share it "
                    "with what trains: give them other devices, or use engine.kind = native",
                    key=f"placement.{role}",
                )


def _check_trainer(found: Placement, beside: Place) -> None:
    """`ConfigError` unless all that the trainer starts is of one node."""
    home = (found.place("learner") or beside).node
    for role in TRAINING:
        if any(place.node != home for place in found.there(role)):
            raise ConfigError(
                "with rollout.workers all models that are trained or asked are on one node, that of the "
                "learner's first rank",
                key=f"placement.{role}",
            )


class DeviceAssignment(NamedTuple):
    """What an engine is given to run on."""

    place: Place | None = None
    lent: bool = False  # to what trains there


AssignDevices = Callable[[int], DeviceAssignment]  # of each engine, by its number


def device_assigner(cluster: Cluster, config: RunConfig, role: str, first: int = 0) -> AssignDevices:
    """The seats of a role's engines from `first` on, by their numbers from 0, on the nodes that there are when it is asked."""

    def seat(number: int) -> DeviceAssignment:
        placement = resolve_placement(cluster.nodes(), config, least=0)
        return DeviceAssignment(placement.place(role, first + number), placement.lends(role, first + number))

    return seat


Engine = RemoteEngine | ServerEngine
Turn = Callable[[], AbstractAsyncContextManager[None]]  # in which an engine may start on a device that is shared


class _NowhereError(WorkerDied):
    """The devices of a seat are not there."""


class EngineStarter:
    """Starts the engines of a pool that run the model in a directory."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        model: Path,
        config: EngineConfig,
        channel: str = "shared_memory",
        seat_of: AssignDevices = lambda number: DeviceAssignment(),
        idle_seconds: float = 0.0,
    ) -> None:
        """New weights, if there are any, come by `channel`. With `idle_seconds`, only `config.minimum` engines are wanted at
        first, and others start when they are needed and go when they have been idle for so long."""
        self._kinds = config.engine_kinds
        most = len(self._kinds)
        self._least = config.minimum or most
        self.wanted = self._least if idle_seconds else most
        self.scaling = Scaling(most, idle_seconds, self.close) if self.wanted < most else None
        self._cluster = cluster
        self._name = name
        self._names = (f"{name}-{number}" for number in itertools.count())
        self._model = model
        self._channel = channel
        self._seat_of = seat_of
        self._vocabulary = int(model_shape(model)["vocab_size"])
        self._seated: dict[int, Engine] = {}
        self.turn: Turn = nullcontext  # of a pool, once there is one

    async def first(self, deadlines: Deadlines, deadline: float, tell: Callable[[str], None]) -> list[Engine]:
        """As many as can be within `deadline` seconds, each on its seat. Raises what went wrong if those are too few."""

        def start(seat: int) -> Awaitable[Engine]:
            on = f"{self._name}-{seat} to load the model"
            return deadlines.wait(
                self._start(seat), name="start", owner="run", on=on, deadline=deadline, key="rollout.timeout"
            )

        some = self._least < self.wanted
        begun = await asyncio.gather(*map(start, range(self.wanted)), return_exceptions=some)
        engines = [each for each in begun if not isinstance(each, BaseException)]
        for error in (each for each in begun if isinstance(each, BaseException)):
            if not isinstance(error, WorkerDied | StallError) or len(engines) < self._least:
                raise error
            tell(f"the run begins with {len(engines)} of {self.wanted} engines: {error}")
        return engines

    async def another(self) -> Engine:
        """On the first free seat on which one can be. `WorkerDied` if there is none."""
        lost = WorkerDied(f"{self._name}: no seat is free")
        for seat in range(len(self._kinds)):
            if seat not in self._seated or self._seated[seat].dead:
                try:
                    return await self._start(seat)
                except WorkerDied as error:
                    if self._kinds[seat].server_options is None and not isinstance(error, _NowhereError):
                        raise  # it died as it started, which somebody is to hear of
                    lost = error
        raise lost

    async def close(self, engine: InferenceEngine) -> None:
        """End one that has left its pool; its seat is free then."""
        seat, made = next((seat, made) for seat, made in self._seated.items() if made is engine)
        if isinstance(made, RemoteEngine):  # servers are ended by who started them
            await made.close()
        del self._seated[seat]

    async def _start(self, seat: int) -> Engine:
        config = self._kinds[seat]
        if (servers := config.server_options) is not None:
            number = self._kinds[:seat].count(config)
            return await self._ready(seat, ServerEngine(servers, number, self._model, config, self._channel))
        place, lent = await self._reserved(seat)
        async with self.turn() if lent else nullcontext():
            args = (config.kind, str(self._model), config.with_sleep_mode if lent else config, self._channel)
            handle = self._cluster.spawn(next(self._names), ENGINE_WORKER, *args, python=config.python, place=place)
            return await self._ready(seat, RemoteEngine(handle, colocated=lent, device=place.kind if place else ""))

    async def _ready(self, seat: int, made: Engine) -> Engine:
        self._seated[seat] = made
        try:
            await made.ready()
        except BaseException:  # it is nobody's, and hangs perhaps
            made.kill()
            del self._seated[seat]
            raise
        if made.vocabulary != self._vocabulary:
            kind = self._kinds[seat].kind
            raise ConfigError(
                f"{self._name}-{seat} ({kind}) has a vocabulary of {made.vocabulary:,} tokens, and the "
                f"model at {self._model} one of {self._vocabulary:,}: what it samples could not be trained on",
                key="engine.kind",
            )
        return made

    async def _reserved(self, seat: int) -> DeviceAssignment:
        try:
            found = self._seat_of(seat)
            await self._cluster.reserve([found.place] if found.place else [])
        except ConfigError as error:  # a node has left, or has not come yet
            raise _NowhereError(f"{self._name}-{seat} has nowhere to run: {error}") from error
        return found

"""The devices of each role of a run, and checks that the run works on them."""

import math
from collections.abc import Sequence

from antiphon.cluster.base import Node, Place
from antiphon.cluster.placement import (
    ALWAYS_RUNNING,
    ANYWHERE,
    GENERATING,
    TRAINING,
    Placement,
    assign_devices,
    placement_key,
)
from antiphon.core.errors import ConfigError
from antiphon.core.types import OnUpdate
from antiphon.engines.base import ENGINES
from antiphon.engines.config import PARALLEL_SIZES, PREALLOCATING_KINDS
from antiphon.run.config import RunConfig

LOOPBACK = "127.0.0.1"


def resolve_placement(nodes: Sequence[Node], config: RunConfig, *, least: int | None = None) -> Placement:
    """Return the devices of each role of a run on the given machines.

    Args:
        nodes: The machines, the controller's first.
        config: The run's configuration.
        least: Number of engines that must have their devices; by default, as many as the run begins with. 0 places
            whatever can be placed now.

    Raises:
        ConfigError: The placement is impossible.
    """
    if not config.placements:
        return Placement()
    kinds = config.engine.engine_kinds
    least = (config.engine.minimum or len(kinds)) if least is None else least
    judges = sum(task.judge.replicas for task in config.tasks if task.judge is not None)
    model_ranks = {role: count * config.learner_of(role).mesh.world for role, count in config.counts.items()}
    engines = {"engine": len(kinds), "judge": judges}
    reward_models = {"reward_model": sum(model.workers for model in config.classifiers)}
    optional: tuple[str, ...] = ("engine",) if least < len(kinds) else ()
    if not least:  # the lost devices of other roles are noticed by those who use them
        optional += GENERATING + ALWAYS_RUNNING + tuple(f"roles.{name}" for name in config.roles)
    own = {f"roles.{name}": role.workers for name, role in config.roles.items()}
    found = assign_devices(config.placements, nodes, model_ranks | engines | reward_models | own, optional)
    threads = dict.fromkeys(model_ranks, config.learner.threads) | dict.fromkeys(
        engines, max(kind.threads for kind in kinds)
    )
    for role in found.places:
        places = found.known_places(role)
        cores = min((len(place.cores) or math.inf for place in places), default=math.inf)
        if threads.get(role, 0) > cores and not any(place.gpus for place in places):
            raise ConfigError(f"{threads[role]} threads are more than its {cores:g} cores", key=placement_key(role))
    for role in TRAINING:
        ranks = config.learner_of(role).mesh.world
        check_ranks_apart(role, found.known_places(role), ranks, config.weights.host, "weights.host")
    beside = Place(node=nodes[0].id)  # the controller
    _check_engines(config, found, least, beside)
    _check_devices(config, found)
    if config.rollout.workers:
        _check_trainer_node(found, beside)
    _check_graders(config, found.known_places("reward"))
    _check_environments(config, found.known_places("environment"))
    return found


def _check_graders(config: RunConfig, places: Sequence[Place]) -> None:
    """Raise `ConfigError` if rewards have GPUs on a node that no process there would ever see."""
    own = [task.grading for task in config.tasks if task.grading is not None]
    pools = own + [config.grading] * (len(own) < sum(not task.route for task in config.tasks))
    processes = sum(max(pool.workers, pool.max_workers) for pool in pools)
    most = max((len(place.gpus) for place in places), default=0)
    if most > processes:
        raise ConfigError(
            f"{most} GPUs on one node are more than the {processes} processes that grade there at most (workers, "
            "max_workers in grading), each of which sees one",
            key="placement.reward",
        )


def _check_environments(config: RunConfig, places: Sequence[Place]) -> None:
    """Raise `ConfigError` if no process of an environment would ever run on some of the nodes."""
    if config.placement.environment == ANYWHERE:
        return
    pools = [task.environment_pool for task in config.tasks if task.environment]
    processes = sum(max(pool.workers, pool.max_workers) for pool in pools)
    if pools and len(places) > processes:
        raise ConfigError(
            f"{len(places)} nodes are more than the {processes} processes that environments have at most (workers, "
            "max_workers in environment_pool)",
            key="placement.environment",
        )


def check_ranks_apart(role: str, places: Sequence[Place], ranks: int, host: str, host_key: str) -> None:
    """Raise `ConfigError` unless the ranks of each model reach each other, and each has one GPU of its own or none.

    Args:
        role: Role of the models.
        places: Places of all ranks.
        ranks: Number of ranks of a model.
        host: Address at which the ranks of a model meet.
        host_key: Key of that address.
    """
    for number in range(0, len(places), ranks):
        own = places[number : number + ranks]
        if len({place.node for place in own}) > 1 and host == LOOPBACK:
            raise ConfigError(
                f"the ranks of the {role} are on several nodes, and meet at an address of the first's: "
                "127.0.0.1 is reached from that alone",
                key=host_key,
            )
        gpus = [(place.node, place.gpus) for place in own if place.gpus]
        if len({*gpus}) < len(gpus) or any(len(each) > 1 for _, each in gpus):
            raise ConfigError(
                f"each of {ranks} ranks has one GPU, its own; they would have "
                f"{', '.join(' + '.join(each) for _, each in gpus)}",
                key=placement_key(role),
            )


def _check_engines(config: RunConfig, found: Placement, least: int, beside: Place) -> None:
    """Raise `ConfigError` unless the engines are enough, of the classes that tasks prefer, and where weights reach them."""
    places = found.known_places("engine") if "engine" in found.places else [beside]
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
    apart = len({place.node for place in found.known_places("learner")}) > 1
    if channel == "shared_memory" and not config.weights.directory and apart and config.weight_senders == "all":
        raise ConfigError(
            "ranks of the learner are on several nodes, and the shared memory of one (weights.channel) does not reach "
            "engines on another: use object_store or distributed",
            key="weights.senders",
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
    """Raise `ConfigError` unless each engine has as many GPUs as it runs on, and engines that share devices can leave them."""
    _check_colocated(config, found)
    placed = zip(config.engine.engine_kinds, found.places.get("engine", ()), strict=False)  # one place is `anywhere`
    for engine, place in placed:
        if engine.kind in ENGINES.shipped and place and place.gpus and len(place.gpus) != engine.devices_per_engine:
            raise ConfigError(
                f"{len(place.gpus)} GPUs an engine, and each runs on {engine.devices_per_engine} "
                f"({', '.join(PARALLEL_SIZES)} in engine.options)",
                key="placement.engine",
            )


def _check_colocated(config: RunConfig, found: Placement) -> None:
    """Raise `ConfigError` if an engine would sleep, on cores, that gives back its memory on GPUs only.

    Or if it would have to restart or finish, when it loads weights, requests that it has put aside to sleep.
    """
    mode = config.rollout.on_update
    if found.time_shared.get("engine") and config.rollout.async_ratio and mode in (OnUpdate.RESTART, OnUpdate.DRAIN):
        raise ConfigError(
            f"{mode.value!r} is not possible for engines on the learner's devices: their requests are interrupted while it "
            "trains, and go on from their tokens. Use keep or recompute, or give engines other devices (placement.engine)",
            key="rollout.on_update",
            value=mode.value,
        )
    for role, numbers in found.time_shared.items():
        for number in numbers:
            kind = config.engine.engine_kinds[number].kind if role == "engine" else config.engine.kind
            place = found.places[role][number]
            if kind in PREALLOCATING_KINDS and place and not place.gpus:
                raise ConfigError(
                    f"engines of kind {kind!r} do not give back their memory on a CPU, and cannot share it "
                    "with what trains: give them other devices, or use engine.kind = native",
                    key=placement_key(role),
                )


def _check_trainer_node(found: Placement, beside: Place) -> None:
    """Raise `ConfigError` unless all that the trainer starts is of one node."""
    home = (found.place("learner") or beside).node
    for role in TRAINING:
        if any(place.node != home for place in found.known_places(role)):
            raise ConfigError(
                "with rollout.workers all models that are trained or asked are on one node, that of the "
                "learner's first rank",
                key=placement_key(role),
            )

"""Parses the placement of a run's roles and assigns the devices of the available nodes to their workers.

    gpu:0-7             GPUs number 0 to 7, counted through all nodes; gpu:3 is one of them
    node2.gpu:0-3       GPUs of one node; nodes count from node0, the controller's
    h800:0-31           like gpu, counting only GPUs of one class
    cpu:0-3, cpu:6-6    cores, by their numbers
    cpu:16              that many cores that no other role asks for
    with learner        the devices of another role
    anywhere            any node of the cluster

Several parts are separated by commas. The devices of a role are divided evenly among its workers, in order; those of rewards
and environments are one place on each node, which all of their processes there share.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from antiphon.cluster.base import Node, Place
from antiphon.cluster.config import ROLES
from antiphon.core.errors import ConfigError

CPU, GPU = "cpu", "gpu"
ANYWHERE = "anywhere"
NOWHERE = -1  # the node of missing devices
TRAINING = ("learner", "reference", "critic", "teacher")  # take their turn together
GENERATING = ("engine", "judge")  # sleep during training where they share devices with it
ALWAYS_RUNNING = ("environment", "reward", "reward_model")  # run all the time, whichever roles have their turn
BY_NODE = ("environment", "reward")  # have one place on each node, which all of their processes there share

_PART = re.compile(r"(?:node(\d+)\.)?([a-z][a-z0-9_-]*):(\d+)(?:-(\d+))?")


def placement_key(role: str) -> str:
    """Return the key of the placement of a role, or of one of the user's own."""
    return f"placement.{role}" if role in ROLES else f"{role}.placement"


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """A GPU or a core of a node."""

    node: int
    kind: str  # CPU or GPU
    number: int  # on its node: number of the core, or index of the GPU

    def __str__(self) -> str:
        return f"node{self.node}.{self.kind}:{self.number}"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a role's placement."""

    node: int | None
    kind: str  # CPU, GPU or a class of GPUs
    first: int
    last: int  # inclusive
    count: int = 0  # number of cores to choose freely; then first and last mean nothing

    def __str__(self) -> str:
        where = "" if self.node is None else f"node{self.node}."
        return f"{where}{self.kind}:{self.count or f'{self.first}-{self.last}'}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Places of the workers of each role. The cluster places the workers of other roles."""

    places: Mapping[str, tuple[Place | None, ...]] = field(
        default_factory=dict
    )  # one for each worker; None: its devices are missing
    time_shared: Mapping[str, frozenset[int]] = field(default_factory=dict)  # workers that sleep during training

    def place(self, role: str, number: int = 0) -> Place | None:
        """Return the place of one worker; None if the role has none. Raise `ConfigError` if its devices are missing."""
        if not (places := self.places.get(role)):
            return None
        if (found := places[number % len(places)]) is None:
            raise ConfigError(f"the devices of its worker {number} are missing", key=placement_key(role), value=number)
        return found

    def known_places(self, role: str) -> list[Place]:
        """Return the places of a role's workers that have devices."""
        return [place for place in self.places.get(role, ()) if place is not None]

    def shares_devices(self, role: str, number: int) -> bool:
        """Return True if a worker shares a device with a training role."""
        return number in self.time_shared.get(role, ())

    @property
    def training_gpus(self) -> tuple[str, ...]:
        """GPUs of all training roles; only meaningful if they are on one node."""
        return gpus_of(place for role in TRAINING for place in self.known_places(role))

    @property
    def shared(self) -> bool:
        """True if a generating role shares a device with a training role."""
        return any(self.time_shared.values())


def gpus_of(places: Iterable[Place | None]) -> tuple[str, ...]:
    """Return the distinct GPUs of places on one node."""
    return tuple(dict.fromkeys(gpu for place in places if place for gpu in place.gpus))


def parse_devices(text: str) -> list[Part]:
    """Parse the placement of a role that has devices of its own; raise `ConfigError` with the valid forms."""
    return [_parse_part(part.strip()) for part in text.split(",")]


def _parse_part(text: str) -> Part:
    match = _PART.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} names no devices; valid are gpu:0-7, node2.gpu:0-3, h800:0-31 (a class of GPUs), cpu:0-3 (these "
            "cores), cpu:16 (any sixteen cores), 'with learner' and 'anywhere'",
            value=text,
        )
    node, kind, first, last = match.groups()
    low, high = int(first), int(last if last is not None else first)
    if high < low:
        raise ConfigError(f"{text!r} ends before it begins", value=text)
    if kind == CPU and last is None:
        if low == 0:
            message = f"{text!r} asks for no core; core number 0 is cpu:0-0, and any one core is cpu:1"
            raise ConfigError(message, value=text, suggestions=("cpu:0-0", "cpu:1"))
        return Part(int(node) if node else None, kind, 0, 0, count=low)
    return Part(int(node) if node else None, kind, low, high)


def find_problems(roles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the errors of a placement of roles that hold on any machine, as (role, message)."""
    for role, text in roles.items():
        try:
            if (other := parse_shared_role(text)) is None:
                if text != ANYWHERE:
                    parse_devices(text)
            elif other not in ROLES:
                yield role, f"{text!r}: there is no role {other!r}; valid are {', '.join(ROLES)}"
            elif parse_shared_role(roles.get(other, ANYWHERE)) is not None or other not in roles:
                yield role, f"{text!r}: {other} must have devices of its own"
        except ConfigError as error:
            yield role, str(error)


def parse_shared_role(text: str) -> str | None:
    """Return the role whose devices are to be shared, if any."""
    return text.removeprefix("with ").strip() if text.startswith("with ") else None


def assign_devices(
    roles: Mapping[str, str], nodes: Sequence[Node], workers: Mapping[str, int], patient: Collection[str] = ()
) -> Placement:
    """Assign devices of the nodes to the workers of each role.

    Args:
        roles: The placement of each role.
        nodes: The available nodes, the controller's first.
        workers: Number of workers of each role. A role that is not listed has one place with all its devices.
        patient: Roles whose devices may be missing for now.

    Raises:
        ConfigError: The placement does not fit; the message names role, device and conflict.
    """
    asked = {role: text for role, text in roles.items() if text != ANYWHERE}
    devices = _resolve_devices(asked, nodes, patient)
    _refuse_conflicts(devices)
    places = {
        role: tuple(_assign_places(role, _share_devices(role, found, workers.get(role, 0)), nodes))
        if workers.get(role) != 0
        else ()
        for role, found in devices.items()
    }
    training = {device for role in TRAINING for device in devices.get(role, ())}
    time_shared = {
        role: frozenset(
            number
            for number, share in enumerate(_split_devices(devices[role], workers.get(role, 0)))
            if training & {*share}
        )
        for role in GENERATING
        if role in devices
    }
    everywhere = tuple(Place(node=node.id) for node in nodes if not node.has_left)
    anywhere = {
        role: everywhere if role in BY_NODE else (Place(anywhere=True),)
        for role, text in roles.items()
        if text == ANYWHERE
    }
    return Placement(places | anywhere, time_shared)


def _resolve_devices(
    asked: Mapping[str, str], nodes: Sequence[Node], patient: Collection[str]
) -> dict[str, list[Device]]:
    """Return the devices of each role. Numbered devices are assigned before freely chosen cores."""
    parts = {role: parse_devices(text) for role, text in asked.items() if parse_shared_role(text) is None}
    found: dict[str, list[Device]] = {
        role: [
            device
            for part in role_parts
            if not part.count
            for device in _numbered_devices(role, part, nodes, role in patient)
        ]
        for role, role_parts in parts.items()
    }
    taken = {device for devices in found.values() for device in devices}
    for role, role_parts in parts.items():
        for part in role_parts:
            if part.count:
                free = _free_cores(role, part, nodes, taken)
                taken |= {*free}
                found[role] += free
    return {role: found[parse_shared_role(text) or role] for role, text in asked.items()}


def _numbered_devices(role: str, part: Part, nodes: Sequence[Node], patient: bool) -> list[Device]:
    chosen: Sequence[int] = range(len(nodes)) if part.node is None else [part.node]
    if part.node is not None and part.node >= len(nodes):
        chosen = ()
        if not patient:
            name = f"node{part.node}"
            message = f"there is no {name}; there are {_describe_nodes(nodes)}"
            raise ConfigError(message, key=placement_key(role), value=name)
    if part.kind == CPU:
        there = [Device(node, CPU, core) for node in chosen for core in nodes[node].cores]
        found = [device for device in there if part.first <= device.number <= part.last]
        if part.node is None:  # core numbers repeat from node to node
            found = [device for device in found if device.node == 0]
    else:
        there = [
            Device(node, GPU, place)
            for node in chosen
            for place, gpu in enumerate(nodes[node].gpus)
            if part.kind in (GPU, gpu.kind)
        ]
        found = there[part.first : part.last + 1]
    missing = part.last - part.first + 1 - len(found)
    if not patient and (missing or any(nodes[device.node].has_left for device in found)):
        message = f"{part} exceeds the available devices: {_describe_nodes(nodes)}"
        raise ConfigError(message, key=placement_key(role), value=str(part))
    there = [replace(device, node=NOWHERE) if nodes[device.node].has_left else device for device in found]
    return there + [Device(NOWHERE, part.kind, number) for number in range(missing)]


def _free_cores(role: str, part: Part, nodes: Sequence[Node], taken: set[Device]) -> list[Device]:
    """Return cores that no role has, all of one node if one has enough."""
    chosen = range(len(nodes)) if part.node is None else [part.node]
    chosen = [node for node in chosen if not nodes[node].has_left]
    free = [[d for core in nodes[node].cores if (d := Device(node, CPU, core)) not in taken] for node in chosen]
    enough = next((cores for cores in free if len(cores) >= part.count), [device for cores in free for device in cores])
    if len(enough) < part.count:
        raise ConfigError(
            f"of the {part.count} cores of {part} other roles leave {len(enough)}; there are {_describe_nodes(nodes)}",
            key=placement_key(role),
            value=str(part),
        )
    return enough[: part.count]


def _refuse_conflicts(devices: Mapping[str, Sequence[Device]]) -> None:
    engine, judge = (devices.get(role, ()) for role in GENERATING)
    if both := sorted(device for device in {*engine} & {*judge} if device.node != NOWHERE):
        raise ConfigError(
            f"{both[0]} is also the engines', and both generate at the same time: only training roles take turns with "
            "generating ones",
            key="placement.judge",
            value=str(both[0]),
        )
    if gpus := [device for device in devices.get("environment", ()) if device.kind == GPU]:
        message = f"{gpus[0]} cannot be used: environments run on cores"
        raise ConfigError(message, key="placement.environment", value=str(gpus[0]))
    for grading in [role for role in devices if role not in (*TRAINING, *GENERATING, "environment")]:
        gpus_of_it = {device for device in devices.get(grading, ()) if device.kind == GPU and device.node != NOWHERE}
        for role in (*TRAINING, *GENERATING):
            if both := sorted(gpus_of_it & {*devices.get(role, ())}):
                message = f"{both[0]} is also used by {role}, and only models take turns: give it GPUs of its own"
                raise ConfigError(message, key=placement_key(grading), value=str(both[0]))


def _split_devices(devices: Sequence[Device], workers: int) -> list[Sequence[Device]]:
    """Return the devices of each worker. Workers share a device if there are more workers than devices."""
    if not workers:
        return [devices]
    if workers > len(devices):
        return [[devices[number * len(devices) // workers]] for number in range(workers)]
    size = len(devices) // workers
    return [devices[number * size : (number + 1) * size] for number in range(workers)]


def _share_devices(role: str, devices: Sequence[Device], workers: int) -> list[Sequence[Device]]:
    """Return the devices of each worker of a role, or of each node."""
    if role in BY_NODE:
        at = dict.fromkeys(device.node for device in devices)
        return [[device for device in devices if device.node == node] for node in at]
    more, fewer = max(len(devices), workers), min(len(devices), workers) or 1
    if more % fewer:
        message = f"{len(devices)} devices cannot be divided evenly among {workers} workers"
        raise ConfigError(message, key=placement_key(role), value=len(devices))
    return _split_devices(devices, workers)


def _assign_places(role: str, shares: Iterable[Sequence[Device]], nodes: Sequence[Node]) -> Iterator[Place | None]:
    for share in shares:
        at = {device.node for device in share}
        if NOWHERE in at:
            yield None
            continue
        if len(at) > 1:
            names = ", ".join(map(str, share))
            message = f"{names} would belong to one worker, which cannot use {len(at)} nodes"
            raise ConfigError(message, key=placement_key(role), value=names)
        node = nodes[share[0].node]
        yield Place(
            node=node.id,
            cores=tuple(device.number for device in share if device.kind == CPU),
            gpus=tuple(node.gpus[device.number].id for device in share if device.kind == GPU),
            kind=next((node.gpus[device.number].kind for device in share if device.kind == GPU), CPU),
        )


def _describe_nodes(nodes: Sequence[Node]) -> str:
    """Return a description of all nodes for an error."""
    return "; ".join(f"node{number} with {node}" for number, node in enumerate(nodes))

"""Devices that are not here: what their makers publish, and clusters that are drawn of them."""

import math
from dataclasses import dataclass

from antiphon.cluster.base import Gpu, Node
from antiphon.cluster.placement import ANYWHERE, CPU, Part, Placement, companion, parse
from antiphon.core.errors import ConfigError
from antiphon.run.config import RunConfig
from antiphon.run.placement import resolve_placement

NODE = 8  # GPUs of a node
CORES = 128  # of a node
SUSTAINED = 0.8  # of a published number of bytes a second; an assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What limits a device. Of operations a model reaches `sizes.EFFICIENCY`; bytes a second are those that are reached."""

    operations: float  # floating-point, a second
    read: float  # bytes a second, of its memory
    memory: float = math.inf  # bytes
    link: float = math.inf  # bytes a second, each way, to others of its node
    network: float = math.inf  # bytes a second, each way, to those of other nodes

    def rate(self, ranks: int) -> float:
        """Bytes a second to the farthest of so many neighbours."""
        return self.link if ranks <= NODE else self.network


def _published(tera: float, gigabytes: float, read: float, link: float, network: float) -> Device:
    """Dense bfloat16 operations in 1e12 a second, memory in 1e9 bytes, and 1e9 bytes a second."""
    read, link, network = (1e9 * SUSTAINED * rate for rate in (read, link, network))
    return Device(operations=1e12 * tera, memory=1e9 * gigabytes, read=read, link=link, network=network)


DEVICES = {
    "a100": _published(312, 80, 2039, 300, 25),
    "h20": _published(148, 96, 4000, 450, 50),
    "h100": _published(989, 80, 3350, 450, 50),
    "h200": _published(989, 141, 4800, 450, 50),
    "h800": _published(989, 80, 3350, 200, 50),
    "b200": _published(2250, 180, 7700, 900, 50),
}
"""From NVIDIA's data sheets of the SXM and HGX forms: dense bfloat16 (half of what is given with sparsity), memory, and half of
NVLink's bandwidth, which counts both ways. The network is that of NVIDIA's own nodes: 200 (a100) or 400 Gb/s a GPU."""


def find_device(name: str) -> Device:
    """The device of that name. `ConfigError` lists those that are known."""
    if name not in DEVICES:
        raise ConfigError(f"--device {name!r} is not known; there are {', '.join(DEVICES)}")
    return DEVICES[name]


def resolve_on_devices(config: RunConfig, kind: str) -> Placement:
    """What the run's placement comes to on nodes of eight GPUs of this kind, as many as it asks for. `ConfigError` where the
    run would be refused on them."""
    texts = (text for text in config.placement.roles.values() if companion(text) is None and text != ANYWHERE)
    count = max((_nodes(part) for text in texts for part in parse(text)), default=1)
    gpus = tuple(Gpu(str(number), kind) for number in range(NODE))
    return resolve_placement([Node(f"node{number}", tuple(range(CORES)), gpus) for number in range(count)], config)


def _nodes(part: Part) -> int:
    """That a part of a placement asks for."""
    if part.node is not None:
        return part.node + 1
    return 1 if part.kind == CPU else part.last // NODE + 1

"""Devices that are not on this machine: their published limits, and clusters of them."""

import math
from dataclasses import dataclass

from antiphon.cluster.base import Gpu, Node
from antiphon.cluster.placement import ANYWHERE, CPU, Part, Placement, parse_devices, parse_shared_role
from antiphon.core.errors import ConfigError
from antiphon.run.config import RunConfig
from antiphon.run.placement import resolve_placement

GPUS_PER_NODE = 8
CORES_PER_NODE = 128
SUSTAINED = 0.8  # share of a published bandwidth that is reached; an assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The limits of a device. A model reaches `speed_estimate.EFFICIENCY` of the operations; bandwidths are reached ones."""

    operations: float  # floating-point, a second
    read: float  # bytes a second, of its memory
    memory: float = math.inf  # bytes
    link: float = math.inf  # bytes a second, each way, to others of its node
    network: float = math.inf  # bytes a second, each way, to those of other nodes

    def rate(self, ranks: int) -> float:
        """Return the bytes a second between the farthest of `ranks` devices."""
        return self.link if ranks <= GPUS_PER_NODE else self.network


def _from_data_sheet(tera: float, gigabytes: float, read: float, link: float, network: float) -> Device:
    """Make a device from dense bfloat16 operations in 1e12 a second, memory in 1e9 bytes, and rates in 1e9 bytes a second."""
    read, link, network = (1e9 * SUSTAINED * rate for rate in (read, link, network))
    return Device(operations=1e12 * tera, memory=1e9 * gigabytes, read=read, link=link, network=network)


DEVICES = {
    "a100": _from_data_sheet(312, 80, 2039, 300, 25),
    "b200": _from_data_sheet(2250, 180, 7700, 900, 50),
    "h20": _from_data_sheet(148, 96, 4000, 450, 50),
    "h100": _from_data_sheet(989, 80, 3350, 450, 50),
    "h200": _from_data_sheet(989, 141, 4800, 450, 50),
    "h800": _from_data_sheet(989, 80, 3350, 200, 50),
    "l40s": _from_data_sheet(362, 48, 864, 32, 25),
    "rtx4090": _from_data_sheet(165.2, 24, 1008, 32, 1.25),
}
"""From NVIDIA's data sheets of the SXM and HGX forms: dense bfloat16 (half of the number with sparsity), memory, and half of
NVLink's bandwidth, which is given for both directions. The network is that of NVIDIA's own nodes: 200 (a100) or 400 Gb/s
a GPU. An L40S and an RTX 4090 are linked by PCIe 4.0; their network is taken to have 200 and 10 Gb/s."""


def find_device(name: str) -> Device:
    """Return the device of a name; raise `ConfigError` if it is not known."""
    if name not in DEVICES:
        message = f"{name!r} is not known; there are {', '.join(DEVICES)}"
        raise ConfigError(message, key="--device", value=name, valid=DEVICES)
    return DEVICES[name]


def resolve_on_devices(config: RunConfig, kind: str) -> Placement:
    """Resolve a run's placement on nodes of eight GPUs of a kind, as many nodes as it asks for.

    Raises:
        ConfigError: The run would be refused on them.
    """
    texts = (text for text in config.placement.roles.values() if parse_shared_role(text) is None and text != ANYWHERE)
    count = max((_count_nodes(part) for text in texts for part in parse_devices(text)), default=1)
    gpus = tuple(Gpu(str(number), kind) for number in range(GPUS_PER_NODE))
    return resolve_placement(
        [Node(f"node{number}", tuple(range(CORES_PER_NODE)), gpus) for number in range(count)], config
    )


def _count_nodes(part: Part) -> int:
    """Return the number of nodes that a part of a placement needs."""
    if part.node is not None:
        return part.node + 1
    return 1 if part.kind == CPU else part.last // GPUS_PER_NODE + 1

"""The seam between a run and the place its workers run in."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from antiphon.core.registry import Registry
from antiphon.core.workers import WorkerHandle

# Each is called with (ClusterConfig, folder of the workers' logs or None) and is a `Cluster`.
CLUSTERS = Registry(
    "cluster", {"local": "antiphon.cluster.local:LocalCluster", "ray": "antiphon.cluster.ray:RayCluster"}
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of a node."""

    id: str  # what CUDA_VISIBLE_DEVICES calls it there
    kind: str = ""  # its class in lower case, such as h800, where it is known


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that workers can be placed on."""

    id: str = ""  # what its cluster knows it by
    cores: tuple[int, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    has_left: bool = False  # what it had keeps its numbers, for when it is back

    def __str__(self) -> str:
        if self.has_left:
            return "nothing, as it has left"
        cores = f"{len(self.cores)} cores (cpu:{self.cores[0]}-{self.cores[-1]})" if self.cores else "no cores"
        return f"{cores} and {len(self.gpus)} GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one worker runs."""

    node: str = ""
    cores: tuple[int, ...] = ()  # that it is held to; none: all
    gpus: tuple[str, ...] = ()  # that it sees
    kind: str = ""  # the class of its devices: cpu, or that of its GPUs
    anywhere: bool = False  # on any node


class Cluster(Protocol):
    """Where workers run."""

    def nodes(self) -> Sequence[Node]:
        """The machines that workers can be placed on now; the controller's first."""

    async def reserve(self, places: Collection[Place]) -> None:
        """Hold the devices of these places, all of them or none, against whoever else uses the cluster, until it is closed.
        What is held already stays so. `ConfigError` where others have them."""

    def spawn(self, name: str, factory: str, *args: Any, python: str = "", place: Place | None = None) -> WorkerHandle:
        """Start a worker: `factory`, an import path, is called with `args` there, so that only the worker imports what
        it needs. `python` is the interpreter to run it with, where its packages cannot be ours. Without a `place` it runs
        beside the controller, and sees every device."""

    async def close(self) -> None:
        """End all workers."""

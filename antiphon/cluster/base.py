"""The interface between a run and the cluster that its workers run on."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from antiphon.core.registry import Registry
from antiphon.core.workers import WorkerHandle

# Each entry is called with (ClusterConfig, folder of the workers' logs or None) and returns a `Cluster`.
CLUSTERS = Registry(
    "cluster", {"local": "antiphon.cluster.local:LocalCluster", "ray": "antiphon.cluster.ray:RayCluster"}
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of a node."""

    id: str  # its name in CUDA_VISIBLE_DEVICES on that node
    kind: str = ""  # its class in lower case, such as h800; empty if unknown


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that workers can be placed on."""

    id: str = ""  # its name in the cluster
    cores: tuple[int, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    has_left: bool = False  # its devices keep their numbers, in case it comes back

    def __str__(self) -> str:
        if self.has_left:
            return "nothing, because it has left"
        cores = f"{len(self.cores)} cores (cpu:{self.cores[0]}-{self.cores[-1]})" if self.cores else "no cores"
        return f"{cores} and {len(self.gpus)} GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Node and devices of one worker."""

    node: str = ""
    cores: tuple[int, ...] = ()  # the worker is bound to these; empty: all
    gpus: tuple[str, ...] = ()  # the worker sees these
    kind: str = ""  # class of its devices: cpu, or that of its GPUs
    anywhere: bool = False  # on any node


class Cluster(Protocol):
    """Starts workers on machines and reserves devices for them."""

    def nodes(self) -> Sequence[Node]:
        """Return the machines that workers can be placed on now, the controller's first."""

    async def reserve(self, places: Collection[Place]) -> None:
        """Reserve the devices of these places until the cluster is closed, all of them or none.

        Devices that this cluster has reserved before stay reserved.

        Raises:
            ConfigError: Other users of the cluster hold some of them.
        """

    def spawn(self, name: str, factory: str, *args: Any, python: str = "", place: Place | None = None) -> WorkerHandle:
        """Start a worker.

        Args:
            name: Name of the worker, for its log and for errors.
            factory: Import path. It is called with `args` in the worker, so that only the worker imports what it needs.
            args: Arguments of the factory; they are pickled.
            python: Interpreter to run it with, if it needs an environment of its own.
            place: Node and devices; without one it runs on the controller's machine and sees every device.
        """

    async def close(self) -> None:
        """End all workers."""

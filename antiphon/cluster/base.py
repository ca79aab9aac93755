"""The seam between a run and the place its workers run in."""

from typing import Any, Protocol

from antiphon.registry import Registry
from antiphon.workers import WorkerHandle

# Each is called with (ClusterConfig, folder of the workers' logs or None) and is a `Cluster`.
CLUSTERS = Registry(
    "cluster", {"local": "antiphon.cluster.local:LocalCluster", "ray": "antiphon.cluster.ray:RayCluster"}
)


class Cluster(Protocol):
    """Where workers run."""

    def spawn(self, name: str, factory: str, *args: Any, python: str = "") -> WorkerHandle:
        """Start a worker: `factory`, an import path, is called with `args` there, so that only the worker imports what
        it needs. `python` is the interpreter to run it with, where its packages cannot be ours."""

    async def close(self) -> None:
        """End all workers."""

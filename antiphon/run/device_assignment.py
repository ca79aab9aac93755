"""Devices of engines and environment hosts, on the nodes that a cluster has when they start."""

from collections.abc import Callable
from typing import NamedTuple

from antiphon.cluster.base import Cluster, Place
from antiphon.core.errors import ConfigError, WorkerDiedError
from antiphon.run.config import RunConfig
from antiphon.run.placement import resolve_placement


class DeviceAssignment(NamedTuple):
    """Devices that a worker is given."""

    place: Place | None = None
    colocated: bool = False  # shares them with what trains


AssignDevices = Callable[[int], DeviceAssignment]  # of each worker, by its number


def device_assigner(cluster: Cluster, config: RunConfig, role: str, first: int = 0) -> AssignDevices:
    """Return a function that assigns devices to the workers of a role, whose number 0 is the `first` of the role."""

    def assign(number: int) -> DeviceAssignment:
        placement = resolve_placement(cluster.nodes(), config, least=0)
        return DeviceAssignment(placement.place(role, first + number), placement.shares_devices(role, first + number))

    return assign


def reassign(assign: AssignDevices, number: int, name: str) -> DeviceAssignment:
    """Return the devices of the worker `name`, with that number; `WorkerDiedError` if its node has left since the start."""
    try:
        return assign(number)
    except ConfigError as error:
        raise WorkerDiedError(f"{name} has nowhere to run: {error}") from error

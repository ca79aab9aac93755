"""Everything that the parts of a run are started with."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.cluster.placement import Placement
from antiphon.core.deadlines import Deadlines
from antiphon.core.profiles import Profiled
from antiphon.learning.roles import Ask
from antiphon.record.events import Events
from antiphon.run.config import RunConfig
from antiphon.run.placement import resolve_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """Cluster, configuration and services that the start of each part of a run needs.

    Attributes:
        cluster: Starts workers.
        config: The run's configuration.
        placement: Devices of each role; empty if nothing is placed.
        deadlines: Bounds all waits.
        events: Records what engines do.
        report: Receives messages for the user.
        roles: What asks each role of the user's own.
        profiled: Engines and graders, which the start of each adds.
    """

    cluster: Cluster
    config: RunConfig
    placement: Placement = field(default_factory=Placement)
    deadlines: Deadlines = field(default_factory=Deadlines)
    events: Events = field(default_factory=Events)
    report: Callable[[str], None] = print
    roles: Mapping[str, Ask] = field(default_factory=dict)
    profiled: list[Profiled] = field(default_factory=list)


@asynccontextmanager
async def open_cluster(config: RunConfig, logs: Path | None) -> AsyncIterator[tuple[Cluster, Placement]]:
    """Open the cluster of a run and reserve the devices of its roles until the end."""
    cluster: Cluster = CLUSTERS.resolve(config.cluster.kind)(config.cluster, logs)
    try:
        placement = resolve_placement(cluster.nodes(), config)
        await cluster.reserve([place for role in placement.places for place in placement.known_places(role)])
        yield cluster, placement
    finally:
        await cluster.close()

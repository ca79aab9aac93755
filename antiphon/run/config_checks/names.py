"""Names that must be registered, unique, or the name of a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.algorithms.registry import ADVANTAGES, LOSSES
from antiphon.cluster.base import CLUSTERS
from antiphon.core.registry import Registry
from antiphon.engines.base import ENGINES
from antiphon.engines.config import SERVER_KINDS
from antiphon.learning.learner import LEARNERS
from antiphon.learning.stages import STAGES
from antiphon.rollout.filters import FILTERS
from antiphon.run.config_checks.common import Problem, check_registered, iterate_engines
from antiphon.tasks.tool_calls import TOOL_FORMATS
from antiphon.weights.base import CHANNELS

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig

# Engines in workers, and those on servers, which the controller itself connects (`run.launch.engines`).
ENGINE_KINDS = Registry(
    "engine",
    {**ENGINES.shipped, **dict.fromkeys(SERVER_KINDS, "antiphon.engines.server:ServerEngine")},
    group=ENGINES.group,
)


def check_names(config: "RunConfig") -> Iterator[Problem]:
    """Check registered names, task names and the run's name."""
    if config.name != Path(config.name).name or config.name.startswith("."):
        yield "name", f"{config.name!r} must be the name of a folder, without a path"
    seen = set()
    for index, task in enumerate(config.tasks):
        if task.name in seen:
            yield f"tasks.{index}.name", f"{task.name!r} is also the name of an earlier task"
        seen.add(task.name)
    yield from check_registered(ADVANTAGES, config.algorithm.advantage, "algorithm.advantage")
    yield from check_registered(LOSSES, config.algorithm.loss, "algorithm.loss")
    for at, engine in iterate_engines(config):
        yield from check_registered(ENGINE_KINDS, engine.kind, f"{at}.kind")
    yield from check_registered(LEARNERS, config.learner.kind, "learner.kind")
    yield from check_registered(CLUSTERS, config.cluster.kind, "cluster.kind")
    yield from check_registered(CHANNELS, config.weights.channel, "weights.channel")
    for index, stage in enumerate(config.learner.stages):
        yield from check_registered(STAGES, stage, f"learner.stages.{index}")
    if config.rollout.filter is not None:
        yield from check_registered(FILTERS, config.rollout.filter, "rollout.filter")
    yield from check_registered(TOOL_FORMATS, config.rollout.tool_format, "rollout.tool_format")

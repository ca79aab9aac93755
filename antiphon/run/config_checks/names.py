"""Names that must be registered, unique, or the name of a folder."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.algorithms.registry import ADVANTAGES, LOSSES
from antiphon.cluster.base import CLUSTERS
from antiphon.core.registry import Registry
from antiphon.engines.base import ENGINES
from antiphon.engines.config import SERVER_KINDS
from antiphon.engines.server_protocols import SERVER_PROTOCOLS
from antiphon.learning.learner import LEARNERS
from antiphon.learning.stages import STAGES
from antiphon.record.run_dir import is_folder_name
from antiphon.rollout.filters import FILTERS
from antiphon.run.config_checks.common import Problem, check_registered, iterate_engines
from antiphon.tasks.environments import ENVIRONMENTS
from antiphon.tasks.prompts import SOURCES
from antiphon.tasks.rewards import GROUP_REWARDS, REWARDS
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
    if not is_folder_name(config.name):
        yield "name", f"{config.name!r} must be the name of a folder, without a path"
    seen = set()
    for index, task in enumerate(config.tasks):
        if task.name in seen:
            yield f"tasks.{index}.name", f"{task.name!r} is also the name of an earlier task"
        seen.add(task.name)
    for registry, name, key in iterate_names(config):
        yield from check_registered(registry, name, key)


def iterate_names(config: "RunConfig") -> Iterator[tuple[Registry, str, str]]:
    """Yield each name that a registry resolves, import paths included, between its registry and its dotted key."""
    yield ADVANTAGES, config.algorithm.advantage, "algorithm.advantage"
    yield LOSSES, config.algorithm.loss, "algorithm.loss"
    for at, engine in iterate_engines(config):
        yield ENGINE_KINDS, engine.kind, f"{at}.kind"
        if (servers := engine.server_options) is not None:
            yield SERVER_PROTOCOLS, servers.flavour, f"{at}.options.flavour"
    yield LEARNERS, config.learner.kind, "learner.kind"
    yield CLUSTERS, config.cluster.kind, "cluster.kind"
    yield CHANNELS, config.weights.channel, "weights.channel"
    for index, stage in enumerate(config.learner.stages):
        yield STAGES, stage, f"learner.stages.{index}"
    if config.rollout.filter is not None:
        yield FILTERS, config.rollout.filter, "rollout.filter"
    yield TOOL_FORMATS, config.rollout.tool_format, "rollout.tool_format"
    for index, task in enumerate(config.tasks):
        at = f"tasks.{index}"
        for field in ("prompts", "validation", "test"):
            if prompts := getattr(task, field):
                yield SOURCES, prompts.source, f"{at}.{field}.source"
        yield REWARDS, task.reward, f"{at}.reward"
        if task.group_reward is not None:
            yield GROUP_REWARDS, task.group_reward, f"{at}.group_reward"
        if task.environment:
            yield ENVIRONMENTS, task.environment, f"{at}.environment"

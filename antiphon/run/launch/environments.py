"""Making the environments of tasks: here, or in processes of their own if they block."""

import itertools
from collections import Counter
from collections.abc import Callable

from antiphon.cluster.base import Place
from antiphon.core.errors import ConfigError, SandboxError
from antiphon.core.workers import WorkerHandle
from antiphon.rollout.environment_pool import EnvironmentPool
from antiphon.rollout.episode_loop import EnvironmentFactory
from antiphon.run.launch.context import LaunchContext
from antiphon.run.placement import resolve_placement
from antiphon.tasks.config import TaskConfig
from antiphon.tasks.environments import environment_factory, is_blocking

HOST_WORKER = "antiphon.tasks.environments.host:EnvironmentHost"


def make_environments(context: LaunchContext) -> dict[str, EnvironmentFactory]:
    """Return the factory of environments of each task that has some."""
    hosts: Counter[str] = Counter()  # processes on each node
    return {
        task.name: _make_factory(context, task, task.environment, hosts)
        for task in context.config.tasks
        if task.environment
    }


def _make_factory(
    context: LaunchContext, task: TaskConfig, environment: str, hosts: Counter[str]
) -> EnvironmentFactory:
    if not is_blocking(environment) or context.config.rollout.deterministic:
        make: EnvironmentFactory = environment_factory(environment, task.environment_options)
        return make
    seconds = context.config.rollout.environment_timeout
    return EnvironmentPool(task.environment_pool, _host_spawner(context, task, hosts), seconds).make


def _host_spawner(context: LaunchContext, task: TaskConfig, hosts: Counter[str]) -> Callable[[], WorkerHandle]:
    """Return a function that starts a process for environments on the node that has the fewest."""
    numbers = itertools.count()

    def spawn() -> WorkerHandle:
        name = f"environment-{task.name}-{next(numbers)}"
        place = _choose_place(context, name, hosts) if "environment" in context.placement.places else None
        handle = context.cluster.spawn(name, HOST_WORKER, task.environment, task.environment_options, place=place)
        if place is not None:
            hosts[place.node] += 1
            handle.on_death(lambda _: hosts.subtract([place.node]))
        return handle

    return spawn


def _choose_place(context: LaunchContext, name: str, hosts: Counter[str]) -> Place:
    """Return the place of environments whose node has the fewest processes; `SandboxError` if all nodes have left."""
    try:
        places = resolve_placement(context.cluster.nodes(), context.config, least=0).known_places("environment")
        return min(places, key=lambda place: hosts[place.node])
    except (ConfigError, ValueError) as error:
        message = f"{name} has nowhere to run: the nodes of placement.environment have left"
        raise SandboxError(message) from error

"""Making the environments of tasks: here, or in processes of their own if they block."""

import itertools
from collections.abc import Callable

from antiphon.core.errors import ConfigError, SandboxError
from antiphon.core.workers import WorkerHandle
from antiphon.rollout.environment_pool import EnvironmentPool
from antiphon.rollout.episode_loop import EnvironmentFactory
from antiphon.run.device_assignment import AssignDevices, DeviceAssignment, device_assigner
from antiphon.run.launch.context import LaunchContext
from antiphon.tasks.config import TaskConfig
from antiphon.tasks.environments import environment_factory, is_blocking

HOST_WORKER = "antiphon.tasks.environments.host:EnvironmentHost"


def make_environments(context: LaunchContext) -> dict[str, EnvironmentFactory]:
    """Return the factory of environments of each task that has some."""
    return {
        task.name: _make_factory(context, task, task.environment) for task in context.config.tasks if task.environment
    }


def _make_factory(context: LaunchContext, task: TaskConfig, environment: str) -> EnvironmentFactory:
    if not is_blocking(environment) or context.config.rollout.deterministic:
        make: EnvironmentFactory = environment_factory(environment, task.environment_options)
        return make
    placed = "environment" in context.placement.places
    assign = device_assigner(context.cluster, context.config, "environment") if placed else _anywhere
    return EnvironmentPool(task.environment_pool, _host_spawner(context, assign, task)).make


def _anywhere(number: int) -> DeviceAssignment:
    return DeviceAssignment()


def _host_spawner(context: LaunchContext, assign: AssignDevices, task: TaskConfig) -> Callable[[], WorkerHandle]:
    numbers = itertools.count()

    def spawn() -> WorkerHandle:
        name = f"environment-{task.name}-{next(numbers)}"
        try:
            place = assign(0).place
        except ConfigError as error:  # its node has left
            raise SandboxError(f"{name} has nowhere to run: {error}") from error
        return context.cluster.spawn(name, HOST_WORKER, task.environment, task.environment_options, place=place)

    return spawn

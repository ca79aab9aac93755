"""Starting the workers of the user's own roles."""

import itertools
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.rpc import Client
from antiphon.core.worker_set import WorkerSet
from antiphon.learning.roles import Ask
from antiphon.run.config import RoleConfig
from antiphon.run.device_assignment import device_assigner, reassign
from antiphon.run.launch.context import LaunchContext

ROLE_WORKER = "antiphon.learning.roles:RoleWorker"


async def start_roles(context: LaunchContext, stack: AsyncExitStack) -> Mapping[str, Ask]:
    """Return what asks each role of the run; `stack` ends its workers."""
    asked: dict[str, Ask] = {}
    for name, config in context.config.roles.items():
        role = _RoleWorkers(context, name, config)
        await role.start(stack)
        asked[name] = role.ask
    return asked


class _RoleWorkers:
    """The workers of one role, in the process of the controller."""

    def __init__(self, context: LaunchContext, name: str, config: RoleConfig) -> None:
        self._context = context
        self._name, self._key = name, f"roles.{name}"
        self._config = config
        self._assign = device_assigner(context.cluster, context.config, self._key)
        self._serials = itertools.count()
        self._stateful = False
        self._workers: WorkerSet[Client] = WorkerSet(
            f"workers of role {name}",
            self._spawn,
            config.workers,
            context.deadlines,
            context.report,
            silence=context.config.rollout.engine_timeout,
            patience=config.timeout,
            patience_key=f"{self._key}.timeout",
        )

    async def start(self, stack: AsyncExitStack) -> None:
        """Start the workers; `ConfigError` if the object cannot be made, or has state and more than one worker."""
        workers = await stack.enter_async_context(self._workers)
        self._stateful = await workers.call("has_state")
        if self._stateful:
            workers.restarts = 0  # the state would be lost
        if self._stateful and self._config.workers > 1:
            message = f"must be 1: role {self._name} has state (methods state and restore)"
            raise ConfigError(message, key=f"{self._key}.workers", value=self._config.workers)

    async def ask(self, question: str, *args: Any) -> Any:
        """Answer a `learning.roles.Role`."""
        match question:
            case "state":
                return await self._call("state") if self._stateful else None
            case "restore":
                if self._stateful and args[0] is not None:
                    await self._call("restore", *args)
                return args[0] is not None or not self._stateful
            case "call_all":
                method, *rest = args
                return await self._wait(self._workers.call_all("call", method, *rest), method)
            case _:
                return await self._call(*args)

    async def _call(self, method: str, *args: Any) -> Any:
        events = self._context.events
        began = events.now()
        result = await self._wait(self._workers.call("call", method, *args), method)
        events.add("role", role=self._name, method=method, seconds=events.now() - began)
        return result

    async def _wait(self, work: Awaitable[Any], method: str) -> Any:
        on, deadline, key = f"role {self._name} ({method})", self._config.timeout, f"{self._key}.timeout"
        return await self._context.deadlines.wait(work, name="role", owner="stage", on=on, deadline=deadline, key=key)

    async def _spawn(self, number: int) -> Client:
        name = f"role-{self._name}-{next(self._serials)}"
        place = reassign(self._assign, number, name).place
        args = (self._name, self._config.factory, self._config.options)
        client = Client(self._context.cluster.spawn(name, ROLE_WORKER, *args, place=place))
        await client.started_or_killed()
        return client

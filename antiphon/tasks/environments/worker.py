"""An environment in a process of its own, for whoever cannot wait for it."""

import asyncio
import inspect
from typing import Any

from antiphon.core.errors import SandboxError
from antiphon.core.types import Prompt
from antiphon.core.workers import Worker
from antiphon.sandbox.isolation import kernel
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments import GEM_NAMES, environment_factory


class EnvironmentWorker(Worker):
    """Holds one environment; what it raises is told as one message."""

    def __init__(self, name: str) -> None:
        # A world that hangs does not see that whoever started it has gone.
        kernel.die_with_parent()
        self._runner = asyncio.Runner()
        nothing = Prompt(id=name, task=name, messages=())  # clients have none
        self._world: Any = self._do("be made", environment_factory(*GEM_NAMES.get(name, (name, {}))), nothing)

    def ready(self) -> None:
        """Answers once the environment is made."""

    def reset(self, seed: int) -> Reset:
        """See `Environment.reset`."""
        return self._do("reset", self._world.reset, seed)

    def step(self, action: str) -> Step:
        """See `Environment.step`."""
        return self._do("step", self._world.step, action)

    def close(self) -> None:
        """See `Environment.close`."""
        self._do("close", self._world.close)
        self._runner.close()

    def _do(self, what: str, method: Any, *args: Any) -> Any:
        try:
            result = method(*args)
            if inspect.isawaitable(result):
                result = self._runner.run(_result(result))
        except Exception as error:  # the boundary at which what an environment raises becomes a message
            raise SandboxError(f"it cannot {what}: {type(error).__name__}: {error}") from error
        return result


async def _result(awaitable: Any) -> Any:
    return await awaitable

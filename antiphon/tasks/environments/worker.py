"""A process that holds one environment, for callers that cannot wait for it themselves."""

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from antiphon.core.errors import SandboxError
from antiphon.core.processes.own_process import die_with_parent
from antiphon.core.types import Prompt
from antiphon.core.user_errors import describe_error
from antiphon.core.workers import Worker
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments import GEM_NAMES, environment_factory


class EnvironmentWorker(Worker):
    """Holds one environment; its errors become `SandboxError`."""

    def __init__(self, name: str) -> None:
        # An environment that hangs would not notice that its parent is gone.
        die_with_parent()
        self._runner = asyncio.Runner()
        empty_prompt = Prompt(id=name, task=name, messages=())  # clients have none
        make = environment_factory(*GEM_NAMES.get(name, (name, {})))
        self._environment: Any = self._run("be made", make, empty_prompt)

    def ready(self) -> None:
        """Return once the environment is made."""

    def reset(self, seed: int) -> Reset:
        """Begin an episode."""
        return self._run("reset", self._environment.reset, seed, read=_to_json)

    def step(self, action: str) -> Step:
        """Take one action."""
        return self._run("step", self._environment.step, action, read=_to_json)

    def close(self) -> None:
        """Close the environment."""
        self._run("close", self._environment.close)
        self._runner.close()

    def _run(self, what: str, method: Any, *args: Any, read: Callable[[Any], Any] = lambda result: result) -> Any:
        try:
            result = method(*args)
            if inspect.isawaitable(result):
                result = self._runner.run(_await(result))
            return read(result)
        except Exception as error:  # named boundary: an environment raises anything
            raise SandboxError(f"it cannot {what}: {describe_error(error, method)}") from error


def _to_json(result: Any) -> Any:
    """Return the values of a result as JSON gives them to clients: an environment may put any object into its info."""
    return json.loads(
        json.dumps(result, default=lambda value: value.item() if isinstance(value, np.generic) else str(value))
    )


async def _await(awaitable: Any) -> Any:
    return await awaitable

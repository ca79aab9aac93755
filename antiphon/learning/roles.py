"""Roles of the user's own: objects in workers, whose methods the stages of a step call.

`roles.NAME.factory` names a class, or a function that returns an object. Each worker of the role holds one such object. A stage
writes `await step.roles["NAME"].call("method", argument)`. A plain method runs in a thread, one call at a time; an `async def`
method runs beside others.

A role whose object has methods `state() -> bytes` and `restore(bytes)` has one worker, and its state is part of each
checkpoint. If this worker dies, the run resumes from its last checkpoint, as when a learner dies. Workers of other roles are
replaced.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from antiphon.core.data_pickles import check_data
from antiphon.core.errors import ConfigError, RecordError
from antiphon.core.registry import import_path
from antiphon.core.rpc import AsyncWorker, Handler
from antiphon.core.user_errors import describe_error

Ask = Callable[..., Awaitable[Any]]  # a question, such as "call" or "save", and its arguments


class RoleWorker(AsyncWorker):
    """One object of a role."""

    def __init__(self, name: str, factory: str, options: Mapping[str, Any]) -> None:
        """Make the object; `ConfigError` if that cannot be done."""
        self._key = f"roles.{name}"
        make = import_path(factory, "role", f"{self._key}.factory")
        try:
            self._object = make(**options)
        except Exception as error:  # named boundary: user code; it ends the run with this message
            raise self._error(f"cannot be made: {describe_error(error, make)}", factory) from error
        self._one_at_a_time = asyncio.Lock()
        super().__init__()

    @override
    async def _live(self) -> None:
        handlers: dict[str, Handler] = {
            "call": self._call,
            "has_state": self._has_state,
            "health": self._answer_health,
        }
        async with asyncio.TaskGroup() as owner:
            await self._serve(owner, handlers)

    async def _answer_health(self) -> None:
        """Answer that the event loop runs."""

    async def _has_state(self) -> bool:
        return all(callable(getattr(self._object, each, None)) for each in ("state", "restore"))

    async def _call(self, method: str, *args: Any) -> Any:
        function = None if method.startswith("_") else getattr(self._object, method, None)
        if not callable(function):
            there = (name for name in dir(self._object) if not name.startswith("_"))
            valid = [name for name in there if callable(getattr(self._object, name))]
            raise self._error(f"has no method {method!r}; there are {', '.join(valid) or 'none'}", method)
        try:
            if inspect.iscoroutinefunction(function):
                result = await function(*args)
            else:
                async with self._one_at_a_time:
                    result = await asyncio.to_thread(function, *args)
            check_data(result)
            return result
        except Exception as error:  # named boundary: user code
            raise self._error(f"failed in {method}: {describe_error(error, function)}", method) from error

    def _error(self, message: str, value: str) -> ConfigError:
        return ConfigError(f"it {message}", key=self._key, value=value)


class Role:
    """A role as stages see it."""

    def __init__(self, name: str, ask: Ask) -> None:
        """Ask the workers of the role `name` through a function, which knows them."""
        self._seconds = 0.0  # of calls since `take_seconds`
        self._name = name
        self._ask = ask

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method in the worker with the fewest open calls; arguments and result are pickled.

        The result may hold data only (`core.data_pickles`).
        """
        return await self._timed("call", method, *args)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method in each worker."""
        results: list[Any] = await self._timed("call_all", method, *args)
        return results

    def take_seconds(self) -> float:
        """Return the seconds that calls have taken together since this was called before."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def save(self, checkpoint: Path) -> None:
        """Write the state of the role into a checkpoint, if it has one."""
        if (state := await self._ask("state")) is None:
            return
        if not isinstance(state, bytes):
            message = f"its state() returned {type(state).__name__}, expected bytes"
            raise ConfigError(message, key=f"roles.{self._name}")
        path = self._path(checkpoint)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(state)

    async def restore(self, checkpoint: Path) -> None:
        """Restore the state that a checkpoint has of the role; `RecordError` if it lacks the state of one that has some."""
        path = self._path(checkpoint)
        state = path.read_bytes() if path.is_file() else None
        if not await self._ask("restore", state):
            message = f"{path}: roles.{self._name} has state, and the checkpoint has none of it"
            raise RecordError(message, path=path)

    def _path(self, checkpoint: Path) -> Path:
        return checkpoint / "roles" / f"{self._name}.bin"

    async def _timed(self, *question: Any) -> Any:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await self._ask(*question)
        finally:
            self._seconds += loop.time() - began

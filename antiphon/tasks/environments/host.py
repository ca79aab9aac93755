"""A process that holds many environments, each in a thread of its own, so that one that blocks delays no other."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from antiphon.core.types import Prompt
from antiphon.core.user_errors import describe_error
from antiphon.core.workers import Worker
from antiphon.tasks.base import ENVIRONMENT_MEASURES, as_reset, as_step
from antiphon.tasks.environments import environment_factory

PARSERS: Mapping[str, Callable[[Any], tuple[Any, ...]]] = {"reset": as_reset, "step": as_step}
Call = tuple[int, str, tuple[Any, ...]]  # number of the call, method, arguments


class EnvironmentHost(Worker):
    """Environments of one kind by key.

    Results are events (number of the call, True on success, result or error message).
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._make = environment_factory(name, options)
        self._calls: dict[int, queue.SimpleQueue[Call | None]] = {}
        self._emit_lock = threading.Lock()

    def open(self, key: int, prompt: Prompt) -> None:
        """Add an environment for a prompt; its thread makes it at the first call."""
        calls = self._calls[key] = queue.SimpleQueue[Call | None]()
        threading.Thread(target=self._serve, args=(calls, prompt), daemon=True).start()

    def call(self, key: int, number: int, method: str, *args: Any) -> None:
        """Call a method of an environment after its earlier calls have returned."""
        self._calls[key].put((number, method, args))

    def drop(self, key: int) -> None:
        """Remove an environment. One that never returns keeps its thread."""
        self._calls.pop(key).put(None)

    def _serve(self, calls: "queue.SimpleQueue[Call | None]", prompt: Prompt) -> None:
        environment: Any = None
        with asyncio.Runner() as runner:
            while (call := calls.get()) is not None:
                number, method, args = call
                try:
                    environment = environment or self._make(prompt)
                    result = getattr(environment, method)(*args)
                    result = runner.run(_await(result)) if inspect.isawaitable(result) else result
                    self._answer(number, True, _to_plain_values(method, result))
                except BaseException as error:  # noqa: BLE001 - named boundary: an environment raises anything
                    self._answer(number, False, describe_error(error, getattr(environment, method, None)))

    def _answer(self, number: int, success: bool, value: Any) -> None:
        with self._emit_lock, suppress(BrokenPipeError):  # the controller is gone
            self.emit((number, success, value))


def _to_plain_values(method: str, result: Any) -> Any:
    """Return what the rollout loop reads of a result: an environment may put any object into its info."""
    if method not in PARSERS:
        return None
    *values, info = PARSERS[method](result)
    plain: dict[str, Any] = {name: bool(info[name]) for name in ENVIRONMENT_MEASURES & info.keys()}
    if (key := info.get("state_key")) is not None:
        plain["state_key"] = str(key)
    if images := info.get("images"):
        plain["images"] = tuple(images)
    return *values, plain


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable

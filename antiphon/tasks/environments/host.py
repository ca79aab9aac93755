"""The inside of a process that holds environments: each has a thread of its own, so that one that blocks holds up no other."""

import asyncio
import inspect
import queue
import threading
import traceback
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any

from antiphon.core.types import Prompt
from antiphon.core.workers import Worker
from antiphon.tasks.environments import environment_factory

Order = tuple[int, str, tuple[Any, ...]]  # number of the call, method, arguments


class EnvironmentHost(Worker):
    """Environments of one kind, by key. It answers by events: (number of the call, whether it went well, result or reason)."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._make = environment_factory(name, options)
        self._orders: dict[int, queue.SimpleQueue[Order | None]] = {}
        self._writing = threading.Lock()

    def open(self, key: int, prompt: Prompt) -> None:
        """An environment for a prompt; it is made by its own thread, with the first call."""
        orders = self._orders[key] = queue.SimpleQueue[Order | None]()
        threading.Thread(target=self._live, args=(orders, prompt), daemon=True).start()

    def call(self, key: int, number: int, method: str, *args: Any) -> None:
        """Have a method called, when those before it have returned."""
        self._orders[key].put((number, method, args))

    def drop(self, key: int) -> None:
        """Forget an environment. One that never returns keeps its thread."""
        self._orders.pop(key).put(None)

    def _live(self, orders: "queue.SimpleQueue[Order | None]", prompt: Prompt) -> None:
        environment: Any = None
        with asyncio.Runner() as runner:
            while (order := orders.get()) is not None:
                number, method, args = order
                try:
                    environment = environment or self._make(prompt)
                    result = getattr(environment, method)(*args)
                    self._tell(number, True, runner.run(_result(result)) if inspect.isawaitable(result) else result)
                except BaseException as error:  # noqa: BLE001 - named boundary: what it raises becomes a message
                    self._tell(number, False, "".join(traceback.format_exception_only(error)).strip())

    def _tell(self, number: int, well: bool, value: Any) -> None:
        with self._writing, suppress(BrokenPipeError):  # who asked is gone
            self.emit((number, well, value))


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable

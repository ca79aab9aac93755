"""Waits of a run, each with the deadline that the configuration has for it."""

from collections.abc import Awaitable
from operator import attrgetter
from typing import TypeVar

from antiphon.core.deadlines import Deadlines
from antiphon.run.config import RunConfig

T = TypeVar("T")

# The configuration key of the deadline of each wait, by its name. All others have rollout.timeout.
DEADLINE_KEYS = {
    **dict.fromkeys(("begin", "step"), "learner.timeout"),
    **dict.fromkeys(("publish", "load", "turn"), "weights.timeout"),
    **dict.fromkeys(("restore", "checkpoint"), "checkpoint.timeout"),
}


class RunWaits:
    """Awaits with configured deadlines."""

    def __init__(self, config: RunConfig, deadlines: Deadlines) -> None:
        self._config = config
        self._deadlines = deadlines

    async def __call__(self, awaitable: Awaitable[T], name: str, on: str, owner: str = "learner") -> T:
        """Await for as long as the configuration allows for waits of this name; `StallError` afterwards."""
        key = DEADLINE_KEYS.get(name, "rollout.timeout")
        deadline = attrgetter(key)(self._config)
        return await self._deadlines.wait(awaitable, name=name, owner=owner, on=on, deadline=deadline, key=key)

    def seconds(self, name: str) -> float:
        """Return the seconds that the learner's loop has spent in waits of this name."""
        return self._deadlines.spent("learner", name)

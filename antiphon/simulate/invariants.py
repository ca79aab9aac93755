"""Invariants of a run, checked from its events."""

import asyncio
import json
import math
from collections.abc import Awaitable, Iterable
from fractions import Fraction
from typing import Any, TypeVar

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import AntiphonError
from antiphon.rollout.config import RolloutConfig

T = TypeVar("T")


class InvariantError(AntiphonError):
    """A run broke an invariant."""


class CheckedDeadlines(Deadlines):
    """Deadlines that are checked from outside: no wait may last longer than its own."""

    async def wait(
        self, awaitable: Awaitable[T], *, name: str, owner: str, on: str, deadline: float, key: str = ""
    ) -> T:
        """Wait, and raise `InvariantError` if it lasted longer than the deadline."""
        began = asyncio.get_running_loop().time()
        try:
            return await super().wait(awaitable, name=name, owner=owner, on=on, deadline=deadline, key=key)
        finally:
            waited = asyncio.get_running_loop().time() - began
            if waited > deadline + 1e-6:
                raise InvariantError(f"{owner} waited {waited:g} s for {on}, with a deadline of {deadline:g} s")


class InvariantChecker:
    """Checks the events of a run, and raises `InvariantError` at the first one that breaks an invariant.

    It counts everything itself and shares no code with the scheduler.
    """

    PREDECESSORS = {  # status -> statuses it may follow
        "finished": ("running",),
        "redundant": ("running",),
        "failed": ("running", "finished"),
        "stale": ("running", "finished"),
        "cancelled": ("running", "finished"),
        "lost": ("running", "finished"),
        "filtered": ("finished",),
        "trained": ("finished",),
    }

    def __init__(self, config: RolloutConfig) -> None:
        ratio = Fraction(config.async_ratio).limit_denominator(1000)
        size = config.groups_per_step
        self.config = config
        self.max_live = math.ceil((1 + ratio) * size) + config.extra_groups
        self.max_age = math.ceil(ratio)
        self.max_oldest = math.ceil((ratio % 1) * size) if ratio % 1 else size
        self.version = 0
        self.engine_version = 0  # the newest that engines got
        self.steps = 0
        self.status: dict[str, str] = {}
        self.started: dict[str, int] = {}
        self.attempts: dict[int, list[str]] = {}  # group -> its attempts
        self.live: dict[int, int] = {}  # group -> its live attempts, for groups that have any
        self.step: list[int] | None = None
        self.taken: set[int] = set()
        self.asleep: set[int] = set()  # engines
        self.engines: dict[int, int] = {}  # engine -> version
        self.lost: set[int] = set()
        self.faults: set[str] = set()

    def check(self, lines: Iterable[str]) -> None:
        """Check all events."""
        for line in lines:
            event = json.loads(line)
            try:
                handler = getattr(self, f"_{event['event']}", None)
                if handler is not None and not event.get("request", "").startswith("-"):  # not an evaluation's
                    handler(event)
            except InvariantError as error:
                raise InvariantError(f"{error}, at {line}") from None

    def check_end(self, steps: int) -> None:
        """Check the end of a run that completed."""
        self._require(self.steps == steps, f"{self.steps} steps instead of {steps}")
        open_ = [attempt for attempt, status in self.status.items() if status in ("running", "finished")]
        self._require(not open_, f"attempts never ended: {open_[:5]}")

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise InvariantError(message)

    def _admit(self, event: dict[str, Any]) -> None:
        self.live.setdefault(event["group"], 0)
        allowed = self.max_live - (self.version - self.engine_version) * self.config.groups_per_step
        self._require(len(self.live) <= allowed, f"{len(self.live)} groups live, {allowed} allowed")

    def _attempt(self, event: dict[str, Any]) -> None:
        attempt, status, group = event["attempt"], event["status"], int(event["attempt"].split(".")[0])
        if status == "running":
            self._require(attempt not in self.status, "an attempt started twice")
            self.started[attempt] = self.engine_version
            self.attempts.setdefault(group, []).append(attempt)
            self.live[group] = self.live.get(group, 0) + 1
        else:
            before = self.status.get(attempt)
            self._require(before in self.PREDECESSORS[status], f"an attempt that was {before} became {status}")
            if status == "trained":
                self._require(self.step is not None and group in self.step, "trained outside a step")
            if status != "finished":
                self.live[group] -= 1
                if not self.live[group]:
                    del self.live[group]
        self.status[attempt] = status

    def _take(self, event: dict[str, Any]) -> None:
        groups, config = event["groups"], self.config
        self._require(self.step is None, "a step began inside another")
        self._require(len(set(groups)) == config.groups_per_step == len(groups), "a step of the wrong size")
        self._require(not self.taken & set(groups), "a group was taken twice")
        finished = [[a for a in self.attempts[group] if self.status[a] == "finished"] for group in groups]
        self._require(all(len(each) == config.group_size for each in finished), "a group of the wrong size")
        ages = [self.version - min(self.started[attempt] for attempt in each) for each in finished]
        self._require(max(ages) <= self.max_age, f"groups of ages {ages}, {self.max_age} allowed")
        oldest = ages.count(self.max_age)
        self._require(oldest <= self.max_oldest, f"{oldest} groups of the greatest age, {self.max_oldest} allowed")
        if config.order == "fifo":
            waiting = sorted(group for group in self.live if group not in self.taken)[: len(groups)]
            self._require(groups == waiting, f"first in, first out would take {waiting}")
        self.step = groups
        self.taken |= set(groups)

    def _update(self, event: dict[str, Any]) -> None:
        self.engine_version = event["version"]

    def _publish(self, event: dict[str, Any]) -> None:
        self._require(self.step is not None, "a version without a step")
        trained = [self.status[a] for group in self.step or () for a in self.attempts[group]]
        self._require(
            trained.count("trained") == self.config.groups_per_step * self.config.group_size, "attempts lost in a step"
        )
        self.version += 1
        self.steps += 1
        self.step = None
        self._require(
            event["version"] == self.version, f"version {event['version']} published as number {self.version}"
        )

    def _fault(self, event: dict[str, Any]) -> None:
        self.faults.add(event["point"])

    def _join(self, event: dict[str, Any]) -> None:
        self.engines[event["engine"]] = event["version"]

    def _sleep(self, event: dict[str, Any]) -> None:
        self.asleep.add(event["engine"])

    def _wake(self, event: dict[str, Any]) -> None:
        self.asleep.remove(event["engine"])

    def _lost(self, event: dict[str, Any]) -> None:
        self.lost.add(event["engine"])

    def _load(self, event: dict[str, Any]) -> None:
        engine, version = event["engine"], event["version"]
        self._require(
            self.engines[engine] <= version <= self.engine_version, "an engine loaded a version that is not the next"
        )
        self.engines[engine] = version

    def _place(self, event: dict[str, Any]) -> None:
        attempt, engine = event["request"].rsplit("/", 1)[0], event["engine"]
        self._require(engine not in self.lost, "a request went to an engine that is gone")
        self._require(engine not in self.asleep, "a request went to an engine whose device others have")
        self._require(self.status[attempt] == "running", f"a request of an attempt that is {self.status[attempt]}")
        held, least = self.engines[engine], self.started[attempt]
        self._require(held >= least, f"an engine of version {held} was asked for {least}")

    def _served(self, event: dict[str, Any]) -> None:
        attempt = event["request"].rsplit("/", 1)[0]
        if event["versions"]:
            least, most = event["versions"]
            self._require(self.started[attempt] <= least, "tokens older than their attempt")
            self._require(most <= self.engine_version, "tokens from a version that was not published to engines")

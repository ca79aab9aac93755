"""Runs with faults, one a seed, and whether the promises hold in each: what `antiphon simulate --chaos` does.

A seed draws a scenario: schedule, sizes, speeds, faults. The run's events are then read by a checker that keeps books of its
own and shares no code with what it checks.
"""

import asyncio
import io
import json
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import AntiphonError, RolloutError, WorkerDied
from antiphon.core.rng import generator
from antiphon.rollout.config import RolloutConfig
from antiphon.simulate.scenario import ScenarioConfig, simulate

T = TypeVar("T")

RATIOS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.75)


class InvariantBroken(AntiphonError):
    """A promise that a run did not keep."""


def run_chaos(seeds: Iterable[int], events: Path | None = None, tell: Callable[[str], None] = print) -> Counter[str]:
    """Play the scenarios of many seeds; returns how often runs ended in which way. The events of the last are kept in
    `events`. A seed that breaks a promise is told of, with the command that plays it again, and raised."""
    ends: Counter[str] = Counter()
    for seed in seeds:
        log = io.StringIO()
        try:
            ends[run_seed(seed, log)] += 1
        except InvariantBroken:
            tell(f"seed {seed} fails; again: antiphon simulate --chaos 1 --seed {seed} --events events.jsonl")
            raise
        finally:
            if events is not None:
                events.write_text(log.getvalue(), encoding="utf-8")
    return ends


def run_seed(seed: int, log: io.StringIO) -> str:
    """Play the scenario of a seed; returns how the run ended, `done` or the message of a fault that may end it.

    `InvariantBroken` if it broke a promise, or ended for a reason that no fault explains.
    """
    scenario, error = draw_scenario(seed), None
    try:
        simulate(scenario, log, _CheckedWaits())
    except (WorkerDied, RolloutError) as raised:
        error = raised
    except Exception as raised:  # whatever else a run ends with, no fault explains it
        raise InvariantBroken(f"the run failed: {type(raised).__name__}: {raised}") from raised
    books = InvariantChecker(scenario.rollout)
    books.read(log.getvalue().splitlines())
    if error is None:
        books.close(scenario.steps)
        return "done"
    if not _explained(error, scenario, books):
        raise InvariantBroken(f"the run failed, and no fault explains it: {error}") from error
    return re.sub(r"\d+", "n", str(error))


def _explained(error: WorkerDied | RolloutError, scenario: ScenarioConfig, books: "InvariantChecker") -> bool:
    """Whether what went wrong may end the run: the learner, all engines and their successors, every attempt at a group."""
    if isinstance(error, RolloutError):
        return bool(books.faults & {"reward.lost", "environment.slow", "environment.hang", "environment.fail"})
    if "learner" in str(error):
        return "learner.crash" in books.faults
    spent = len(books.engines) == scenario.engines.count + scenario.rollout.engine_restarts
    return spent and books.gone == set(books.engines)


def draw_scenario(seed: int) -> ScenarioConfig:
    """The scenario of a seed."""
    draw = generator(seed, "chaos")

    def one_of(*choices: Any) -> Any:
        return choices[int(draw.integers(len(choices)))]

    policy = one_of("queue", "queue", "queue", "queue", "batch", "one_step_off", "tail_batching")
    waits_for_all, tail = policy in ("batch", "one_step_off"), policy == "tail_batching"
    ratio = {"batch": 0.0, "one_step_off": 1.0, "tail_batching": 0.0}.get(policy, float(one_of(*RATIOS)))
    agents = bool(draw.random() < 0.3)
    rollout = {
        "policy": policy,
        "placement": one_of("spread", "spread", "pinned"),
        "groups_per_step": int(draw.integers(1, 6)),
        "group_size": int(draw.integers(2, 5)),
        "async_ratio": ratio,
        "extra_groups": 0 if policy == "one_step_off" else int(draw.integers(1 if tail else 0, 4)),
        "redundancy": 0 if waits_for_all else int(draw.integers(0, 3)),
        "order": "ready" if tail else one_of("fifo", "ready"),
        "on_expiry": one_of("abort", "wait"),
        "on_update": one_of("keep", "recompute", "restart", "drain"),
        "filter": one_of(None, "spread") if not tail else None,
        "max_attempts": int(draw.integers(1, 4)),
        "max_turns": 6 if agents else 1,
        "timeout": 20000.0,
        "engine_timeout": 20.0,
        "environment_timeout": 30.0,
        "sampling": {"max_tokens": 2000},
    }
    faults = _drawn_faults(draw, agents)
    scenario = ScenarioConfig.model_validate(
        {
            "name": "chaos",
            "seed": seed,
            "steps": int(draw.integers(3, 8)),
            "rollout": rollout,
            "engines": {
                "count": int(draw.integers(1, 5)),
                "start_seconds": 5.0,
                "speed": {
                    "slots": int(draw.integers(1, 9)),
                    "iteration": 0.02,
                    "per_sequence": 0.001,
                    "per_token": 1e-7,
                    "prefill": 1e-4,
                    "memory": int(one_of(1 << 40, 6000)),
                    "load": float(one_of(0.0, 1.0)),
                },
            },
            "learner": {"step": float(one_of(0.1, 2.0, 10.0)), "publish": 0.5},
            "prompts": int(one_of(3, 50)),
            "prompt_tokens": {"kind": "lognormal", "mean": 60, "spread": 0.5},
            "response_tokens": {"kind": "lognormal", "mean": 60 if agents else 200, "spread": 1.0, "shared": 0.5},
            "reward_seconds": {"kind": "uniform", "mean": 0.5, "spread": 0.5},
            "environment": {"turns": {"kind": "uniform", "mean": 4, "spread": 3}} if agents else None,
            "faults": faults,
        }
    )
    shared = generator(seed, "chaos.lent")  # a stream of its own: what seeds draw besides stays as it was
    if shared.random() < 0.4:
        lent = int(shared.integers(1, scenario.engines.count + 1))
        return scenario.model_copy(update={"engines": scenario.engines.model_copy(update={"lent": lent})})
    return scenario


def _drawn_faults(draw: np.random.Generator, agents: bool) -> list[dict[str, Any]]:
    """Each kind of fault that there may be, or not."""
    possible = [
        {"point": "engine.crash", "at": float(draw.uniform(0, 60)), "every": 60.0},
        {"point": "engine.hang", "at": float(draw.uniform(0, 60)), "every": 90.0},
        {"point": "engine.slow", "at": float(draw.uniform(0, 60)), "every": 40.0, "seconds": 30.0},
        {"point": "engine.load", "chance": 0.05},
        {"point": "reward.lost", "chance": 0.05},
        {"point": "learner.crash", "chance": 0.02},
    ]
    if agents:
        possible += [
            {"point": "environment.slow", "chance": 0.1},
            {"point": "environment.hang", "chance": 0.01},
            {"point": "environment.fail", "chance": 0.01},
        ]
    return [fault for fault in possible if draw.random() < 0.4]


class _CheckedWaits(Deadlines):
    """Waits whose deadlines are looked at from outside: none may end later than it says."""

    async def wait(
        self, awaitable: Awaitable[T], *, name: str, owner: str, on: str, deadline: float, key: str = ""
    ) -> T:
        """See `Deadlines.wait`."""
        began = asyncio.get_running_loop().time()
        try:
            return await super().wait(awaitable, name=name, owner=owner, on=on, deadline=deadline, key=key)
        finally:
            waited = asyncio.get_running_loop().time() - began
            if waited > deadline + 1e-6:
                raise InvariantBroken(f"{owner} waited {waited:g} s for {on}, with a deadline of {deadline:g} s")


class InvariantChecker:
    """What the events of a run must come to. `InvariantBroken` on the first event that cannot be."""

    AFTER = {  # status -> what it may follow
        "finished": ("running",),
        "redundant": ("running",),
        "failed": ("running", "finished"),
        "stale": ("running", "finished"),
        "cancelled": ("running", "finished"),
        "filtered": ("finished",),
        "trained": ("finished",),
    }

    def __init__(self, config: RolloutConfig) -> None:
        ratio = Fraction(config.async_ratio).limit_denominator(1000)
        size = config.groups_per_step
        self.config = config
        self.bound = math.ceil((1 + ratio) * size) + config.extra_groups
        self.greatest_age = math.ceil(ratio)
        self.greatest_share = math.ceil((ratio % 1) * size) if ratio % 1 else size
        self.version = 0
        self.steps = 0
        self.status: dict[str, str] = {}
        self.started: dict[str, int] = {}
        self.members: dict[int, list[str]] = {}  # group -> its attempts
        self.alive: dict[int, int] = {}  # group -> attempts that have not ended, for groups that have any
        self.step: list[int] | None = None
        self.taken: set[int] = set()
        self.asleep: set[int] = set()  # engines
        self.engines: dict[int, int] = {}  # engine -> version
        self.gone: set[int] = set()
        self.faults: set[str] = set()

    def read(self, lines: Iterable[str]) -> None:
        """Take all events in."""
        for line in lines:
            what = json.loads(line)
            try:
                handle = getattr(self, f"_{what['event']}", None)
                if handle is not None and not what.get("request", "").startswith("-"):  # not an evaluation's
                    handle(what)
            except InvariantBroken as error:
                raise InvariantBroken(f"{error}, at {line}") from None

    def close(self, steps: int) -> None:
        """The run says that it is done."""
        self._demand(self.steps == steps, f"{self.steps} steps instead of {steps}")
        open_ = [attempt for attempt, status in self.status.items() if status in ("running", "finished")]
        self._demand(not open_, f"attempts never ended: {open_[:5]}")

    def _demand(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise InvariantBroken(otherwise)

    def _admit(self, what: dict[str, Any]) -> None:
        self.alive.setdefault(what["group"], 0)
        self._demand(len(self.alive) <= self.bound, f"{len(self.alive)} groups live, {self.bound} allowed")

    def _attempt(self, what: dict[str, Any]) -> None:
        attempt, status, group = what["attempt"], what["status"], int(what["attempt"].split(".")[0])
        if status == "running":
            self._demand(attempt not in self.status, "an attempt started twice")
            self.started[attempt] = self.version
            self.members.setdefault(group, []).append(attempt)
            self.alive[group] = self.alive.get(group, 0) + 1
        else:
            before = self.status.get(attempt)
            self._demand(before in self.AFTER[status], f"an attempt that was {before} became {status}")
            if status == "trained":
                self._demand(self.step is not None and group in self.step, "trained outside a step")
            if status != "finished":
                self.alive[group] -= 1
                if not self.alive[group]:
                    del self.alive[group]
        self.status[attempt] = status

    def _take(self, what: dict[str, Any]) -> None:
        groups, config = what["groups"], self.config
        self._demand(self.step is None, "a step began inside another")
        self._demand(len(set(groups)) == config.groups_per_step == len(groups), "a step of the wrong size")
        self._demand(not self.taken & set(groups), "a group was taken twice")
        finished = [[a for a in self.members[group] if self.status[a] == "finished"] for group in groups]
        self._demand(all(len(each) == config.group_size for each in finished), "a group of the wrong size")
        ages = [self.version - min(self.started[attempt] for attempt in each) for each in finished]
        self._demand(max(ages) <= self.greatest_age, f"groups of ages {ages}, {self.greatest_age} allowed")
        oldest = ages.count(self.greatest_age)
        self._demand(
            oldest <= self.greatest_share, f"{oldest} groups of the greatest age, {self.greatest_share} allowed"
        )
        if config.order == "fifo":
            waiting = sorted(group for group in self.alive if group not in self.taken)[: len(groups)]
            self._demand(groups == waiting, f"first in, first out would take {waiting}")
        self.step = groups
        self.taken |= set(groups)

    def _publish(self, what: dict[str, Any]) -> None:
        self._demand(self.step is not None, "a version without a step")
        trained = [self.status[a] for group in self.step or () for a in self.members[group]]
        self._demand(
            trained.count("trained") == self.config.groups_per_step * self.config.group_size, "attempts lost in a step"
        )
        self.version += 1
        self.steps += 1
        self.step = None
        self._demand(what["version"] == self.version, f"version {what['version']} published as number {self.version}")

    def _fault(self, what: dict[str, Any]) -> None:
        self.faults.add(what["point"])

    def _join(self, what: dict[str, Any]) -> None:
        self.engines[what["engine"]] = what["version"]

    def _sleep(self, what: dict[str, Any]) -> None:
        self.asleep.add(what["engine"])

    def _wake(self, what: dict[str, Any]) -> None:
        self.asleep.remove(what["engine"])

    def _lost(self, what: dict[str, Any]) -> None:
        self.gone.add(what["engine"])

    def _load(self, what: dict[str, Any]) -> None:
        engine, version = what["engine"], what["version"]
        self._demand(self.engines[engine] <= version <= self.version, "an engine loaded a version that is not the next")
        self.engines[engine] = version

    def _place(self, what: dict[str, Any]) -> None:
        attempt, engine = what["request"].rsplit("/", 1)[0], what["engine"]
        self._demand(engine not in self.gone, "a request went to an engine that is gone")
        self._demand(engine not in self.asleep, "a request went to an engine whose device others have")
        self._demand(self.status[attempt] == "running", f"a request of an attempt that is {self.status[attempt]}")
        held, least = self.engines[engine], self.started[attempt]
        self._demand(held >= least, f"an engine of version {held} was asked for {least}")

    def _served(self, what: dict[str, Any]) -> None:
        attempt = what["request"].rsplit("/", 1)[0]
        if what["versions"]:
            least, most = what["versions"]
            self._demand(self.started[attempt] <= least, "tokens older than their attempt")
            self._demand(most <= self.version, "tokens from a version that was not published")

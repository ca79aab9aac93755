"""The engines of a pool over time: health checks, replacement of dead engines, and scaling with the load."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import StallError, WeightsError, WorkerDiedError
from antiphon.core.worker_set import RETRY_SECONDS
from antiphon.engines.base import InferenceEngine
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_state import EngineState
from antiphon.rollout.request_placement import RequestPlacement

T = TypeVar("T")

AHEAD = 1.25  # requests sent to an engine, relative to its slots: those that queue there hide the way here and back

LoadWeights = Callable[[InferenceEngine], Awaitable[None]]  # loads the newest weights into a new engine


@dataclass(frozen=True, slots=True)
class Scaling:
    """Settings by which a pool starts engines while the load needs them, and closes them afterwards."""

    max_engines: int
    idle_seconds: float  # after which an engine may be closed
    close: Callable[[InferenceEngine], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSupply:
    """Source of the engines that a pool starts in addition to its first ones; `EngineStarter` of `run/launch/engines.py`."""

    start: Callable[[], Awaitable[InferenceEngine]]
    target: int = 0  # engines that the pool should have; those missing at the beginning are started when they can be
    scaling: Scaling | None = None


class EngineSupervisor:
    """Adds, removes, checks and replaces the engines of a pool."""

    def __init__(
        self,
        placement: RequestPlacement,
        config: RolloutConfig,
        deadlines: Deadlines,
        events: Events,
        *,
        supply: EngineSupply | None,
        report_death: Callable[[str], None],
    ) -> None:
        self.final_death: WorkerDiedError | None = None  # of the last engine, once none will replace it
        self.shared_devices_free = asyncio.Event()  # the learner does not use the devices that it shares with engines
        self.shared_devices_free.set()
        self._placement = placement
        self._config = config
        self._deadlines = deadlines
        self._events = events
        self._supply = supply
        self._scaling = supply.scaling if supply else None
        if self._scaling is not None:
            placement.on_idle_change = self._on_idle_change
        self._report_death = report_death
        self._target = supply.target if supply else 0  # engines
        self._restarts = config.engine_restarts if supply else 0
        self._min_engines = 0
        self._starting = False  # an engine is being started
        self._due = asyncio.Event()  # an engine is to be started or closed

    async def wait(self, awaitable: Awaitable[T], name: str, on: str) -> T:
        """Wait within `rollout.timeout`."""
        deadline, key = self._config.timeout, "rollout.timeout"
        return await self._deadlines.wait(awaitable, name=name, owner="pool", on=on, deadline=deadline, key=key)

    # --- engines come and go -------------------------------------------------------------------------------------------

    def add_first(self, engines: Sequence[InferenceEngine]) -> None:
        """Add the engines that the pool begins with. Scaling never leaves fewer; starting those missing is no restart."""
        self._min_engines = len(engines)
        if self._supply:
            self._restarts += max(self._target - len(engines), 0)
        for engine in engines:
            self.add(engine)

    def add(self, engine: InferenceEngine) -> EngineState:
        """Add an engine. It serves what its version allows: if its weights are old, everything once it has loaded."""
        members = self._placement.members
        limit = self._placement.limit(engine.capacity, AHEAD)
        now = asyncio.get_running_loop().time()
        member = EngineState(next(self._events.engine_numbers), engine, limit, engine.version, now)
        members.append(member)
        self._target = max(self._target, len(members))
        self._events.add("join", engine=member.number, version=member.version)
        self._placement.add(member, asleep=engine.colocated and not self.shared_devices_free.is_set())
        return member

    async def retire(self, engine: InferenceEngine) -> None:
        """Give an engine no more requests, and remove it when those it has are done."""
        member = next(member for member in self._placement.members if member.engine is engine)
        member.open = False
        self._target -= 1
        await self.wait_until_idle(member)
        if member in self._placement.members:  # else it has died meanwhile
            self._placement.remove(member)
            self._events.add("retired", engine=member.number)

    async def wait_until_idle(self, member: EngineState) -> None:
        """Return when nothing runs on an engine any more."""
        while member.running:
            member.idle.clear()
            await self.wait(member.idle.wait(), "empty", "an engine to end its requests")

    async def load_or_remove(self, member: EngineState, load: Awaitable[None]) -> None:
        """Let an engine load weights; kill it and go on without it if it cannot."""
        member.loads += 1
        try:
            await self.run_unless_dead(member, load)
        except WeightsError as error:
            self.on_engine_lost(member, WorkerDiedError(f"an engine could not load weights and was killed: {error}"))
        else:
            self._placement.update(member)
        finally:
            member.loads -= 1

    async def run_unless_dead(self, member: EngineState, work: Awaitable[None]) -> None:
        """Let an engine do something; go on without it if it dies."""
        try:
            await work
        except WorkerDiedError as error:
            self.on_engine_lost(member, error)

    def on_engine_lost(self, member: EngineState, error: WorkerDiedError) -> None:
        """Kill an engine that still lives, and go on without it; raise `error` if it was the last and none will replace it."""
        member.open = False
        member.engine.kill()  # its place and its devices are for another
        if member in self._placement.members:
            self._placement.remove(member)
            self._due.set()
            self._events.add("lost", engine=member.number)
            self._report_death(f"{error}; engines left: {len(self._placement.members)}")
        self._give_up_if_empty(error)

    def _give_up_if_empty(self, error: WorkerDiedError) -> None:
        if not (self._placement.members or self._restarts or self._starting):
            self.final_death = error
            self._placement.fail_pending(error)
            raise error

    # --- loops ---------------------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Keep finding engines that have died unnoticed or hang; kill the latter."""
        while True:
            await asyncio.gather(*map(self._check, self._placement.members))
            await asyncio.sleep(self._config.engine_timeout / 4)

    async def _check(self, member: EngineState) -> None:
        timeout = self._config.engine_timeout
        if member.loads:  # it cannot answer while it copies weights
            timeout = max(timeout, self._config.load_timeout)
        try:
            await self._deadlines.wait(
                member.engine.health(), name="health", owner="pool", on="an engine", deadline=timeout
            )
        except WorkerDiedError as error:
            self.on_engine_lost(member, error)
        except StallError:
            self.on_engine_lost(member, WorkerDiedError(f"an engine did not answer for {timeout:g} s and was killed"))

    async def keep_target(self, load_weights: LoadWeights) -> None:
        """Keep starting engines that are missing and closing those not needed; raise `WorkerDiedError` once all are lost."""
        pause = RETRY_SECONDS[0]
        while self.final_death is None:
            self._due.clear()
            if (removable := self._find_removable()) is not None:
                await self._close(removable)
            elif not self._restarts or len(self._placement.members) >= self._target:
                await self._due.wait()
            elif await self._start(load_weights):
                pause = RETRY_SECONDS[0]
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
        raise self.final_death  # the request that met it may have kept it to itself, as rewards do whose judge is gone

    async def _start(self, load_weights: LoadWeights) -> bool:
        """Start an engine; return False if that fails. A failed start uses up a restart only if no other engine lives."""
        assert self._supply is not None
        self._restarts, self._starting = self._restarts - 1, True
        try:
            member = self.add(await self.wait(self._supply.start(), "respawn", "a new engine"))
        except (WorkerDiedError, StallError) as error:
            self._starting = False
            self._give_up_if_empty(WorkerDiedError(str(error)))
            self._report_death(f"no engine takes the place that is free yet: {error}")
            self._restarts += bool(self._placement.members)
            return False
        self._starting = False
        if member.asleep:
            await self.run_unless_dead(member, member.engine.sleep())
        await self.load_or_remove(member, load_weights(member.engine))
        self._placement.dispatch()
        self.scale_up()
        return True

    # --- scaling -------------------------------------------------------------------------------------------------------

    def scale_up(self) -> None:
        """Want one engine more if there are more requests than slots, and no engine is about to come."""
        members = self._placement.members
        if self._scaling is None or self._target >= self._scaling.max_engines:
            return
        coming = self._starting or (self._restarts > 0 and len(members) < self._target)
        if not coming and self._placement.outstanding > sum(member.engine.capacity for member in members):
            self._target += 1
            self._restarts += 1  # it replaces none that died
            self._events.add("grow", engines=self._target, asked=self._placement.outstanding)
            self._due.set()

    def _on_idle_change(self, member: EngineState) -> None:
        """Start the time after which an idle engine may be closed, or stop it."""
        assert self._scaling is not None
        member.removable = False
        if member.idle_timer is not None:
            member.idle_timer.cancel()
            member.idle_timer = None
        if member.awake and not member.running:
            seconds = self._scaling.idle_seconds
            member.idle_timer = asyncio.get_running_loop().call_later(seconds, self._note_removable, member)

    def _note_removable(self, member: EngineState) -> None:
        member.removable = True
        self._due.set()

    def _find_removable(self) -> EngineState | None:
        if len(self._placement.members) <= self._min_engines:
            return None
        return next((member for member in self._placement.members if member.removable), None)

    async def _close(self, member: EngineState) -> None:
        assert self._scaling is not None
        await self.retire(member.engine)  # at once: nothing runs there
        await self.wait(self._scaling.close(member.engine), "close", "an engine that is not needed")

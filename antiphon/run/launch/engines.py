"""Starting a pool of engines, on assigned devices or on servers that run already."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from antiphon.cluster.base import Cluster
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, StallError, WorkerDiedError
from antiphon.core.workers import WorkerHandle
from antiphon.engines.base import InferenceEngine
from antiphon.engines.config import EngineConfig
from antiphon.engines.remote_engine import RemoteEngine
from antiphon.engines.server import ServerEngine
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_supervisor import EngineSupply, Scaling
from antiphon.rollout.pool import EnginePool
from antiphon.run.device_assignment import AssignDevices, DeviceAssignment
from antiphon.run.model_files import model_shape

ENGINE_WORKER = "antiphon.engines.worker:EngineWorker"

Engine = RemoteEngine | ServerEngine


class _NoDevicesError(WorkerDiedError):
    """The devices of an engine are not there."""


class EngineStarter:
    """Starts the engines of a pool that run one model; each has an index, and the kind and the devices of that index."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        model: Path,
        config: EngineConfig,
        channel: str = "shared_memory",
        assign_devices: AssignDevices = lambda number: DeviceAssignment(),
        idle_seconds: float = 0.0,
    ) -> None:
        """Prepare to start engines.

        Args:
            cluster: Starts the workers of engines.
            name: Common part of the workers' names.
            model: Directory of the model.
            config: The kinds of engines, and how many there are.
            channel: Weight channel that new weights come by.
            assign_devices: Returns the devices of an engine by its index.
            idle_seconds: With a value above 0, only `config.minimum` engines start at first; others start when they are
                needed, and end when they have been idle for so long.
        """
        self._kinds = config.engine_kinds
        also = (f"engine.also.{number}.kind" for number, kind in enumerate(config.also) for _ in range(kind.replicas))
        self._keys = [*["engine.kind"] * config.replicas, *also]  # of the names of the kinds
        most = len(self._kinds)
        self._least = config.minimum or most
        self.wanted = self._least if idle_seconds else most
        self.scaling = Scaling(most, idle_seconds, self.close) if self.wanted < most else None
        self._cluster = cluster
        self._name = name
        self._names = (f"{name}-{number}" for number in itertools.count())
        self._model = model
        self._channel = channel
        self._assign_devices = assign_devices
        self._vocabulary = int(model_shape(model)["vocab_size"])
        self._engines: dict[int, Engine] = {}  # by index
        # Holds the devices that a pool shares with what trains, while an engine starts on them; set once there is a pool.
        self.hold_devices: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    async def start_first(self, deadlines: Deadlines, deadline: float, report: Callable[[str], None]) -> list[Engine]:
        """Start the engines that a pool begins with, as many as are ready within `deadline` seconds.

        Raises:
            AntiphonError: Fewer than the minimum are ready; the first error of those that are not.
        """

        def start(index: int) -> Awaitable[Engine]:
            on = f"{self._name}-{index} to load the model"
            return deadlines.wait(
                self._start(index), name="start", owner="run", on=on, deadline=deadline, key="rollout.timeout"
            )

        tolerant = self._least < self.wanted
        results = await asyncio.gather(*map(start, range(self.wanted)), return_exceptions=tolerant)
        engines = [each for each in results if not isinstance(each, BaseException)]
        for error in (each for each in results if isinstance(each, BaseException)):
            if not isinstance(error, WorkerDiedError | StallError) or len(engines) < self._least:
                raise error
            report(f"the run begins with {len(engines)} of {self.wanted} engines: {error}")
        return engines

    async def start_replacement(self) -> Engine:
        """Start an engine at the first free index whose devices are there; `WorkerDiedError` if there is none."""
        lost = WorkerDiedError(f"{self._name}: all engines are running")
        for index in range(len(self._kinds)):
            if index not in self._engines or self._engines[index].dead:
                try:
                    return await self._start(index)
                except WorkerDiedError as error:
                    if self._kinds[index].server_options is None and not isinstance(error, _NoDevicesError):
                        raise  # it died as it started, which the pool reports
                    lost = error
        raise lost

    @property
    def workers(self) -> list[WorkerHandle]:
        """The workers of engines that live, without servers."""
        return [each.handle for each in self._engines.values() if isinstance(each, RemoteEngine) and not each.dead]

    async def close(self, engine: InferenceEngine) -> None:
        """End an engine that has left its pool; its index is free then."""
        index, started = next((index, started) for index, started in self._engines.items() if started is engine)
        if isinstance(started, RemoteEngine):  # servers are ended by those who started them
            await started.close()
        del self._engines[index]

    async def _start(self, index: int) -> Engine:
        config = self._kinds[index]
        if (servers := config.server_options) is not None:
            number = self._kinds[:index].count(config)
            return await self._wait_ready(index, ServerEngine(servers, number, self._model, config, self._channel))
        place, colocated = await self._reserve_devices(index)
        async with self.hold_devices() if colocated else nullcontext():
            settings = config.with_sleep_mode if colocated else config
            args = (config.kind, str(self._model), settings, self._channel, self._keys[index])
            handle = self._cluster.spawn(next(self._names), ENGINE_WORKER, *args, python=config.python, place=place)
            engine = RemoteEngine(handle, colocated=colocated, device=place.kind if place else "")
            return await self._wait_ready(index, engine)

    async def _wait_ready(self, index: int, engine: Engine) -> Engine:
        self._engines[index] = engine
        try:
            await engine.ready()
        except BaseException:  # it belongs to nobody, and may hang
            engine.kill()
            del self._engines[index]
            raise
        if engine.vocabulary != self._vocabulary:
            kind = self._kinds[index].kind
            raise ConfigError(
                f"{self._name}-{index} ({kind}) has a vocabulary of {engine.vocabulary:,} tokens, and the "
                f"model at {self._model} one of {self._vocabulary:,}: what it samples could not be trained on",
                key=self._keys[index],
                value=kind,
            )
        return engine

    async def _reserve_devices(self, index: int) -> DeviceAssignment:
        try:
            devices = self._assign_devices(index)
            await self._cluster.reserve([devices.place] if devices.place else [])
        except ConfigError as error:  # a node has left, or has not come yet
            raise _NoDevicesError(f"{self._name}-{index} has nowhere to run: {error}") from error
        return devices


async def start_engines(
    starter: EngineStarter,
    rollout: RolloutConfig,
    deadlines: Deadlines,
    events: Events,
    report: Callable[[str], None],
    prefers: Mapping[str, str] | None = None,
) -> tuple[EnginePool, int]:
    """Start a pool of engines; returns it with the number of tokens that a sequence may have in all of them."""
    engines = await starter.start_first(deadlines, rollout.timeout, report)
    pool = EnginePool(
        engines,
        deadlines,
        rollout,
        events=events,
        report_death=report,
        supply=EngineSupply(start=starter.start_replacement, target=starter.wanted, scaling=starter.scaling),
        preferred_devices=prefers,
    )
    starter.hold_devices = pool.hold_devices
    return pool, min(engine.max_length for engine in engines)

"""A rollout worker process: engines, environments and graders of one node, on an event loop of its own.

`rollout.remote_workers.RolloutWorkers` calls it.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.cluster.devices import with_visible_gpus
from antiphon.cluster.placement import Placement, gpus_of
from antiphon.core.deadlines import Deadlines
from antiphon.core.rpc import STARTED, AsyncWorker, handlers_of
from antiphon.core.types import Trajectory
from antiphon.record.events import RARE, Events
from antiphon.record.payloads import PayloadWriter
from antiphon.record.run_dir import RunLineage
from antiphon.rollout.backend import LocalRollouts, WeightReceiver
from antiphon.rollout.remote_workers import Counts
from antiphon.rollout.reward_monitor import text_statistics
from antiphon.run.config import RunConfig
from antiphon.run.device_assignment import DeviceAssignment
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.graders import Judges, start_graders
from antiphon.run.launch.rollouts import start_rollouts
from antiphon.run.supervision import run_supervised
from antiphon.tasks.rewards.judge_options import remote_judge_key

ENGINES = 1000  # that a worker may have in its life, for each to have a number of its own


class RolloutWorkerProcess(AsyncWorker):
    """Runs attempts on its share of the engines."""

    def __init__(
        self,
        serial: int,
        model: str,
        config: RunConfig,
        devices: Sequence[DeviceAssignment],
        lineage: RunLineage,
        record_events: bool,
    ) -> None:
        """Prepare to start engines.

        Args:
            serial: Number of the worker among all of the run.
            model: Directory of the model.
            config: The run's configuration, with as many engines as there are `devices`.
            devices: Devices of each engine; their GPUs are the only visible ones.
            lineage: Directory and lineage of the run.
            record_events: False if the controller needs rare events alone.
        """
        self._serial = serial
        self._model = Path(model)
        self._config = config
        gpus = gpus_of(each.place for each in devices)
        self._devices = [each._replace(place=each.place and with_visible_gpus(each.place, gpus)) for each in devices]
        self._lineage = lineage
        self._events = _ForwardedEvents(self._reply, record_events, serial * ENGINES)
        self._rollouts: LocalRollouts | None = None
        super().__init__()

    @override
    def _state(self) -> Counts:
        if (rollouts := self._rollouts) is None:
            return Counts()
        return Counts(rollouts.version, rollouts.engines, rollouts.generated_tokens, rollouts.requeued_tokens)

    @override
    async def _live(self) -> None:
        config, (directory, lineage) = self._config, self._lineage
        name = f"rollout-{self._serial}"
        async with AsyncExitStack() as stack:
            cluster: Cluster = CLUSTERS.resolve("local")(config.cluster, directory.logs / name)
            stack.push_async_callback(cluster.close)
            places = tuple(each.place for each in self._devices if each.place)
            context = LaunchContext(
                cluster=cluster,
                config=config,
                placement=Placement({"engine": places} if places else {}),
                deadlines=Deadlines(),
                events=self._events,
                report=partial(self._reply, "message", STARTED),
            )
            judges = Judges(
                {task.name: partial(self._ask, task.name) for task in config.tasks if task.judge is not None},
                {model: partial(self._ask, model) for model in config.classifiers},
                {key: partial(self._ask, key) for key in map(remote_judge_key, config.remote_judges)},
            )
            graders = await stack.enter_async_context(start_graders(context, judges))
            rollouts = await start_rollouts(context, self._model, graders, stack, self._devices.__getitem__)
            self._rollouts = rollouts
            files = PayloadWriter(directory.rollouts, f"lineage-{lineage}-{name}", lineage)
            stack.push_async_callback(files.close)
            rollouts.store = partial(_store, files)
            handlers = handlers_of(rollouts) | {"health": partial(asyncio.sleep, 0)}
            await run_supervised([rollouts.watch(self._request_weights)], partial(self._serve, handlers=handlers))

    async def _request_weights(self, engine: WeightReceiver) -> None:
        self._reply("stale")


async def _store(files: PayloadWriter, trajectory: Trajectory) -> Trajectory:
    """Keep the payload of a trajectory in a file; return the trajectory with a reference and statistics of its text."""
    meta = replace(trajectory.meta, wording=text_statistics(trajectory.segments))
    return await files.write(replace(trajectory, meta=meta))


class _ForwardedEvents(Events):
    """Events that are sent to the controller."""

    def __init__(self, reply: Callable[..., None], record_events: bool, first_engine: int) -> None:
        super().__init__()
        self.engine_numbers = itertools.count(first_engine)
        self._reply = reply
        self._record_events = record_events

    @property
    @override
    def enabled(self) -> bool:
        return self._record_events

    @override
    def add(self, event: str, **what: Any) -> None:
        if self._record_events or event in RARE:
            self._reply("event", value=(event, what))

"""The policy's version, and the only way to the learner that changes it.

consumes     batches and groups, inside `WeightPublisher.updating`
waits for    engines to load one version before the next is published
unblocked by engines that have loaded
produces     versions, which `on_publish` receives
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from antiphon.algorithms.rewards import AlgorithmState
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import StateError
from antiphon.core.failpoints import hit
from antiphon.core.types import Group, PolicyVersion, TrainBatch, WeightsUpdate
from antiphon.learning.backend import StepResult, TrainBackend
from antiphon.learning.config import OptimizerConfig
from antiphon.record.ledger import Ledger
from antiphon.rollout.backend import WeightReceiver
from antiphon.run.config import RunConfig
from antiphon.run.device_sharing import SharedDevices
from antiphon.run.waits import RunWaits
from antiphon.weights.base import TransferContext


class WeightPublisher:
    """Owns version, lock, publication, loading and refreshing of a run's weights.

    The learner is stepped, restored, published and saved through the `LearnerAccess` of `updating` alone. So weights never
    change while they are published, or while a replacement engine loads them.
    """

    def __init__(
        self,
        config: RunConfig,
        deadlines: Deadlines,
        devices: SharedDevices,
        transfer: TransferContext,
        version: PolicyVersion = PolicyVersion(0, 0),
    ) -> None:
        """Begin at `version`, whose weights engines and learner have, or will have after `LearnerAccess.restore`."""
        self.version = version
        self.engine_version = version  # that engines have, or load
        # Receives each new version, and whether engines get it.
        self.on_publish: Callable[[PolicyVersion, bool], None] | None = None
        self.loaded_at = 0.0  # when all engines had loaded the last version
        self._config = config
        self._waits = RunWaits(config, deadlines)
        self._devices = devices
        self._transfer = transfer
        self._lock = asyncio.Lock()
        self._owner: asyncio.TaskGroup | None = None
        self._ledger: Ledger | None = None
        self._published: WeightsUpdate | None = None  # engines can load it until the next is published
        self._loading: asyncio.Task[None] | None = None

    def start(self, owner: asyncio.TaskGroup, ledger: Ledger) -> None:
        """Begin to publish: `owner` owns the tasks in which engines load, `ledger` records versions."""
        self._owner, self._ledger, self._loading = owner, ledger, None

    @property
    def shared_devices(self) -> bool:
        """True if training and generation take turns on some devices."""
        return self._devices.shared

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the newest version; empty if engines do not get it, or its channel says nothing of it."""
        update = self._published
        is_newest = update is not None and self.engine_version == self.version
        return {"weights/megabytes": update.sent / 1e6} if update and update.sent and is_newest else {}

    @property
    def is_loading(self) -> bool:
        """True while engines load what was published last."""
        return self._loading is not None and not self._loading.done()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator["LearnerAccess"]:
        """Hold the lock of the weights; within it, give access to the learner."""
        async with self._lock:
            access = LearnerAccess(self, self._devices.training)
            try:
                yield access
            finally:
                access.close()

    async def refresh(self, receiver: WeightReceiver) -> None:
        """Load the weights that were published last into a replacement engine or rollout worker.

        The learner may have others by now. Before anything is published there is nothing to do: the first version goes to all
        engines there are by then.
        """
        async with self._lock:
            await self.wait_loaded()
            update = self._published
            if update is not None and receiver.version < update.version:
                loading = receiver.load(update, self._config.rollout.on_update)
                await self._waits(loading, "load", "a new engine to load weights")

    async def update_engines(self) -> None:
        """Publish the newest version if engines have an older one."""
        async with self._lock:
            if self.engine_version != self.version:
                await self._publish(self.version)

    async def wait_loaded(self) -> None:
        """Return when engines have loaded what was published last."""
        if self._loading is not None:
            await self._waits(asyncio.shield(self._loading), "load", "engines to load weights")

    async def switch_to_generation(self) -> None:
        """Give shared devices to the engines."""
        await self._wait_for_devices(self._devices.switch_to_generation())

    async def wait_saved(self) -> None:
        """Return when the checkpoint that `LearnerAccess.save` began is written."""
        await self._devices.training.wait_saved()

    async def died(self) -> None:
        """Return never; raise `WorkerDiedError` when a process of a model ends."""
        await self._devices.training.died()

    async def _switch_to_training(self) -> None:
        """Give shared devices to the learner, once engines have loaded what was published."""
        if self._devices.shared:
            await self.wait_loaded()
            await self._wait_for_devices(self._devices.switch_to_training())

    async def _wait_for_devices(self, switch: Awaitable[None]) -> None:
        """Wait until shared devices have passed from engines to the learner, or back."""
        await self._waits(switch, "turn", "devices that are shared")

    async def _publish(self, version: PolicyVersion) -> None:
        """Publish the learner's weights as `version`; engines load them in the background."""
        assert self._owner is not None and self._ledger is not None
        await self.wait_loaded()
        hit("publish")
        publishing = self._devices.training.publish(version.n, self._transfer)
        update = await self._waits(publishing, "publish", "the learner")
        await self._wait_for_devices(self._devices.end_training())
        self._ledger.add_version(version, update.manifest.digest if update.manifest else None)
        self.version, self.engine_version, self._published = version, version, update
        hit("published")
        self._loading = self._owner.create_task(self._load(update), name=f"load version {version.n}")

    async def _keep_engines(self, version: PolicyVersion) -> None:
        """Count a version that engines do not get, and let them generate on with the weights that they have."""
        await self.switch_to_generation()
        self.version = version

    async def _load(self, update: WeightsUpdate) -> None:
        loading = self._devices.rollouts.load(update, self._config.rollout.on_update)
        await self._waits(loading, "load", "engines to load weights", owner="pool")
        self.loaded_at = asyncio.get_running_loop().time()


class LearnerAccess:
    """The learner, for as long as `WeightPublisher.updating` holds its lock; `StateError` afterwards.

    Whatever is asked of it, it is on its devices: it may not be able to do anything without them.
    """

    def __init__(self, publisher: WeightPublisher, training: TrainBackend) -> None:
        self._publisher = publisher
        self._open_training: TrainBackend | None = training

    def close(self) -> None:
        """End the access."""
        self._open_training = None

    @property
    def _training(self) -> TrainBackend:
        if self._open_training is None:
            raise StateError("the learner is used outside WeightPublisher.updating")
        return self._open_training

    async def begin(self, config: RunConfig) -> None:
        """Start reinforcement learning with fresh optimisers."""
        training = await self._on_devices()
        beginning = training.begin(config.algorithm, config.learner, config.critic, config.steps)
        await self._publisher._waits(beginning, "begin", "the learner")

    async def begin_supervised(self, optimizer: OptimizerConfig, updates: int) -> None:
        """Start supervised fine-tuning with a fresh optimiser."""
        training = await self._on_devices()
        await self._publisher._waits(training.begin_supervised(optimizer, updates), "begin", "the learner")

    async def learn(self, number: int, groups: Sequence[Group], algorithm_state: AlgorithmState) -> StepResult:
        """Take training step `number` through its stages."""
        training = self._training
        await self._publisher._switch_to_training()
        return await training.learn(number, self._publisher.version.n, groups, algorithm_state)

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        """Do the updates of a batch; returns metrics."""
        training = self._training
        await self._publisher._switch_to_training()
        return await self._publisher._waits(training.step(batch), "step", "the learner")

    async def publish(self, to_engines: bool = True) -> None:
        """Publish the learner's weights as the next version; without `to_engines`, engines keep those that they have."""
        await self._on_devices()
        publisher = self._publisher
        await (publisher._publish if to_engines else publisher._keep_engines)(publisher.version.next())
        if publisher.on_publish is not None:
            publisher.on_publish(publisher.version, to_engines)

    async def restore(self, checkpoint: Path) -> None:
        """Load a checkpoint, and give its weights to engines as the version that it has."""
        training = await self._on_devices()
        await self._publisher._waits(training.restore(checkpoint), "restore", "the learner")
        if self._publisher.version.n:  # else engines have it
            await self._publisher._publish(self._publisher.version)

    async def save(self, place: Path) -> None:
        """Begin to write a checkpoint into `place`; training may go on when this returns."""
        training = await self._on_devices()
        await self._publisher._waits(training.save(place), "checkpoint", "the learner")

    async def _on_devices(self) -> TrainBackend:
        training = self._training
        if self._publisher._devices.models_are_away:
            await self._publisher._switch_to_training()
        return training

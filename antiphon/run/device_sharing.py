"""Whose turn it is on devices that training and generation share."""

import asyncio
from collections.abc import Sequence

from antiphon.learning.learner import ModelRoles
from antiphon.learning.remote import RemoteTrainer
from antiphon.rollout.pool import EnginePool
from antiphon.rollout.remote_workers import RolloutWorkers


class SharedDevices:
    """Takes turns between `models` and the engines that are lent to them. Where nothing is shared, neither waits for the
    other, and nothing here does anything.

    While models train, shared engines sleep: requests that ran there go on elsewhere, or wait; what is co-located stands still,
    what overlaps shrinks. While engines generate, models have left the devices.
    """

    def __init__(
        self,
        models: ModelRoles | RemoteTrainer,
        pool: EnginePool | RolloutWorkers,
        judges: Sequence[EnginePool],
        *,
        shared: bool,
    ) -> None:
        self.shared = shared
        self._models = models
        self._pool = pool
        self._judges = judges
        self._training: bool | None = None  # at first all are on their devices, and it is nobody's turn

    async def train(self) -> None:
        """The models' turn."""
        if self.shared and self._training is not True:
            self._training = True
            await asyncio.gather(*(pool.sleep_colocated() for pool in (self._pool, *self._judges)))
            await self._models.reload()

    async def leave(self) -> None:
        """The end of the models' turn. Judges wake; the engines of the run do when they load what was published."""
        if self.shared and self._training is not False:
            self._training = False
            await self._models.offload()
            await asyncio.gather(*(judge.wake_all() for judge in self._judges))

    async def generate(self) -> None:
        """The engines' turn, with the weights they have."""
        if self.shared:
            await self.leave()
            await self._pool.wake_all()

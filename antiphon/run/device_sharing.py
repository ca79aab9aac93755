"""Turns of training and generation on devices that they share."""

from antiphon.learning.backend import TrainBackend
from antiphon.rollout.backend import RolloutBackend


class SharedDevices:
    """Training and rollouts, and whose turn it is on the devices that they share.

    While models train, shared engines sleep: their requests go on elsewhere, or wait. While engines generate, models have
    left the devices. If nothing is shared, neither waits for the other, and all methods do nothing.
    """

    def __init__(self, training: TrainBackend, rollouts: RolloutBackend, *, shared: bool) -> None:
        self.training = training
        self.rollouts = rollouts
        self.shared = shared
        self._is_training: bool | None = None  # at first all are on their devices, and it is nobody's turn

    @property
    def models_are_away(self) -> bool:
        """True if models have left the devices for engines that generate."""
        return self.shared and self._is_training is False

    async def switch_to_training(self) -> None:
        """Put shared engines to sleep, and bring the models back to their devices."""
        if self.shared and self._is_training is not True:
            self._is_training = True
            await self.rollouts.release_devices()
            await self.training.reload()

    async def end_training(self) -> None:
        """Move the models off their devices. Judges wake; engines do when they load what was published."""
        if self.shared and self._is_training is not False:
            self._is_training = False
            await self.training.offload()
            await self.rollouts.reclaim_judges()

    async def switch_to_generation(self) -> None:
        """Wake shared engines, with the weights they have."""
        if self.shared:
            await self.end_training()
            await self.rollouts.reclaim_engines()

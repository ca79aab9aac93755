"""An engine's end of a weight channel, in a process of its own."""

import hashlib

import torch

from antiphon.core import failpoints as points
from antiphon.core.types import WeightsUpdate
from antiphon.core.workers import Worker
from antiphon.weights.base import CHANNELS


class Receiver(Worker):
    """Takes weights, and says what it got."""

    def __init__(self, channel: str) -> None:
        self._receive = CHANNELS.resolve(channel).receive

    def arm(self, point: str, count: int) -> None:
        points.arm(point, count)

    def load(self, update: WeightsUpdate) -> str:
        digest = hashlib.blake2b()
        for name, tensor in self._receive(update):
            digest.update(
                f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
                + tensor.cpu().view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()

"""The ends of a weight channel, in processes of their own: an engine's, and that of a rank which sends its pieces."""

import hashlib
import os
from pathlib import Path

import torch

from antiphon.core import failpoints as points
from antiphon.core.types import WeightsUpdate
from antiphon.core.workers import Worker
from antiphon.weights.base import CHANNELS, TransferContext, open_channel
from antiphon.weights.manifest import Piece, SentPieces
from antiphon.weights.rendezvous import RunStore
from antiphon.weights.reshard import receive_weights


class Receiver(Worker):
    """Takes weights, and says what it got."""

    def __init__(self, channel: str) -> None:
        self._channel = CHANNELS.resolve(channel)

    def arm(self, point: str, count: int) -> None:
        points.arm(point, count)

    def die_at_next_join(self) -> None:
        """End the process when it knows the address of a peer, and has not connected to it."""
        get = RunStore.get

        def get_and_die(store: RunStore, key: str) -> bytes:
            value = get(store, key)
            if key.startswith("group-"):
                os._exit(1)
            return value

        RunStore.get = get_and_die

    def load(self, update: WeightsUpdate) -> str:
        return digest_of(receive_weights(self._channel, update))


def digest_of(named) -> str:
    """The digest of tensors by name, in their order."""
    digest = hashlib.blake2b()
    for name, tensor in named:
        digest.update(
            f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.cpu().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def rows(rank: int, version: int, count: int, width: int) -> torch.Tensor:
    """The rows of a tensor that a rank has at a version: most are those of the version before."""
    generator = torch.Generator().manual_seed(1000 + rank)
    found = torch.randint(0, 256, (count, width), dtype=torch.uint8, generator=generator)
    found[: count // 50] += version
    return found


class SendingRank(Worker):
    """A rank of a learner, which sends its rows of a tensor."""

    def __init__(self, directory: str, encoding: str, rank: int, ranks: int, count: int, width: int) -> None:
        self._channel = open_channel(TransferContext(Path(directory), "distributed", encoding=encoding))
        self._shape = rank, count, width
        self._piece = Piece(name="a", start=(rank * count, 0), size=(count, width), whole=(ranks * count, width))

    def arm(self, point: str, count: int) -> None:
        points.arm(point, count)

    def send(self, version: int) -> SentPieces:
        rank, count, width = self._shape
        update = self._channel.send([("a", rows(rank, version, count, width))], version)
        return SentPieces(update, (self._piece,))

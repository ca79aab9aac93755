"""Weights between processes that see the same files, by default in shared memory: one file, each version over the one before.

Both ends keep it mapped, so that a version costs two copies of its bytes, and their digest at either end. The first costs more,
because the machine has to find the memory.
"""

import os
from collections.abc import Iterator
from functools import lru_cache
from uuid import uuid4

import numpy as np
import torch

from antiphon.core.errors import WeightsError
from antiphon.core.types import WeightsUpdate
from antiphon.weights.base import TransferContext
from antiphon.weights.manifest import Adapters, NamedTensors
from antiphon.weights.tensors import pack_tensors, unpack_tensors


class SharedMemory:
    """A file in the directory of the exchange."""

    def __init__(self, context: TransferContext) -> None:
        self._directory = context.directory
        self._path = self._directory / "weights"  # of none yet
        self._content = torch.empty(0, dtype=torch.uint8)

    def send(self, named: NamedTensors, version: int, adapters: Adapters | None = None) -> WeightsUpdate:
        """See `WeightChannel.send`."""
        manifest = pack_tensors(named, self._mapped, adapters)
        return WeightsUpdate(version=version, location=str(self._path), manifest=manifest)

    def _mapped(self, size: int) -> torch.Tensor:
        if len(self._content) != size:
            self._path.unlink(missing_ok=True)
            self._path = self._directory / f"weights-{uuid4().hex}"  # who has mapped another keeps that
            try:
                with self._path.open("wb") as file:  # mapped memory that is not there ends a process without a word
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise WeightsError(
                    f"{size / 1e9:.2f} GB of weights do not fit into {self._directory}: {error.strerror}; weights.directory "
                    "names another place"
                ) from error
            self._content = torch.from_file(str(self._path), shared=True, size=size, dtype=torch.uint8)
        return self._content

    @staticmethod
    def receive(update: WeightsUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightChannel.receive`."""
        try:
            content = _read(update.location, update.manifest.size)
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"weights of version {update.version} cannot be read at {update.location}: {error}"
            ) from error
        yield from unpack_tensors(update, content)


@lru_cache(maxsize=1)
def _read(location: str, size: int) -> torch.Tensor:
    return torch.from_numpy(np.memmap(location, dtype=np.uint8, mode="c", shape=(size,)))

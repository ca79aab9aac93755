"""A weight channel in a file that learner and engines see, by default in shared memory. Each version overwrites the last.

Both ends keep the file mapped, so a version costs two copies of its bytes and a digest at either end. The first version
costs more, because its memory has to be allocated.
"""

import os
import threading
from collections.abc import Iterator
from uuid import uuid4

import numpy as np
import torch
from typing_extensions import override

from antiphon.core.errors import WeightsError
from antiphon.core.types import WeightsUpdate
from antiphon.weights.base import TransferContext, WeightChannel
from antiphon.weights.manifest import Adapters, NamedTensors
from antiphon.weights.tensors import pack_tensors, unpack_tensors


class SharedMemory(WeightChannel):
    """A file in the directory of the context."""

    def __init__(self, context: TransferContext) -> None:
        self._directory, self._dtype = context.directory, context.dtype
        self._path = self._directory / "weights"  # no file yet
        self._content = torch.empty(0, dtype=torch.uint8)

    @override
    def send(self, named: NamedTensors, version: int, adapters: Adapters | None = None) -> WeightsUpdate:
        manifest = pack_tensors(named, self._mapped, adapters, self._dtype)
        return WeightsUpdate(version=version, location=str(self._path), manifest=manifest, sent=manifest.size)

    def _mapped(self, size: int) -> torch.Tensor:
        if len(self._content) != size:
            self._path.unlink(missing_ok=True)
            self._path = self._directory / f"weights-{uuid4().hex}"  # processes that mapped another file keep that
            try:
                with self._path.open(
                    "wb"
                ) as file:  # writing to mapped memory that cannot be allocated kills the process
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise WeightsError(
                    f"{size / 1e9:.2f} GB of weights do not fit into {self._directory}: {error.strerror}; weights.directory "
                    "names another place"
                ) from error
            self._content = torch.from_file(str(self._path), shared=True, size=size, dtype=torch.uint8)
        return self._content

    @staticmethod
    @override
    def receive(update: WeightsUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            content = _read(update.location, update.manifest.size)
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"weights of version {update.version} cannot be read at {update.location}: {error}",
                version=update.version,
            ) from error
        yield from unpack_tensors(update, content)


class _Mapped(threading.local):
    """The file that a thread has mapped: an engine receives from each sender in a thread of its own."""

    file: tuple[str, int] | None = None
    content: torch.Tensor


_mapped = _Mapped()


def _read(location: str, size: int) -> torch.Tensor:
    if _mapped.file != (location, size):
        _mapped.file = None
        _mapped.content = torch.from_numpy(np.memmap(location, dtype=np.uint8, mode="c", shape=(size,)))
        _mapped.file = location, size
    return _mapped.content

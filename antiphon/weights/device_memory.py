"""A weight channel in the memory of a device that learner and engines share: on a GPU by CUDA IPC.

The learner keeps a second copy of the weights there and overwrites it with each version; engines copy from it.
"""

import base64
import pickle
from collections.abc import Iterator
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler

import torch
from torch import multiprocessing
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from typing_extensions import override

from antiphon.core.errors import WeightsError
from antiphon.core.types import WeightsUpdate
from antiphon.weights.base import TransferContext, WeightChannel
from antiphon.weights.manifest import Adapters, NamedTensors
from antiphon.weights.tensors import pack_tensors, unpack_tensors

_DEVICE = 6  # index of the argument of `rebuild_cuda_tensor` that is the sender's number of the device


class DeviceMemory(WeightChannel):
    """A buffer on the device that holds the weights."""

    def __init__(self, context: TransferContext) -> None:
        self._dtype = context.dtype
        self._content = torch.empty(0, dtype=torch.uint8)
        self._location = ""

    @override
    def send(self, named: NamedTensors, version: int, adapters: Adapters | None = None) -> WeightsUpdate:
        tensors = list(named)
        device = tensors[0][1].device

        def buffer(size: int) -> torch.Tensor:
            if (len(self._content), self._content.device) != (size, device):
                self._content = torch.zeros(size, dtype=torch.uint8, device=device)
                self._location = _handle(self._content)
            return self._content

        manifest = pack_tensors(tensors, buffer, adapters, self._dtype)
        return WeightsUpdate(version=version, location=self._location, manifest=manifest, sent=manifest.size)

    @staticmethod
    @override
    def receive(update: WeightsUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors as `WeightChannel.receive` does; raise `WeightsError` also if the device is not visible here."""
        content = _opened(update.location)
        yield from unpack_tensors(update, content)
        if content.is_cuda:  # finish copies before the sender may overwrite the buffer
            torch.cuda.synchronize(content.device)


def _handle(content: torch.Tensor) -> str:
    """Return the location with which another process opens the memory."""
    multiprocessing.set_sharing_strategy("file_system")  # host memory gets names, which any process can open
    device = str(torch.cuda.get_device_properties(content.device).uuid) if content.is_cuda else ""
    return base64.b64encode(bytes(ForkingPickler.dumps((device, reduce_tensor(content))))).decode()


@lru_cache(maxsize=1)
def _opened(location: str) -> torch.Tensor:
    device, (rebuild, arguments) = pickle.loads(base64.b64decode(location))
    if rebuild is rebuild_cuda_tensor:
        seen = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
        if device not in seen:
            raise WeightsError(
                f"the weights are on GPU {device}, which this process does not see: weights.channel device_memory is for "
                "engines on the learner's device"
            )
        arguments = (*arguments[:_DEVICE], seen.index(device), *arguments[_DEVICE + 1 :])
    content: torch.Tensor = rebuild(*arguments)
    return content

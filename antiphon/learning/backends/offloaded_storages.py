"""Memory that leaves a device and comes back to the same tensors, for backends whose buffers many tensors are views of."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch

from antiphon.learning.checkpointed_learner import trim_memory
from antiphon.learning.pack_learner import PackLearner
from antiphon.learning.parallel.sharding import ShardedModel


class OffloadedStorages:
    """Contents of storages that were taken off their device, in the memory of the machine.

    A tensor keeps its storage, which is empty meanwhile: so views of a buffer stay views of it, and communication groups and
    optimisers find the tensors that they know. Nothing may be computed with the tensors until `restore`.
    """

    def __init__(self) -> None:
        self._offloaded: list[tuple[torch.UntypedStorage, torch.UntypedStorage | int]] = []

    def take(self, tensors: Iterable[torch.Tensor], device: torch.device, *, copy: bool = True) -> None:
        """Free the storages that `tensors` have on `device`.

        Args:
            tensors: Of which several may have one storage.
            device: Tensors elsewhere stay what they are.
            copy: Keep the contents. Without, a storage has the same size again after `restore`, and zeros in it.
        """
        for storage in _storages(tensors, device):
            size, pinned = storage.nbytes(), device.type == "cuda"
            offloaded = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage() if copy else size
            if isinstance(offloaded, torch.UntypedStorage):
                offloaded.copy_(storage)
            self._offloaded.append((storage, offloaded))
            storage.resize_(0)

    def restore(self) -> None:
        """Bring everything back."""
        while self._offloaded:
            storage, offloaded = self._offloaded.pop()
            if isinstance(offloaded, int):
                storage.resize_(offloaded)
                storage.fill_(0)
            else:
                storage.resize_(offloaded.nbytes())
                storage.copy_(offloaded)


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, sets and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from find_tensors([*value.values()])
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from find_tensors(each)


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Return the storages on a device that can be freed, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable():
                found.setdefault(storage.data_ptr(), storage)
    return [*found.values()]


class OffloadableModel(ShardedModel):
    """A model that says what it has on its device."""

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """Yield all that is on the device between steps, the optimiser's too, in any order, also more than once."""
        raise NotImplementedError

    def scratch_tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is on the device, too, and whose contents no later step needs."""
        raise NotImplementedError


class OffloadingLearner(PackLearner):
    """A learner that leaves its device with its tensors where they are, in the buffers of its backend."""

    shards: OffloadableModel

    @cached_property
    def _offloaded(self) -> OffloadedStorages:
        return OffloadedStorages()

    def offload(self) -> None:
        """Move everything to the memory of the machine, so that others can use the device."""
        self._offloaded.take(self.shards.scratch_tensors(), self.device, copy=False)
        self._offloaded.take(self.shards.device_tensors(), self.device)
        trim_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move everything back to the device."""
        self._offloaded.restore()

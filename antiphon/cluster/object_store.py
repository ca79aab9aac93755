"""A weight channel through Ray's object store, which reaches other machines."""

import warnings
from collections.abc import Iterator

import torch

from antiphon.cluster.ray import get_object, put_object
from antiphon.core.types import WeightsUpdate
from antiphon.weights.base import TransferContext
from antiphon.weights.manifest import Adapters, NamedTensors
from antiphon.weights.tensors import HostBuffer, pack_tensors, unpack_tensors


class ObjectStore:
    """A `WeightChannel` between Ray workers. The store keeps one version."""

    def __init__(self, context: TransferContext) -> None:
        self._copy, self._dtype = HostBuffer(), context.dtype

    def send(self, named: NamedTensors, version: int, adapters: Adapters | None = None) -> WeightsUpdate:
        """Put the tensors into the object store and return the update that locates them."""
        manifest = pack_tensors(named, self._copy, adapters, self._dtype)
        location = put_object("weights", self._copy.content.numpy())
        return WeightsUpdate(version=version, location=location, manifest=manifest, sent=manifest.size)

    @staticmethod
    def receive(update: WeightsUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of an update by name."""
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # torch warns that the array is read-only; nothing writes to it
            content = torch.from_numpy(get_object(update.location))
        yield from unpack_tensors(update, content)

"""A weight channel through Ray's object store, which reaches other machines.

With the encoding `delta` the store has the newest version and what changed since the one before. An engine that has kept that
one takes the difference alone, so no more crosses to its machine.
"""

import threading
import warnings
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch

from antiphon.cluster.ray import get_object, put_object
from antiphon.core.errors import WeightsError
from antiphon.core.types import WeightsUpdate
from antiphon.weights.base import TransferContext
from antiphon.weights.manifest import Adapters, NamedTensors
from antiphon.weights.tensors import unpack_tensors
from antiphon.weights.versions import DELTA, NOTHING, KeptVersion, PackedVersion

WHOLE, DIFFERENCE = "weights", "weights-difference"  # names in the store


class ObjectStore:
    """A `WeightChannel` between Ray workers. The store keeps one version."""

    def __init__(self, context: TransferContext) -> None:
        self._copy, self._encoding = PackedVersion(context), context.encoding

    def send(self, named: NamedTensors, version: int, adapters: Adapters | None = None) -> WeightsUpdate:
        """Put the tensors into the object store and return the update that locates them."""
        manifest = self._copy.pack(named, adapters)
        location = put_object(WHOLE, self._copy.content.numpy())
        if self._encoding == DELTA:
            before, encoded = self._copy.difference or (NOTHING, b"")
            location += f" {before} {put_object(DIFFERENCE, np.frombuffer(encoded, np.uint8))}"
        return WeightsUpdate(version=version, location=location, manifest=manifest, sent=self._copy.sent)

    @staticmethod
    def receive(update: WeightsUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of an update by name."""
        where, *difference = update.location.split()
        kept = _kept(where, threading.get_ident())
        if difference and difference[0] == kept.identity != NOTHING:
            content = kept.change(get_object(difference[1]).tobytes(), update.manifest)
        else:
            with warnings.catch_warnings():
                # torch warns that the array is read-only; nothing writes to it
                warnings.simplefilter("ignore", UserWarning)
                content = torch.from_numpy(get_object(where))
            if difference:
                content = kept.keep(content.clone(), update.manifest)
        try:
            yield from unpack_tensors(update, content)
        except WeightsError:
            kept.forget()
            raise


@cache
def _kept(location: str, thread: int) -> KeptVersion:
    """Return what an engine has kept of a sender; channels know an engine by its thread."""
    return KeptVersion()

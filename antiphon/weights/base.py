"""The interface that moves weights from a learner to engines. Channels differ in how the flat buffer of a version travels."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from antiphon.core.registry import Registry
from antiphon.core.types import WeightsUpdate
from antiphon.weights.config import WeightSyncConfig
from antiphon.weights.manifest import Adapters, NamedTensors

if TYPE_CHECKING:  # the controller knows channels by name, and imports no torch
    import torch


CHANNELS = Registry(
    "weight channel",
    {
        "shared_memory": "antiphon.weights.shared_memory:SharedMemory",
        "device_memory": "antiphon.weights.device_memory:DeviceMemory",
        "distributed": "antiphon.weights.distributed:Distributed",
        "object_store": "antiphon.cluster.object_store:ObjectStore",
    },
)


@dataclass(frozen=True, slots=True)
class TransferContext:
    """Settings of the run that the sending end of a channel needs."""

    directory: Path  # for files that learner and engines see
    channel: str = "shared_memory"
    host: str = "127.0.0.1"  # address that the learner listens on
    dtype: str = ""  # torch's name of the dtype in which floating-point tensors are sent; empty: their own
    encoding: str = "whole"  # or "delta": receivers that have the version before are sent what changed since
    senders: str = "first"  # or "all": ranks of the learner that send

    @staticmethod
    def of(directory: Path, config: WeightSyncConfig, dtype: str, senders: str) -> "TransferContext":
        """Return the settings that a configuration names, with what follows from others of its sections."""
        return TransferContext(directory, config.channel, config.host, dtype, config.encoding, senders)


class WeightChannel(Protocol):
    """Moves versions of weights. The learner makes one for each `TransferContext`; engines call the static `receive` alone."""

    def __init__(self, context: TransferContext) -> None: ...

    def send(self, named: NamedTensors, version: int, adapters: Adapters | None = None) -> WeightsUpdate:
        """Copy the present tensors, in the dtype of the context, and make them available as `version`.

        Another version may be sent only after every receiver has this one. This one stays available until then, also to
        engines that start later.

        Args:
            named: Tensors by name, as a model's `named_parameters` yields them: a tied tensor comes once, under the first of
                its names. Each is gathered after the one before it was copied, so that only one gathered tensor exists at a
                time. They may change after this returns.
            version: Number of the version.
            adapters: Set if `named` comes from `weights.adapters.flatten_adapters`; receivers then add them to the base. They
                are sent in their own dtype.

        Returns:
            The update that receivers need.
        """

    @staticmethod
    def receive(update: WeightsUpdate) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield the tensors of an update by name.

        Adapters come merged into the weights of their base model, under the names in its files. A tensor may be a view: it is
        valid until the receiver reports that it has loaded the update. An engine reports it when `load`, or the `step` that
        loads, returns.

        Raises:
            WeightsError: If any byte differs from what was sent; raised before the first tensor is yielded.
        """


@functools.cache
def open_channel(context: TransferContext) -> WeightChannel:
    """Return the sending end for a context; a process has one for each."""
    opened: WeightChannel = CHANNELS.resolve(context.channel)(context)
    return opened

"""Moving weights: what is sent (a manifest of tensors in one flat buffer), the digest that both ends compute, and the seam
behind which channels differ in how the buffer gets from one end to the other."""

import functools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from antiphon.errors import ConfigError
from antiphon.registry import Registry
from antiphon.types import WeightsUpdate

if TYPE_CHECKING:  # the controller knows channels by name, and imports no torch
    import torch

    from antiphon.weights.tensors import Named

CHANNELS = Registry(
    "weight channel",
    {
        "shared_memory": "antiphon.weights.shared_memory:SharedMemory",
        "device_memory": "antiphon.weights.device_memory:DeviceMemory",
        "distributed": "antiphon.weights.distributed:Distributed",
        "object_store": "antiphon.cluster.object_store:ObjectStore",
    },
)

SHARED_MEMORY = Path("/dev/shm")
BUCKET_BYTES = 16 << 20  # unit of sending and of hashing


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies in the flat buffer."""

    name: str
    dtype: str  # torch's name of it, such as "float32"
    shape: tuple[int, ...]
    offset: int  # bytes
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Adapters:
    """What low-rank adapters are to be added to."""

    base: str  # model directory
    scale: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of a set of weights."""

    tensors: tuple[TensorPlace, ...]
    size: int  # bytes of the buffer
    digest: int
    adapters: Adapters | None = None  # if only these were sent


@dataclass(frozen=True, slots=True)
class Exchange:
    """Where learner and engines of a run meet."""

    directory: Path  # of files that both ends see
    channel: str = "shared_memory"
    host: str = "127.0.0.1"  # on which a learner listens


class WeightChannel(Protocol):
    """A way of weights. The learner builds one for each exchange; engines use `receive` alone."""

    def __init__(self, exchange: Exchange) -> None: ...

    def send(self, named: "Named", version: int, adapters: Adapters | None = None) -> WeightsUpdate:
        """Make the tensors of now known as `version`; a shared (tied) tensor is sent once a name. Each is asked for in turn,
        when the one before is copied, so that no two that were put together are there at once. They may change as soon as this
        returns. With `adapters` they are what `weights.adapters.flat` makes of them, and receivers add them to the base.
        No version follows before every receiver has the one before."""

    @staticmethod
    def receive(update: WeightsUpdate) -> "Iterator[tuple[str, torch.Tensor]]":
        """The tensors of an update, views that live while they are iterated; of adapters, what they make of their base.
        `WeightsError` if any byte is not what was sent, before the first tensor comes."""


@functools.cache
def channel(exchange: Exchange) -> WeightChannel:
    """The sending end at an exchange: one a process."""
    opened: WeightChannel = CHANNELS.resolve(exchange.channel)(exchange)
    return opened


def weight_files(model: Path) -> list[Path]:
    """The files in a model directory that its weights are in, as transformers looks for them. Others beside them have the same
    weights once more, under other names."""
    whole, index = model / "model.safetensors", model / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole] if whole.is_file() else []
    return [model / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]


def shared_directory(name: str, parent: str = "") -> Path:
    """A new directory in `parent`, by default in shared memory, or in the temporary folder where the platform has none. The
    caller removes it. `ConfigError` if it cannot be made."""
    try:
        return Path(
            tempfile.mkdtemp(
                prefix=f"antiphon-{name}-", dir=parent or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
            )
        )
    except OSError as error:
        raise ConfigError(f"weights.directory: nothing can be written to {parent!r}: {error.strerror}") from error

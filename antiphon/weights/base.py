"""Moving weights: what is sent (a manifest of tensors in one flat buffer), the digest that both ends compute, and the seam
behind which channels differ in how the buffer gets from one end to the other."""

import fcntl
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from antiphon.core.errors import ConfigError
from antiphon.core.registry import Registry
from antiphon.core.types import WeightsUpdate

if TYPE_CHECKING:  # the controller knows channels by name, and imports no torch
    import torch

    from antiphon.weights.tensors import NamedTensors


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
LOCK = ".antiphon-lock"  # in a shared directory, locked for as long as the process lives that made it
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
class TransferContext:
    """Where learner and engines of a run meet."""

    directory: Path  # of files that both ends see
    channel: str = "shared_memory"
    host: str = "127.0.0.1"  # on which a learner listens


class WeightChannel(Protocol):
    """A way of weights. The learner builds one for each exchange; engines use `receive` alone."""

    def __init__(self, exchange: TransferContext) -> None: ...

    def send(self, named: "NamedTensors", version: int, adapters: Adapters | None = None) -> WeightsUpdate:
        """Make the tensors of now known as `version`; a shared (tied) tensor is sent once a name. Each is asked for in turn,
        when the one before is copied, so that no two that were put together are there at once. They may change as soon as this
        returns. With `adapters` they are what `weights.adapters.flat` makes of them, and receivers add them to the base.
        No version follows before every receiver has the one before; until then it stays where engines that come later find it,
        too."""

    @staticmethod
    def receive(update: WeightsUpdate) -> "Iterator[tuple[str, torch.Tensor]]":
        """The tensors of an update, views that live while they are iterated; of adapters, what they make of their base.
        `WeightsError` if any byte is not what was sent, before the first tensor comes."""


@functools.cache
def channel(exchange: TransferContext) -> WeightChannel:
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


@contextmanager
def shared_directory(name: str, parent: str = "") -> Iterator[Path]:
    """Make a directory in `parent`, by default in shared memory, or in the temporary folder where the platform has none; remove
    it at the end. Those that killed processes left there are removed, too. `ConfigError` if it cannot be made."""
    remove_abandoned(parent)
    try:
        path, lock = _make_locked(name, parent)
    except OSError as error:
        raise ConfigError(f"weights.directory: nothing can be written to {parent!r}: {error.strerror}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path)
        os.close(lock)


def remove_abandoned(parent: str = "") -> list[Path]:
    """Remove this user's shared directories in `parent` whose processes have ended, however they did: the kernel unlocked them.
    Return what was removed."""
    removed = []
    for lock in _place(parent).glob(f"antiphon-*/{LOCK}"):
        with suppress(OSError):  # a process of its own has locked it, or it is another user's, or being removed
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(lock)
                    removed.append(lock.parent)
            finally:
                os.close(descriptor)
    return removed


def _remove(lock: Path) -> None:
    """Remove a shared directory, its lock last: without one nobody would remove what is left."""
    for path in lock.parent.iterdir():
        if path != lock:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(lock.parent)


def _make_locked(name: str, parent: str) -> tuple[Path, int]:
    """A new directory, and the descriptor of its lock. Until that is locked, another process may take it for abandoned."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"antiphon-{name}-", dir=_place(parent)))
        with suppress(FileNotFoundError):
            descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            except OSError:  # this file system has no locks: then nobody takes it for abandoned either
                pass
            if (path / LOCK).exists() and os.path.samestat(os.fstat(descriptor), (path / LOCK).stat()):
                return path, descriptor
            os.close(descriptor)


def _place(parent: str) -> Path:
    return Path(parent or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else tempfile.gettempdir()))

"""Moving weights: what is sent (a manifest of tensors in one flat buffer), and the digest that both ends compute.

A sender writes version n to a place of its own and never touches it again, so that a slow receiver and a fast sender
need no lock and no rendezvous. The controller removes the place once every receiver has loaded it.
"""

import tempfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.types import WeightsUpdate

SHARED_MEMORY = Path("/dev/shm")
BUCKET_BYTES = 16 << 20  # unit of copying and of hashing: small enough to stay in cache with its digest


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


def plan(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[TensorPlace, ...]:
    """Lay out `(name, dtype, shape, bytes)` one after another, each on a 64-byte boundary."""
    places, offset = [], 0
    for name, dtype, shape, size in tensors:
        places.append(TensorPlace(name, dtype, shape, offset, size))
        offset += -(-size // 64) * 64
    return tuple(places)


def layout_digest(places: Sequence[TensorPlace]) -> int:
    """Where the digest of a version begins: the CRC-32 of its layout, to be continued with the bytes of the buffer. Guards
    against torn and misplaced data, not against an adversary: what can write here can do worse."""
    return zlib.crc32(repr(tuple(places)).encode())


def shared_directory(name: str) -> Path:
    """A new directory in shared memory, or in the temporary folder where the platform has none. The caller removes it."""
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix=f"antiphon-{name}-", dir=parent))


def remove(update: WeightsUpdate) -> None:
    """Give back the memory of a version that every receiver has loaded."""
    Path(update.location).unlink(missing_ok=True)

"""Lossless differences between two versions of packed weights: which elements changed, and how, compressed.

After a small step most weights in half precision are what they were. Of those that are not, a difference has the distance to
the one before and the bits that differ. Both are split into planes of bytes, most of which are then zero, and compressed.
"""

from concurrent.futures import Future

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from antiphon.weights.digest import copy_threads
from antiphon.weights.manifest import BUCKET_BYTES

Bytes = npt.NDArray[np.uint8]
GAP_BYTES = 4
AHEAD = 16  # pieces that wait to be encoded, at most


class _Changes(msgspec.Struct, array_like=True, frozen=True):
    """Changed elements of one piece of the buffer."""

    offset: int  # bytes, of the piece in the buffer
    itemsize: int  # bytes of an element
    count: int  # of changed elements
    planes: bytes  # compressed: bytes 0 of all distances, bytes 1 ..., then those of the differing bits


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[_Changes])


class DeltaEncoder:
    """Encodes what changes while new tensors are packed over old ones."""

    def __init__(self) -> None:
        self._pieces: list[Future[_Changes | None]] = []

    def add(self, offset: int, itemsize: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """Encode the change of a tensor that begins at byte `offset`; its bytes uint8 [size] `before` and `after`.

        They are read later: they must not change before `encoded`.
        """
        for start in range(0, len(before), BUCKET_BYTES):
            if len(self._pieces) >= AHEAD:
                self._pieces[-AHEAD].result()
            old, new = (content[start : start + BUCKET_BYTES].numpy() for content in (before, after))
            self._pieces.append(copy_threads().submit(_encode, offset + start, itemsize, old, new))

    def encoded(self) -> bytes:
        """Return the difference, for `apply_delta`."""
        return _ENCODER.encode([found for piece in self._pieces if (found := piece.result()) is not None])


def _encode(offset: int, itemsize: int, before: Bytes, after: Bytes) -> _Changes | None:
    import pyarrow as pa  # an engine's own environment may lack it, and needs it for differences alone

    bits = before.view(f"u{itemsize}") ^ after.view(f"u{itemsize}")
    places = np.flatnonzero(bits)
    if not len(places):
        return None
    gaps = np.diff(places, prepend=-1).astype(f"u{GAP_BYTES}")
    planes = np.concatenate([_split(gaps), _split(bits[places])])
    return _Changes(offset, itemsize, len(places), pa.compress(planes, codec="zstd", asbytes=True))


def apply_delta(content: torch.Tensor, delta: bytes) -> None:
    """Turn the bytes of the old version, uint8 [size], into those of the new one, in place."""
    import pyarrow as pa

    for piece in _DECODER.decode(delta):
        raw = pa.decompress(piece.planes, piece.count * (GAP_BYTES + piece.itemsize), codec="zstd", asbytes=True)
        planes = np.frombuffer(raw, np.uint8)
        gaps = _join(planes[: piece.count * GAP_BYTES], GAP_BYTES)
        bits = _join(planes[piece.count * GAP_BYTES :], piece.itemsize)
        whole = len(content) - (len(content) - piece.offset) % piece.itemsize
        content[piece.offset : whole].numpy().view(f"u{piece.itemsize}")[np.cumsum(gaps, dtype=np.int64) - 1] ^= bits


def _split(numbers: npt.NDArray[np.unsignedinteger]) -> Bytes:
    """Return bytes 0 of all numbers, then bytes 1 ..., uint8 [numbers x itemsize]."""
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, numbers.itemsize).T).ravel()


def _join(planes: Bytes, itemsize: int) -> npt.NDArray[np.unsignedinteger]:
    """Undo `_split`."""
    return np.ascontiguousarray(planes.reshape(itemsize, -1).T).view(f"u{itemsize}").ravel()

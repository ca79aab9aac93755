"""Tensors as bytes that lie one after another."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
import torch.nn.functional as F
import xxhash

from antiphon.core.errors import WeightsError
from antiphon.core.types import WeightsUpdate
from antiphon.weights.adapters import applied
from antiphon.weights.base import BUCKET_BYTES, Adapters, Manifest, TensorPlace


class TensorSpec(Protocol):
    """A tensor, or one that is known before it is there: where ranks have pieces of it, `detach` puts them together."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def detach(self) -> Callable[[], torch.Tensor]: ...


NamedTensors = Iterable[tuple[str, TensorSpec]]


@functools.cache
def threads() -> ThreadPoolExecutor:
    """That copy and hash: neither holds the interpreter's lock."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="weights")


class Memory:
    """Memory of a process's own, kept for as long as it has the right size."""

    def __init__(self) -> None:
        self.content = torch.empty(0, dtype=torch.uint8)

    def __call__(self, size: int) -> torch.Tensor:
        """So many bytes, uint8 [size]."""
        if len(self.content) != size:
            self.content = torch.zeros(size, dtype=torch.uint8)
        return self.content


def pack_tensors(named: NamedTensors, buffer: Callable[[int], torch.Tensor], adapters: Adapters | None) -> Manifest:
    """Copy tensors, each to a 64-byte boundary, to the memory that `buffer` has for so many bytes, uint8 [size], all zero where
    nothing was laid. They are asked for in turn, each when the one before is copied. Each bucket enters the digest as soon as
    it is full."""
    tensors, places, end = [], [], 0
    for name, tensor in named:
        tensors.append(tensor)
        dtype, size = str(tensor.dtype).removeprefix("torch."), tensor.shape.numel() * tensor.dtype.itemsize
        places.append(TensorPlace(name, dtype, tuple(tensor.shape), -(-end // 64) * 64, size))
        end = places[-1].offset + size
    try:
        content = buffer(end)
    except Exception:
        for tensor in tensors:  # other ranks give their pieces of each
            tensor.detach()
        raise

    def filled() -> Iterator[torch.Tensor]:
        buckets, full = iter(content.split(BUCKET_BYTES)), BUCKET_BYTES
        for tensor, place in zip(tensors, places, strict=True):
            _copy(tensor.detach(), _tensor_at(place, content))
            while full <= place.offset + place.size:
                yield next(buckets)
                full += BUCKET_BYTES
        yield from buckets

    return Manifest(tuple(places), end, _digest(tuple(places), content, filled()), adapters)


def _copy(tensor: torch.Tensor, to: torch.Tensor) -> None:
    if not (tensor.is_contiguous() or to.is_cuda):
        tensor = tensor.cpu()  # a device may have room for one alone
    to.copy_(tensor)


def _tensor_at(place: TensorPlace, content: torch.Tensor) -> torch.Tensor:
    """A view of the bytes of an update."""
    return content[place.offset :][: place.size].view(getattr(torch, place.dtype)).view(place.shape)


def unpack_tensors(update: WeightsUpdate, content: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an update's bytes are, uint8 [size], as views; of adapters, what they make of their base.
    `WeightsError` if these are not the bytes that were sent, before the first tensor."""
    manifest: Manifest = update.manifest
    arrived = _digest(manifest.tensors, content, content.split(BUCKET_BYTES))
    if arrived != manifest.digest:
        raise WeightsError(
            f"weights of version {update.version} arrived with digest {arrived:016x}, sent with "
            f"{manifest.digest:016x}: not loaded"
        )
    sent = ((place.name, _tensor_at(place, content)) for place in manifest.tensors)
    yield from applied(sent, manifest.adapters)


def _digest(places: tuple[TensorPlace, ...], content: torch.Tensor, buckets: Iterable[torch.Tensor]) -> int:
    """XXH3 of a layout and of its buckets' digests, in 63 bits, which the ledger can hold. `content` has all buckets as soon
    as they were taken. Guards against torn and misplaced data, not against an adversary: what can write here can do worse."""
    layout = repr(places).encode()
    if content.is_cuda:
        for _ in buckets:
            pass
        parts = [digest_there(content)]
    else:
        parts = list(threads().map(xxhash.xxh3_64_digest, (bucket.numpy() for bucket in buckets)))
    return xxhash.xxh3_64_intdigest(layout + b"".join(parts)) >> 1


_ODD = (-7046029254386353131, -4417276706812531889)  # 0x9E3779B97F4A7C15 and 0xC2B2AE3D27D4EB4F


def digest_there(content: torch.Tensor) -> bytes:
    """A digest of bytes, uint8 [size], that stay on their device: every 8 are mixed with the number of their place, and all
    are added, modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    whole = F.pad(content, (0, -len(content) % 8)).view(torch.int64) if len(content) % 8 else content.view(torch.int64)
    for number, words in enumerate(whole.split(BUCKET_BYTES // 8)):
        first = number * (BUCKET_BYTES // 8)
        mixed = words ^ (torch.arange(first, first + len(words), device=content.device) * _ODD[0])
        mixed = (mixed ^ (mixed >> 29)) * _ODD[1]
        total += (mixed ^ (mixed >> 32)).sum()
    return int(total).to_bytes(8, "little", signed=True)

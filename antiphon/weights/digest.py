"""Digests of packed weights, on the host or on a device.

They guard against torn and misplaced data, not against an adversary: whoever can write the buffer can do worse.
"""

import functools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

import torch
import torch.nn.functional as F
import xxhash

from antiphon.weights.manifest import BUCKET_BYTES, TensorLayout

_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)  # 0x9E3779B97F4A7C15 and 0xC2B2AE3D27D4EB4F, as int64


@functools.cache
def copy_threads() -> ThreadPoolExecutor:
    """Return the threads that copy and hash; neither holds the interpreter's lock."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="weights")


def digest_buffer(layouts: tuple[TensorLayout, ...], content: torch.Tensor, buckets: Iterable[torch.Tensor]) -> int:
    """Return the XXH3 of a layout and of the digests of its buckets, in 63 bits so that the ledger can hold it.

    Args:
        layouts: The tensors in the buffer.
        content: The buffer, uint8 [size]; complete once all buckets were taken.
        buckets: Parts of `content`, each of which may be filled only when it is taken.
    """
    header = repr([astuple(layout) for layout in layouts]).encode()
    if content.is_cuda:
        for _ in buckets:
            pass
        parts = [digest_on_device(content)]
    else:
        parts = list(copy_threads().map(xxhash.xxh3_64_digest, (bucket.numpy() for bucket in buckets)))
    return xxhash.xxh3_64_intdigest(header + b"".join(parts)) >> 1


def digest_on_device(content: torch.Tensor) -> bytes:
    """Return a digest of bytes, uint8 [size], without copying them from their device.

    Each 8-byte word is mixed with its index, and all are added modulo 2^64.
    """
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    whole = F.pad(content, (0, -len(content) % 8)).view(torch.int64) if len(content) % 8 else content.view(torch.int64)
    for number, words in enumerate(whole.split(BUCKET_BYTES // 8)):
        first = number * (BUCKET_BYTES // 8)
        mixed = words ^ (torch.arange(first, first + len(words), device=content.device) * _MULTIPLIERS[0])
        mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIERS[1]
        total += (mixed ^ (mixed >> 32)).sum()
    return int(total).to_bytes(8, "little", signed=True)

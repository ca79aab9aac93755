"""Weights between processes of one machine: each version is a file in shared memory, mapped by both ends."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from antiphon.errors import WeightsError
from antiphon.types import WeightsUpdate
from antiphon.weights.base import BUCKET_BYTES, Manifest, digest, plan


def send(named: Iterable[tuple[str, torch.Tensor]], version: int, directory: Path) -> WeightsUpdate:
    """Write the tensors as `version` into `directory`; a shared (tied) tensor is written once a name.

    Returns the update that receivers `receive`.
    """
    tensors = [(name, tensor.detach()) for name, tensor in named]
    places = plan(
        (n, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numel() * t.element_size()) for n, t in tensors
    )
    size = places[-1].offset + -(-places[-1].size // 64) * 64
    path = directory / f"weights-{version:08d}"
    buffer = np.memmap(path, dtype=np.uint8, mode="w+", shape=(size,))
    for place, (_, tensor) in zip(places, tensors, strict=True):
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        for start in range(0, place.size, BUCKET_BYTES):
            stop = min(start + BUCKET_BYTES, place.size)
            buffer[place.offset + start : place.offset + stop] = flat[start:stop].cpu().numpy()
    return WeightsUpdate(version=version, location=str(path), manifest=Manifest(places, size, digest(buffer, places)))


def receive(update: WeightsUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an update, read-only views that live while they are iterated; `WeightsError` on a wrong digest."""
    manifest: Manifest = update.manifest
    try:
        buffer = np.memmap(update.location, dtype=np.uint8, mode="c", shape=(manifest.size,))
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"weights of version {update.version} cannot be read at {update.location}: {error}"
        ) from error
    found = digest(buffer, manifest.tensors)
    if found != manifest.digest:
        raise WeightsError(
            f"weights of version {update.version} arrived with digest {found:08x}, sent with {manifest.digest:08x}: not loaded"
        )
    flat = torch.from_numpy(buffer)
    for place in manifest.tensors:
        raw = flat[place.offset : place.offset + place.size]
        yield place.name, raw.view(getattr(torch, place.dtype)).view(place.shape)

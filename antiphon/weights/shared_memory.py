"""Weights between processes of one machine: each version is a file in shared memory.

Neither end maps the whole file: written and checked a bucket at a time, loaded a tensor at a time, it costs a process no
memory of its own.
"""

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from antiphon.errors import WeightsError
from antiphon.types import WeightsUpdate
from antiphon.weights.adapters import applied
from antiphon.weights.base import BUCKET_BYTES, Adapters, Manifest, layout_digest, plan


def send(
    named: Iterable[tuple[str, torch.Tensor]], version: int, directory: Path, adapters: Adapters | None = None
) -> WeightsUpdate:
    """Write the tensors as `version` into `directory`; a shared (tied) tensor is written once a name. With `adapters` they are
    what `weights.adapters.flat` makes of them, and receivers add them to the base.

    Returns the update that receivers `receive`.
    """
    tensors = [(name, tensor.detach()) for name, tensor in named]
    places = plan(
        (n, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numel() * t.element_size()) for n, t in tensors
    )
    path = directory / f"weights-{version:08d}"
    digest, size = layout_digest(places), 0
    with path.open("wb") as file:
        for place, (_, tensor) in zip(places, tensors, strict=True):
            buckets = tensor.contiguous().view(-1).view(torch.uint8).split(BUCKET_BYTES)
            for bucket in (bytes(place.offset - size), *(bucket.cpu().numpy() for bucket in buckets)):
                file.write(bucket)
                digest = zlib.crc32(bucket, digest)
            size = place.offset + place.size
    return WeightsUpdate(version=version, location=str(path), manifest=Manifest(places, size, digest, adapters))


def receive(update: WeightsUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an update, views that live while they are iterated; `WeightsError` on a wrong digest. Of adapters, what
    they make of their base."""
    manifest: Manifest = update.manifest
    digest = layout_digest(manifest.tensors)
    try:
        with open(update.location, "rb") as file:
            while bucket := file.read(BUCKET_BYTES):
                digest = zlib.crc32(bucket, digest)
    except OSError as error:
        raise WeightsError(
            f"weights of version {update.version} cannot be read at {update.location}: {error}"
        ) from error
    if digest != manifest.digest:
        raise WeightsError(
            f"weights of version {update.version} arrived with digest {digest:08x}, sent with {manifest.digest:08x}: not loaded"
        )
    sent = _tensors(update.location, manifest)
    yield from sent if manifest.adapters is None else applied(sent, manifest.adapters)


def _tensors(location: str, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    for place in manifest.tensors:
        raw = np.memmap(location, dtype=np.uint8, mode="c", offset=place.offset, shape=(place.size,))
        yield place.name, torch.from_numpy(raw).view(getattr(torch, place.dtype)).view(place.shape)

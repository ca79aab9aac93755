"""Tensors as bytes that lie one after another."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open

from antiphon.errors import WeightsError
from antiphon.types import WeightsUpdate
from antiphon.weights.adapters import applied
from antiphon.weights.base import BUCKET_BYTES, Adapters, Digest, Manifest, TensorPlace

Named = Iterable[tuple[str, torch.Tensor]]
Layout = dict[str, tuple[int, ...]]  # shape of each tensor


class Memory:
    """Memory of a process's own, kept for as long as it has the right size."""

    def __init__(self) -> None:
        self.content = torch.empty(0, dtype=torch.uint8)

    def __call__(self, size: int) -> torch.Tensor:
        """So many bytes, uint8 [size]."""
        if len(self.content) != size:
            self.content = torch.zeros(size, dtype=torch.uint8)
        return self.content


def lay(named: Named, buffer: Callable[[int], torch.Tensor], adapters: Adapters | None) -> Manifest:
    """Copy tensors, each to a 64-byte boundary, to the memory that `buffer` has for so many bytes, uint8 [size], all zero where
    nothing was laid. Each bucket enters the digest while it is in the cache."""
    tensors, places, end = [], [], 0
    for name, tensor in named:
        tensors.append(tensor.detach())
        dtype, size = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
        places.append(TensorPlace(name, dtype, tuple(tensor.shape), -(-end // 64) * 64, size))
        end = places[-1].offset + size
    content, digest, end = buffer(end), Digest(tuple(places)), 0
    if content.is_cuda:
        for tensor, place in zip(tensors, places, strict=True):
            content[place.offset :][: place.size].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        return Manifest(tuple(places), len(content), digest_there(content, tuple(places)), adapters)
    for tensor, place in zip(tensors, places, strict=True):
        digest.update(content[end : place.offset].numpy())
        end = place.offset + place.size
        parts = tensor.contiguous().view(-1).view(torch.uint8).split(BUCKET_BYTES)
        for bucket, part in zip(content[place.offset : end].split(BUCKET_BYTES), parts, strict=True):
            digest.update(bucket.copy_(part).numpy())
    return Manifest(tuple(places), end, digest.value(), adapters)


def unlay(update: WeightsUpdate, content: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an update's bytes are, uint8 [size], as views; of adapters, what they make of their base.
    `WeightsError` if these are not the bytes that were sent, before the first tensor."""
    manifest: Manifest = update.manifest
    if content.is_cuda:
        arrived = digest_there(content, manifest.tensors)
    else:
        digest = Digest(manifest.tensors)
        for bucket in content.split(BUCKET_BYTES):
            digest.update(bucket.numpy())
        arrived = digest.value()
    if arrived != manifest.digest:
        raise WeightsError(
            f"weights of version {update.version} arrived with digest {arrived:016x}, sent with "
            f"{manifest.digest:016x}: not loaded"
        )
    sent = (
        (place.name, content[place.offset :][: place.size].view(getattr(torch, place.dtype)).view(place.shape))
        for place in manifest.tensors
    )
    yield from applied(sent, manifest.adapters)


_ODD = (-7046029254386353131, -4417276706812531889)  # 0x9E3779B97F4A7C15 and 0xC2B2AE3D27D4EB4F


def digest_there(content: torch.Tensor, places: tuple[TensorPlace, ...]) -> int:
    """As `Digest`, of bytes, uint8 [size], that stay on their device: every 8 are mixed with the number of their place, and all
    are added, modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    whole = F.pad(content, (0, -len(content) % 8)).view(torch.int64) if len(content) % 8 else content.view(torch.int64)
    for number, words in enumerate(whole.split(BUCKET_BYTES // 8)):
        first = number * (BUCKET_BYTES // 8)
        mixed = words ^ (torch.arange(first, first + len(words), device=content.device) * _ODD[0])
        mixed = (mixed ^ (mixed >> 29)) * _ODD[1]
        total += (mixed ^ (mixed >> 32)).sum()
    layout_alone = Digest(places)
    layout_alone.update(int(total).to_bytes(8, "little", signed=True))
    return layout_alone.value()


def layout(model: str | Path, tied: bool) -> Layout:
    """What an update must bring: the tensors of a model directory's checkpoint, without the head if it is the embedding."""
    found: Layout = {}
    for path in Path(model).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return {name: shape for name, shape in found.items() if not (tied and name == "lm_head.weight")}


def require_layout(tensors: Mapping[str, torch.Tensor], wanted: Layout, version: int) -> None:
    """`WeightsError` unless these are the tensors of the layout, all of them and no others."""
    sent = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in sent.keys() | wanted.keys() if sent.get(name) != wanted.get(name))
    if wrong:
        name = wrong[0]
        raise WeightsError(
            f"weights of version {version} are not the model's: not loaded. {len(wrong)} tensors differ; "
            f"{name!r} has shape {wanted.get(name, 'none')} here and {sent.get(name, 'none')} there"
        )

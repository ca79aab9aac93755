"""Packing tensors into one flat buffer, and views of them in it."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from antiphon.core.errors import WeightsError
from antiphon.core.types import WeightsUpdate
from antiphon.weights.adapters import apply_adapters
from antiphon.weights.digest import digest_buffer
from antiphon.weights.manifest import BUCKET_BYTES, Adapters, Manifest, NamedTensors, TensorLayout

if TYPE_CHECKING:
    from antiphon.weights.delta import DeltaEncoder

ALIGNMENT = 64  # bytes


class HostBuffer:
    """HostBuffer of this process, reused while the requested size stays the same."""

    def __init__(self) -> None:
        self.content = torch.empty(0, dtype=torch.uint8)

    def __call__(self, size: int) -> torch.Tensor:
        """Return `size` bytes, uint8 [size]."""
        if len(self.content) != size:
            self.content = torch.zeros(size, dtype=torch.uint8)
        return self.content


def pack_tensors(
    named: NamedTensors,
    buffer: Callable[[int], torch.Tensor],
    adapters: Adapters | None,
    dtype: str = "",
    delta: "DeltaEncoder | None" = None,
) -> Manifest:
    """Copy tensors into one buffer, each to a 64-byte boundary, and return their manifest.

    Each tensor is gathered after the one before it was copied. A bucket is hashed as soon as it is full.

    Args:
        named: Tensors by name.
        buffer: Called with the size in bytes; returns memory for them, uint8 [size], zero where no tensor lies.
        adapters: Recorded in the manifest.
        dtype: Torch's name of the dtype to which floating-point tensors are rounded, adapters excepted; empty: none is.
        delta: Is told what changes in the buffer, which is in host memory then.
    """
    tensors, layouts, end = [], [], 0
    for name, tensor in named:
        tensors.append(tensor)
        rounded = dtype and adapters is None and tensor.dtype.is_floating_point
        kind: torch.dtype = getattr(torch, dtype) if rounded else tensor.dtype
        kind_name, size = str(kind).removeprefix("torch."), tensor.shape.numel() * kind.itemsize
        layouts.append(TensorLayout(name, kind_name, tuple(tensor.shape), -(-end // ALIGNMENT) * ALIGNMENT, size))
        end = layouts[-1].offset + size
    try:
        content = buffer(end)
    except Exception:
        for tensor in tensors:  # gathering is collective: other ranks wait for this one
            tensor.detach()
        raise

    def fill_buckets() -> Iterator[torch.Tensor]:
        buckets, full = iter(content.split(BUCKET_BYTES)), BUCKET_BYTES
        for tensor, layout in zip(tensors, layouts, strict=True):
            part = content[layout.offset :][: layout.size]
            before = part.clone() if delta is not None else part
            _copy(tensor.detach(), _tensor_view(layout, content))
            if delta is not None:
                delta.add(layout.offset, getattr(torch, layout.dtype).itemsize, before, part)
            while full <= layout.offset + layout.size:
                yield next(buckets)
                full += BUCKET_BYTES
        yield from buckets

    return Manifest(tuple(layouts), end, digest_buffer(tuple(layouts), content, fill_buckets()), adapters)


def unpack_tensors(update: WeightsUpdate, content: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an update by name, as views of `content`; adapters are yielded merged into their base.

    Args:
        update: The update that `send` returned.
        content: The bytes that arrived, uint8 [size].

    Raises:
        WeightsError: If the bytes are not those that were sent; raised before the first tensor is yielded.
    """
    manifest: Manifest = update.manifest
    arrived = digest_buffer(manifest.tensors, content, content.split(BUCKET_BYTES))
    if arrived != manifest.digest:
        raise WeightsError(
            f"weights of version {update.version} arrived with digest {arrived:016x}, sent with "
            f"{manifest.digest:016x}: not loaded",
            version=update.version,
        )
    sent = ((layout.name, _tensor_view(layout, content)) for layout in manifest.tensors)
    yield from apply_adapters(sent, manifest.adapters)


def _copy(tensor: torch.Tensor, target: torch.Tensor) -> None:
    if not (tensor.is_contiguous() or target.is_cuda):
        tensor = tensor.cpu()  # its device may lack the memory for a contiguous copy
    target.copy_(tensor)


def _tensor_view(layout: TensorLayout, content: torch.Tensor) -> torch.Tensor:
    return content[layout.offset :][: layout.size].view(getattr(torch, layout.dtype)).view(layout.shape)

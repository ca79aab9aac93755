"""Two versions of packed weights that follow each other, at either end of a channel whose encoding may be `delta`."""

import torch

from antiphon.weights.base import TransferContext
from antiphon.weights.delta import DeltaEncoder, apply_delta
from antiphon.weights.manifest import Adapters, Manifest, NamedTensors
from antiphon.weights.tensors import HostBuffer, pack_tensors

DELTA = "delta"  # the encoding
NOTHING = "-"  # the identity of no version
LARGEST_SHARE = 1 / 2  # of the bytes of a version, for a difference that is worth sending


class PackedVersion:
    """The learner's end: a copy of the newest weights and, with the encoding `delta`, what changed since the version before.

    Attributes:
        content: The bytes of the copy, uint8 [size].
        difference: Identity of the version before, and the difference to it; None if there is none that is worth sending.
    """

    def __init__(self, context: TransferContext) -> None:
        self._dtype, self._encoding = context.dtype, context.encoding
        self._buffer = HostBuffer()
        self._manifest: Manifest | None = None  # of the copy, while it is whole
        self.difference: tuple[str, bytes] | None = None

    @property
    def content(self) -> torch.Tensor:
        """The bytes of the copy."""
        return self._buffer.content

    def pack(self, named: NamedTensors, adapters: Adapters | None) -> Manifest:
        """Replace the copy by the present tensors; return their manifest."""
        before, self._manifest, self.difference = self._manifest, None, None
        encoder = DeltaEncoder() if before and self._encoding == DELTA else None
        manifest = pack_tensors(named, self._buffer, adapters, self._dtype, encoder)
        if encoder and before and before.tensors == manifest.tensors:
            encoded = encoder.encoded()
            small = len(encoded) < manifest.size * LARGEST_SHARE
            self.difference = (identity(before), encoded) if small else None
        self._manifest = manifest
        return manifest

    @property
    def sent(self) -> int:
        """Bytes that an engine with the version before needs."""
        return len(self.difference[1]) if self.difference else len(self.content)


class KeptVersion:
    """An engine's end: the bytes that arrived last, if differences to them may come.

    Attributes:
        identity: That of the kept version, or `NOTHING`.
    """

    def __init__(self) -> None:
        self._content: torch.Tensor | None = None
        self.identity = NOTHING

    def keep(self, content: torch.Tensor, manifest: Manifest) -> torch.Tensor:
        """Keep the bytes of a version, uint8 [size], and return them."""
        self._content, self.identity = content, identity(manifest)
        return content

    def change(self, difference: bytes, manifest: Manifest) -> torch.Tensor:
        """Turn the kept version into another one, in place; return its bytes."""
        assert self._content is not None
        apply_delta(self._content, difference)
        return self.keep(self._content, manifest)

    def forget(self) -> None:
        """Keep nothing of what arrived: it is not what was sent."""
        self._content, self.identity = None, NOTHING


def identity(manifest: Manifest) -> str:
    """Return what tells a version from others."""
    return f"{manifest.digest:016x}"

"""Descriptions of a set of weights: tensors in one flat buffer, digest, adapters. Importing it imports no torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from antiphon.core.types import WeightsUpdate

if TYPE_CHECKING:
    import torch

BUCKET_BYTES = 16 << 20  # unit of sending and of hashing


class TensorSpec(Protocol):
    """A tensor, or the description of one that is assembled on demand: `detach` gathers the pieces that other ranks hold."""

    @property
    def shape(self) -> "torch.Size":
        """Return the size of each dimension."""

    @property
    def dtype(self) -> "torch.dtype":
        """Return the type of the elements."""

    @property
    def device(self) -> "torch.device":
        """Return the device on which the tensor is, or will be once it is assembled."""

    @property
    def detach(self) -> Callable[[], "torch.Tensor"]:
        """Return a callable that gives the tensor without its gradient."""


NamedTensors = Iterable[tuple[str, TensorSpec]]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Position of one tensor in the flat buffer."""

    name: str
    dtype: str  # torch's name of it, such as "float32"
    shape: tuple[int, ...]
    offset: int  # bytes
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Adapters:
    """The base model and the scale of low-rank adapters."""

    base: str  # model directory
    scale: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """Layout and digest of one version of a set of weights."""

    tensors: tuple[TensorLayout, ...]
    size: int  # bytes of the buffer
    digest: int
    adapters: Adapters | None = None  # set if the tensors are adapters, and not all weights


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor."""

    name: str  # of the tensor
    start: tuple[int, ...]  # index of its first element
    size: tuple[int, ...]  # its shape
    whole: tuple[int, ...]  # shape of the tensor


@dataclass(frozen=True, slots=True)
class SentPieces:
    """The part of an update that one rank of a learner sends."""

    update: WeightsUpdate
    pieces: tuple[Piece, ...]  # in the order of the tensors of `update`


@dataclass(frozen=True, slots=True)
class PiecesManifest:
    """Description of one version of a set of weights that several ranks send, see `weights.reshard`."""

    parts: tuple[SentPieces, ...]
    size: int  # bytes of all buffers
    digest: int  # of the parts' digests and pieces

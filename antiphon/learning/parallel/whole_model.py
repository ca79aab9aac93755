"""A model on one rank, with the interface of a model that is divided among ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from antiphon.core.types import Pack
from antiphon.learning.model.logprobs import Vocabulary
from antiphon.weights.manifest import TensorSpec

T = TypeVar("T")
PipelineForward = Callable[[Pack], torch.Tensor]  # the hidden states that a rank's layers make of a pack


class GatheredTensor(NamedTuple):
    """A tensor of which ranks have pieces. All must ask for it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    detach: Callable[[], torch.Tensor]  # puts it together


class WholeModel:
    """A model on one rank: what `ShardedModel` does, where there is nothing to share."""

    data = 0  # whose packs this rank computes
    incoming: torch.Tensor | None = None  # what its layers begin with, if these are not the first
    vocabulary: Vocabulary | None = None  # rows of the head that it has, if these are not all

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def has_layer(self, number: int) -> bool:
        """Return True if a layer is on this rank."""
        return True

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that uses the model's parameters."""
        return function(*args)

    def train_packs(self, packs: Sequence[Pack], pass_on: PipelineForward, backward: Callable[[Pack], T]) -> list[T]:
        """Add the gradients of packs; what `backward` returns of each.

        Where it is not for this rank to compute a loss, it runs its layers with `pass_on`.
        """
        return [backward(pack) for pack in packs]

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss, a sum over tokens."""
        loss.backward()

    def run_packs(self, packs: Sequence[Pack], pass_on: PipelineForward, ask: Callable[[Pack], T]) -> list[T]:
        """Run each pack without gradients; return the results."""
        return [ask(pack) for pack in packs]

    def reduce_sums(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return sums over the packs of all ranks, from those of this rank."""
        return dict(totals)

    def clip_gradient(self, most: float) -> float:
        """Scale the gradient down to the norm `most`, if it is larger; returns what it was."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), most).item()

    def gather_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, TensorSpec]]:
        """All parameters, or those that are trained: on the first rank. All ranks must ask for each, in this order."""
        for name, parameter in self.local_parameters():
            if parameter.requires_grad or not trained:
                yield name, self.gather_tensor(name, parameter)

    def gather_own_layers(self, *, trained: bool = False) -> Iterator[tuple[str, TensorSpec]]:
        """Those of `named` that are of the layers that this rank has."""
        return self.gather_parameters(trained=trained)

    def local_parameter(self, name: str) -> torch.Tensor:
        """This rank's piece of a parameter."""
        return self.model.get_parameter(name)

    def local_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's piece of each parameter that it has a piece of."""
        yield from self.model.named_parameters()

    def gather_tensor(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """The tensor of which this rank has a piece: a parameter, or what is kept of each of its elements.

        All ranks must ask.
        """
        return piece.detach()

    def scatter_tensor(self, name: str, piece: torch.Tensor, whole: torch.Tensor) -> None:
        """Set this rank's piece of a tensor from the whole of it."""
        piece.detach().copy_(whole)

"""Megatron-Core's order of forwards and backwards over packs. Imports no megatron."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from antiphon.core.types import Pack
from antiphon.learning.mesh_config import MeshConfig
from antiphon.learning.packing import padding_pack
from antiphon.learning.parallel.whole_model import PipelineForward

T = TypeVar("T")


class Schedule:
    """Runs packs through this rank's chunks of a model, where others have a `Pipeline`.

    Stages send hidden states of one size, that of the longest pack: with sizes of their own, the two directions of an
    interleaved pipeline of two ranks would be mistaken for each other.

    Attributes:
        chunk: Index of the chunk that computes now.
        incoming: None, as each chunk has what it begins with.
    """

    incoming = None

    def __init__(
        self, chunks: Sequence[Any], order: Callable[..., list[Any]], mesh: MeshConfig, *, ends_here: bool
    ) -> None:
        """Take this rank's chunks, Megatron's function for the order, and whether the rank has the last stage."""
        self.chunk = 0
        self._chunks, self._order, self._mesh, self._ends_here = chunks, order, mesh, ends_here

    def train_packs(
        self, models: Sequence[Any], packs: Sequence[Pack], pass_on: PipelineForward, backward: Callable[[Pack], T]
    ) -> list[T]:
        """Add the gradients of all packs; return the results of the last stage.

        Args:
            models: The chunks with room for gradients.
            packs: Packs of this rank.
            pass_on: Runs the layers of a chunk.
            backward: Runs the layers of the last chunk, the loss, and its gradient.
        """
        for model in models:
            model.zero_grad_buffer()
        return self._run(models, packs, pass_on, backward, forward_only=False)

    def run_packs(self, packs: Sequence[Pack], pass_on: PipelineForward, ask: Callable[[Pack], T]) -> list[T]:
        """Run all packs without gradients; return the results of the last stage."""
        return self._run(self._chunks, packs, pass_on, ask, forward_only=True)

    def _run(
        self,
        models: Sequence[nn.Module],
        packs: Sequence[Pack],
        pass_on: PipelineForward,
        compute: Callable[[Pack], T],
        *,
        forward_only: bool,
    ) -> list[T]:
        if not packs:
            return []
        nothing, last = torch.zeros(()), len(models) - 1 if self._ends_here else -1
        sizes = [-(-len(pack.tokens) // self._mesh.context) for pack in packs]  # on each rank
        several = self._mesh.pipeline if len(models) > 1 else 1  # of which interleaving takes multiples
        padding = -len(packs) % several
        given = [*zip(packs, sizes, strict=True), *[(padding_pack(packs[0]), 1)] * padding]

        def forward(rest: Iterator[tuple[int, Pack, int]], model: Any) -> tuple[torch.Tensor, Any]:
            self.chunk, pack, size = next(rest)
            decoder = self._chunks[self.chunk].decoder
            if decoder.input_tensor is not None:
                decoder.input_tensor = decoder.input_tensor[:size]
            if self.chunk != last:
                return F.pad(pass_on(pack), (0, 0, 0, 0, 0, max(sizes) - size)), None
            # Forward, loss and backward are one here: a loss without a gradient leaves Megatron nothing to go back through.
            return nothing, lambda _: (nothing, nothing.int(), compute(pack))

        found = self._order(
            forward_step_func=forward,
            data_iterator=[iter([(chunk, *each) for each in given]) for chunk in range(len(models))],
            model=list(models),
            num_microbatches=len(given),
            seq_length=max(sizes) * self._mesh.context,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        for chunk in self._chunks:
            chunk.decoder.input_tensor = None  # which would stay on the device, with its gradient, until the next packs
        return found[: len(packs)]

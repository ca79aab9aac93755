"""Pipeline parallelism: each rank has some of the layers, packs pass through one stage after another, gradients come back.

A rank may have several stages that do not follow one another (interleaved), so that the first packs are through sooner. What
ranks send each other has the size of the pack, which all of them know.

Source of the orders: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed, nn
from transformers import PreTrainedModel

from antiphon.core.types import Pack
from antiphon.learning.mesh import Mesh
from antiphon.learning.model.loading import decoder_layers
from antiphon.learning.packing import padding_pack

T = TypeVar("T")


class Action(NamedTuple):
    """One forward or backward of a rank."""

    backward: bool
    pack: int
    chunk: int  # of the stages that the rank has


def schedule(place: int, ranks: int, chunks: int, packs: int) -> list[Action]:
    """The actions of a rank, one forward and one backward in turn once the pipeline is full.

    With several chunks, the packs are a multiple of the ranks.

    >>> [("B" if a.backward else "F") + str(a.pack) for a in schedule(0, 2, 1, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """

    def turn(number: int, backward: bool) -> Action:
        rounds, within = divmod(number, ranks * chunks)
        chunk = within // ranks
        return Action(backward, rounds * ranks + within % ranks, chunks - 1 - chunk if backward else chunk)

    total = packs * chunks
    ahead = ranks - place - 1 if chunks == 1 else 2 * (ranks - place - 1) + (chunks - 1) * ranks
    ahead = min(ahead, total)
    actions = [turn(number, False) for number in range(ahead)]
    for number in range(total - ahead):
        actions += [turn(ahead + number, False), turn(number, True)]
    return actions + [turn(number, True) for number in range(total - ahead, total)]


class Pipeline:
    """This rank's stages of a model."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh, within: Callable[..., Any]) -> None:
        """Takes away from a whole model what other ranks have of it. `within` calls a function of the model."""
        self.incoming: torch.Tensor | None = None  # what the layers that come next begin with, [1, n, H]; else tokens
        self._base: Any = model.base_model
        self._within = within
        self._ranks, self._chunks = mesh.config.pipeline, mesh.config.pipeline_chunks
        self._place, self._around = mesh.coordinate("pipeline"), mesh.config.world // mesh.config.pipeline
        self._rank, self._device = mesh.rank, mesh.device
        self._last = self._ranks * self._chunks - 1
        self._width: int = model.config.get_text_config().hidden_size
        self._parts = mesh.config.context
        *ways, self.ends = self._groups()
        self.forth, self.back = ways[:2], ways[2:]
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._norm, self._none = self._base.norm, nn.Identity()
        self._cut(model)

    @property
    def ends_here(self) -> bool:
        """True if this rank has the last stage."""
        return self._place == self._ranks - 1

    def _groups(self) -> list[Any]:
        """Return the groups of ranks with which this rank exchanges packs.

        Forward and backward have one each, between neighbours and between the two ends; the last group joins the first and
        the last rank alone. Two ranks are both neighbours and ends: in one group, one direction would wait for the other
        on a GPU.
        """
        found: list[Any] = []
        for places in (*[range(self._ranks)] * 4, (0, self._ranks - 1)):
            for column in range(self._around):  # every rank takes part in making every group
                group = distributed.new_group([place * self._around + column for place in places])
                if column == self._rank % self._around:
                    found.append(group)
        return found

    def _cut(self, model: PreTrainedModel) -> None:
        layers = decoder_layers(model)
        per = len(layers) // (self._last + 1)
        self._stages = [
            nn.ModuleList(layers[i] for i in range(stage * per, (stage + 1) * per))
            for stage in range(self._place, self._last + 1, self._ranks)
        ]
        own = {id(layer) for stage in self._stages for layer in stage}
        for number, layer in enumerate(layers):
            if id(layer) not in own:
                layers[number] = nn.Identity()  # keeps the numbers of the others
        head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        self.tied = head is not None and head.weight is embedding.weight
        if not self.ends_here:
            self._norm = self._base.norm = self._none
            for name, module in list(model.named_children()):
                if module is not self._base:
                    setattr(model, name, nn.Identity())
        if self._place and not (self.tied and self.ends_here):
            model.set_input_embeddings(nn.Identity())

    # --- passing through -----------------------------------------------------------------------------------------------

    def train_packs(
        self, packs: Sequence[Pack], pass_on: Callable[[Pack], torch.Tensor], backward: Callable[[Pack], T]
    ) -> list[T]:
        """Add the gradients of all packs; return the results of the last stage.

        Args:
            packs: Packs of this rank.
            pass_on: Runs the layers of a stage.
            backward: Runs the layers of the last stage, the loss, and its gradient.
        """
        if self._chunks > 1:
            packs = [*packs, *[padding_pack(packs[0])] * (-len(packs) % self._ranks)] if packs else packs
        held: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        found = []
        for action in schedule(self._place, self._ranks, self._chunks, len(packs)):
            pack, key, stage = packs[action.pack], action[1:], action.chunk * self._ranks + self._place
            if not action.backward:
                begun, reached = self._receive(pack, stage, self.forth) if stage else None, None
                if begun is not None:
                    begun.requires_grad_()
                if stage < self._last:
                    reached = self._run(action.chunk, begun, pass_on, pack)
                    self._send(reached, 1, self.forth)
                held[key] = begun, reached
                continue
            begun, reached = held.pop(key)
            if reached is None:
                found.append(self._run(action.chunk, begun, backward, pack))
            else:
                reached.backward(self._receive(pack, stage, self.back))
            if begun is not None:
                assert begun.grad is not None
                self._send(begun.grad, -1, self.back)
        self._flush()
        return found

    def run_packs(
        self, packs: Sequence[Pack], pass_on: Callable[[Pack], torch.Tensor], ask: Callable[[Pack], T]
    ) -> list[T]:
        """Run all packs without gradients; return the results of the last stage."""
        found = []
        for pack in packs:
            for chunk in range(self._chunks):
                stage = chunk * self._ranks + self._place
                begun = self._receive(pack, stage, self.forth) if stage else None
                if stage < self._last:
                    self._send(self._run(chunk, begun, pass_on, pack), 1, self.forth)
                else:
                    found.append(self._run(chunk, begun, ask, pack))
        self._flush()
        return found

    def _run(self, chunk: int, begun: torch.Tensor | None, function: Callable[[Pack], T], pack: Pack) -> T:
        with self._only(chunk):
            self.incoming = begun
            return function(pack)

    @contextmanager
    def _only(self, chunk: int) -> Iterator[None]:
        """The model with the layers of one stage alone."""
        layers, base = self._base.layers, self._base
        base.layers = self._stages[chunk]
        base.norm = self._norm if chunk == self._chunks - 1 else self._none
        try:
            yield
        finally:
            base.layers, base.norm = layers, self._norm

    def _send(self, tensor: torch.Tensor, step: int, groups: Sequence[Any]) -> None:
        tensor = tensor.detach().float().contiguous()
        self._sent = [sent for sent in self._sent if not sent[0].is_completed()]  # gloo tells at the end only
        self._sent.append((distributed.isend(tensor, self._neighbour(step), group=groups[self._wraps(step)]), tensor))

    def _receive(self, pack: Pack, stage: int, groups: Sequence[Any]) -> torch.Tensor:
        tokens = -(-len(pack.tokens) // self._parts)
        tensor = torch.empty(1, tokens, self._width, device=self._device)
        step = -1 if groups is self.forth else 1
        distributed.recv(tensor, self._neighbour(step), group=groups[self._wraps(step)])
        return tensor

    def _wraps(self, step: int) -> bool:
        """Return True if the neighbour is at the other end of the pipeline."""
        return not 0 <= self._place + step < self._ranks

    def _neighbour(self, step: int) -> int:
        """The rank that has the stage before or after each of this rank's."""
        return (self._place + step) % self._ranks * self._around + self._rank % self._around

    def _flush(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

"""A model on one rank of a mesh: loading it, and running it on packs."""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from antiphon.algorithms.routing import Balance, Routers, find_routers
from antiphon.core.errors import ConfigError
from antiphon.core.torch_profile import ProfiledWorker
from antiphon.core.types import ROUTED_EXPERTS, Pack
from antiphon.core.vision import VisionEncoder, decoder_of, encoder_parameters, reads_images
from antiphon.learning.config import LearnerConfig
from antiphon.learning.host_device_copy import save_on_host, to_device
from antiphon.learning.mesh import TIMEOUT, Mesh, connect_store, copy_to_group, gather_from_group, reduce_from_group
from antiphon.learning.model import lora
from antiphon.learning.model.attention import CONTEXT_ATTENTION, AttentionReader
from antiphon.learning.model.attention import PACKED_ATTENTION as PACKED_ATTENTION
from antiphon.learning.model.dropout import TextDropout, hash_texts
from antiphon.learning.model.image_inputs import decoder_inputs
from antiphon.learning.model.loading import Checkpoint, resolve_device
from antiphon.learning.model.memory_efficient_layers import use_memory_efficient_layers
from antiphon.learning.model.pack_layout import PackLayout, loss_sequences, previous_tokens
from antiphon.learning.model.quantized_base import hold_base_in_nf4
from antiphon.learning.parallel.sharding import ShardedModel
from antiphon.learning.parallel.whole_model import WholeModel
from antiphon.weights.rendezvous import open_store


def freeze_parameters(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters whose names match one of the patterns from training.

    Raises:
        ConfigError: A pattern matches no name, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for number, pattern in enumerate(patterns):
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"no parameter of {type(model).__name__} has a name like {pattern!r}; names are {', '.join(names[:12])}, …",
                key=f"learner.freeze.{number}",
                value=pattern,
                valid=names,
            )
    for name, parameter in model.named_parameters() if patterns else ():
        parameter.requires_grad_(parameter.requires_grad and not any(fnmatch.fnmatchcase(name, p) for p in patterns))
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("these patterns leave no parameter to train", key="learner.freeze", value=patterns)


class ModelWorker(ProfiledWorker):
    """Holds a model, or this rank's share of it, and runs it on packs. Subclasses say which model it is.

    Attributes:
        sharded: Class of the model on several ranks.
        loads_whole: Load the whole model on each of several ranks, to be cut then; otherwise each rank reads its share.
    """

    sharded = ShardedModel
    loads_whole = False

    def __init__(self, model_path: str, config: LearnerConfig, seed: int) -> None:
        """Load the model; ranks that form a group load it in `join`."""
        torch.set_num_threads(config.threads)
        # It takes up to a second to plan for shapes that it has not seen, and every pack has others.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.config = config
        self.model_path = model_path
        self.seed = seed
        self.device = resolve_device(config.device)
        self.mesh: Mesh | None = None
        self._encoder: VisionEncoder | None = None  # once a pack has images
        self._routers: Routers | None = None  # once they replay experts or balance them
        self._balance = 0.0  # weight of the balance loss
        self._sequences = 1  # in the current update
        self._balances: list[Balance] = []  # of the current update
        if not config.forms_group:
            self._load_model()

    def host(self, address: str) -> str:
        """Open the store at which the ranks of the mesh meet, on an address of this machine; return where it is."""
        self._store, where = open_store(address, TIMEOUT)
        return where

    def join(self, rank: int, where: str) -> None:
        """Enter the mesh and load the model, together with all other ranks."""
        self.mesh = Mesh(self.config.mesh, rank, connect_store(where), self.device)
        self._load_model()

    @property
    def _is_first(self) -> bool:
        """True for the rank that speaks for all."""
        return self.mesh is None or self.mesh.rank == 0

    def _load_model(self) -> None:
        config = self.config
        torch.manual_seed(self.seed)
        self.model = self._load()
        self._kind = type(self.model)  # before it is sharded, which makes it another
        self._layers_with_experts = find_routers(self.model)
        freeze_parameters(self.model, config.freeze)
        if config.lora is not None:
            lora.add_adapters(self.model, config.lora)
            for parameter in self._parameters_beside_adapters():
                parameter.requires_grad_(True)
            self._names = lora.tied_names(self.model)
        self.model.train()
        use_memory_efficient_layers(self.model)
        if self._shrinks_base:
            self._shrink_base()
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.shards = self.sharded(self.model, self.mesh, config) if self.mesh else WholeModel(self.model)
        if isinstance(self.shards, ShardedModel) and any(parameter.is_meta for parameter in self.model.parameters()):
            files = Checkpoint(self.model_path, self._kind, self.model.config)
            self.shards.fill(files, self.device, offload=config.cpu_offload)

    @property
    def _load_device(self) -> torch.device:
        """The device the model is loaded on: `meta`, without memory, if each of several ranks reads its share."""
        if self.mesh is not None and not self.loads_whole:
            return torch.device("meta")
        return torch.device("cpu") if self._shrinks_base else self.device  # which may lack the memory for all of it

    @property
    def _shrinks_base(self) -> bool:
        """True if the weights that adapters are added to may be held in fewer bits. FSDP shards weights of one dtype alone."""
        added = self.config.lora
        return added is not None and self.mesh is None and (self.config.dtype == "bfloat16" or added.quantize == "nf4")

    def _shrink_base(self) -> None:
        """Hold the weights that adapters are added to in fewer bits, and move all of the model to its device."""
        if self.config.dtype == "bfloat16":
            lora.hold_base_in_bfloat16(self.model)
        if self.config.lora is not None and self.config.lora.quantize == "nf4":
            hold_base_in_nf4(self.model, self.device)
        self.model.to(self.device)

    @property
    def attention(self) -> str:
        """Name of the attention implementation of the model."""
        mesh = self.config.mesh
        return PACKED_ATTENTION if mesh.context == 1 else CONTEXT_ATTENTION[mesh.context_attention]

    def _load(self) -> PreTrainedModel:
        """Load the model at `model_path`."""
        raise NotImplementedError

    def _parameters_beside_adapters(self) -> Iterable[torch.nn.Parameter]:
        """Return the parameters that are trained beside adapters: those the model was not loaded with."""
        return ()

    # --- running it on packs -------------------------------------------------------------------------------------------

    def _targets(self, pack: Pack) -> torch.Tensor:
        """Return the positions of the loss tokens of a pack, [N]."""
        return self._tensor(np.flatnonzero(pack.loss_mask))

    def _hidden(self, pack: Pack, targets: torch.Tensor, reader: AttentionReader | None = None) -> torch.Tensor:
        """Return the last hidden states that predict the loss tokens, [N, H]."""
        hidden, layout = self._hidden_states(pack, reader)
        return hidden.index_select(0, layout.previous[targets])

    def _hidden_states(self, pack: Pack, reader: AttentionReader | None = None) -> tuple[torch.Tensor, PackLayout]:
        """Return the last hidden states of all tokens [T, H], and the layout of the pack."""
        layout = self._layout(pack)
        hidden = self._run_layers(pack, layout, reader)
        _, context = self._context(len(layout.positions))
        return (hidden if context is None else gather_from_group(hidden, context)), layout

    def _pipeline_forward(self, pack: Pack, reader: AttentionReader | None = None) -> torch.Tensor:
        """Run the layers of this rank; return hidden states [1, n, H] for the rank with the next layers."""
        with self._autocast():
            return self._run_layers(pack, self._layout(pack), reader)[None]

    def _layout(self, pack: Pack) -> PackLayout:
        """Return the layout of a pack, and set up routers and dropout for its forward."""
        layout = PackLayout.of(pack.lengths, pack.parents, self.device, multiple=self.config.mesh.context)
        self._set_expert_routing(pack, layout)
        self._set_dropout(pack, layout)
        return layout

    def _run_layers(self, pack: Pack, layout: PackLayout, reader: AttentionReader | None = None) -> torch.Tensor:
        """Run the layers of this rank; return the hidden states of the tokens that it computes, [n, H]."""
        here, context = self._context(len(layout.positions))
        with save_on_host() if self.config.activation_offload else nullcontext():
            hidden: torch.Tensor = decoder_of(self.model)(
                **self._decoder_inputs(pack, layout, here),
                use_cache=False,
                layout=layout,
                reader=reader,
                context=context,
            ).last_hidden_state[0]
        return self._repeat_dropout(hidden)

    @property
    def _updates_made(self) -> int:
        """Number of updates that were made in this phase of training."""
        return 0

    @cached_property
    def _dropouts(self) -> list[TextDropout]:
        """The dropout of each adapter, if there is any."""
        return [module for module in self.model.modules() if isinstance(module, TextDropout)]

    def _set_dropout(self, pack: Pack, layout: PackLayout) -> None:
        """Set what adapters drop in the next forward of a pack: nothing without a gradient."""
        keys = None
        if self._dropouts and torch.is_grad_enabled():
            keys = self._tensor(hash_texts(pack, self.seed, self._updates_made))
            here, _ = self._context(len(layout.positions))
            keys = F.pad(keys, (0, len(layout.positions) - len(keys)))[here]
        self._set_dropout_keys(keys)

    def _set_dropout_keys(self, keys: torch.Tensor | None) -> None:
        for dropout in self._dropouts:
            dropout.keys = keys

    def _repeat_dropout(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states; layers that are computed again for their gradient drop what they have dropped now.

        Other packs may have passed in between.
        """
        if self._dropouts and hidden.requires_grad:
            keys = self._dropouts[0].keys
            hidden.register_hook(lambda _: self._set_dropout_keys(keys))
        return hidden

    def _decoder_inputs(self, pack: Pack, layout: PackLayout, here: slice) -> dict[str, Any]:
        """Return what the layers of this rank begin with: tokens, what the rank before made of them, or embeddings."""
        positions = {"position_ids": layout.positions[None, here]}
        if self.shards.incoming is not None:
            return positions | {"inputs_embeds": self.shards.incoming}
        if not pack.images and not self._reads_images_together:
            return positions | {"input_ids": self._tokens(pack, layout)[None, here]}
        self._encoder = self._encoder or VisionEncoder(self.model, self.model_path)
        given = decoder_inputs(self._encoder, pack, self._tokens(pack, layout), layout.positions)
        if self._reads_images_together and torch.is_grad_enabled():
            # FSDP adds up the gradients that ranks have: all must have one of each parameter, if it is 0, whatever their packs.
            zero = 0 * sum(parameter.sum() for parameter in encoder_parameters(self.model))
            given["inputs_embeds"] = given["inputs_embeds"] + zero
        return given

    @property
    def _reads_images_together(self) -> bool:
        """True if several ranks have a vision-language model together."""
        return self.mesh is not None and reads_images(self.model.config)

    def _tokens(self, pack: Pack, layout: PackLayout) -> torch.Tensor:
        """Return the tokens of a pack, padded to the length of its layout, [T]."""
        return F.pad(self._tensor(pack.tokens).long(), (0, len(layout.positions) - len(pack.tokens)))

    def _context(self, tokens: int) -> tuple[slice, Any]:
        """Return which of so many rows this rank computes, and the group that shares them; None if it computes all."""
        ranks = self.config.mesh.context
        if self.mesh is None or ranks == 1:
            return slice(None), None
        place = self.mesh.coordinate("context")
        return slice(tokens * place // ranks, tokens * (place + 1) // ranks), self.mesh.group("context")

    def _split_over_context(
        self, rows: torch.Tensor, compute: Callable[[torch.Tensor, slice], Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        """Apply `compute` to rows [N, H] that all context ranks have, each rank for its share; return all results [N]."""
        here, context = self._context(len(rows))
        if context is None:
            return tuple(compute(rows, here))
        around = (here.start, len(rows) - here.stop)
        return tuple(
            reduce_from_group(F.pad(own, around), context) for own in compute(copy_to_group(rows, context)[here], here)
        )

    def _set_expert_routing(self, pack: Pack, layout: PackLayout) -> None:
        """Set up the routers for the next forward: replay recorded experts, and add the balance loss."""
        recorded = pack.streams.get(ROUTED_EXPERTS, None)
        if self._routers is not None:
            self._routers.replayed = self._routers.balance = None  # of an earlier pack, or of an earlier phase
        if recorded is None and not self._balance:
            return
        self._routers = self._routers or Routers(self._layers_with_experts)
        tokens = len(layout.positions)
        here, context = self._context(tokens)
        if recorded is not None:
            known = np.flatnonzero(recorded.any((1, 2)))
            # Siblings go on from one token, the last of their prompt: it takes the experts of the first of them in the pack.
            before, first = np.unique(previous_tokens(pack.lengths, pack.parents)[known], return_index=True)
            replayed = torch.full((tokens, *recorded.shape[1:]), -1, device=self.device)
            replayed[self._tensor(before)] = self._tensor(recorded[known[first]]).long() - 1
            self._routers.replayed = replayed[here]
        if self._balance and torch.is_grad_enabled():  # else no router would add it, and nobody would take it
            members = torch.zeros(len(found := loss_sequences(pack)), tokens, device=self.device)
            for row, (path, _) in zip(members, found, strict=True):
                row[self._tensor(path)] = 1
            gather = (lambda rows: rows) if context is None else partial(gather_from_group, group=context)
            self._routers.balance = Balance(members, self._balance / self._sequences, gather)
            self._balances.append(self._routers.balance)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)

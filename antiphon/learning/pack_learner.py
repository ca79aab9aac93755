"""What the learners on torch share: packs in, an updated model out. It does not know where samples come from."""

import contextlib
import ctypes
import math
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.routing import Balance, Routers, find_routers
from antiphon.core.errors import DataError, NonFiniteError
from antiphon.core.failpoints import hit
from antiphon.core.types import ROUTED_EXPERTS, FloatArray, Pack, TrainBatch, Update
from antiphon.core.workers import Worker
from antiphon.learning.checkpoint_writer import CheckpointWriter
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.host_device_copy import mean_metrics, to_device, to_floats
from antiphon.learning.mesh import TIMEOUT, Mesh, connect_store, copy_to_group, gather_from_group, reduce_from_group
from antiphon.learning.model import lora
from antiphon.learning.model.attention import CONTEXT_ATTENTION, AttentionReader
from antiphon.learning.model.attention import PACKED_ATTENTION as PACKED_ATTENTION
from antiphon.learning.model.hf_checkpoint import (
    State,
    assign_blocks,
    block_name,
    copy_tokenizer,
    file_sizes,
    shard_file,
    write_config,
    write_index,
    write_weights,
)
from antiphon.learning.model.loading import Checkpoint, resolve_device
from antiphon.learning.model.memory_efficient_layers import use_memory_efficient_layers
from antiphon.learning.model.pack_layout import PackLayout, loss_sequences, previous_tokens
from antiphon.learning.parallel.sharding import ShardedModel
from antiphon.learning.parallel.whole_model import WholeModel
from antiphon.record.checkpoint import TRAINING_STATE, convert_save_errors
from antiphon.weights.manifest import TensorSpec
from antiphon.weights.rendezvous import open_store

GatherTensor = Callable[[], torch.Tensor]  # for a tensor of which each rank may have a piece

ADAPTER = "adapter"  # where a checkpoint has what peft reads
NONFINITE_IN_A_ROW = 10  # updates that are skipped one after another, after which the model is taken to be broken


class PackLearner(Worker):
    """Holds a model and its optimiser. `begin` a phase, then `step` and `save`. What the model is, and what its loss, is a
    subclass's to say."""

    sharded = ShardedModel  # what it is on several ranks
    loads_whole = False  # on several ranks too, to be cut then; else each reads its share

    def __init__(self, model_path: str, config: LearnerConfig, seed: int) -> None:
        """With a mesh of several ranks, the model is loaded by `join`."""
        torch.set_num_threads(config.threads)
        # It takes up to a second to plan for shapes that it has not seen, and every pack has others.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.config = config
        self.model_path = model_path
        self.seed = seed
        self.device = resolve_device(config.device)
        self.mesh: Mesh | None = None
        self._routers: Routers | None = None  # once they are told something
        self._balance = 0.0  # the weight of what spreads sequences over experts
        self._sequences = 1  # in the update in hand
        self._balances: list[Balance] = []  # of the same
        self._skipped_in_a_row = 0  # updates, as their gradients were not finite
        self._writer = CheckpointWriter(lambda end: self.emit(end))  # of checkpoints
        if config.mesh.world == 1:
            self._open()

    def host(self, address: str) -> str:
        """Let the ranks of the mesh, of which this is the first, meet at an address of this machine; returns where."""
        self._store, where = open_store(address, TIMEOUT)
        return where

    def join(self, rank: int, where: str) -> None:
        """Enter the mesh, together with all other ranks."""
        self.mesh = Mesh(self.config.mesh, rank, connect_store(where), self.device)
        self._open()

    @property
    def _is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.mesh is None or self.mesh.rank == 0

    def _open(self) -> None:
        config = self.config
        torch.manual_seed(self.seed)
        self.model = self._load()
        self._kind = type(self.model)  # before it is sharded, which makes it another
        self._layers_with_experts = find_routers(self.model)
        if config.lora is not None:
            lora.add_adapters(self.model, config.lora)
            for parameter in self._always_trained():
                parameter.requires_grad_(True)
        self.model.train()
        use_memory_efficient_layers(self.model)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.shards = self.sharded(self.model, self.mesh, config) if self.mesh else WholeModel(self.model)
        if isinstance(self.shards, ShardedModel) and any(parameter.is_meta for parameter in self.model.parameters()):
            files = Checkpoint(self.model_path, self._kind, self.model.config)
            self.shards.fill(files, self.device, offload=config.cpu_offload)

    @property
    def _load_device(self) -> torch.device:
        """The device that the model is loaded on: none, if each of several ranks is to read its share."""
        return self.device if self.mesh is None or self.loads_whole else torch.device("meta")

    @property
    def attention(self) -> str:
        """The attention that the model is to have."""
        mesh = self.config.mesh
        return PACKED_ATTENTION if mesh.context == 1 else CONTEXT_ATTENTION[mesh.context_attention]

    def _load(self) -> PreTrainedModel:
        """The model, at `model_path`."""
        raise NotImplementedError

    def _always_trained(self) -> Iterable[torch.nn.Parameter]:
        """What is trained in any case: what the model was not loaded with."""
        return ()

    def _backward(self, pack: Pack) -> dict[str, torch.Tensor]:
        """Add the pack's gradient, unless gradients are off; return sums over its loss tokens, as `sum_measures` does."""
        raise NotImplementedError

    def _forward(self, pack: Pack, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the model says at the loss tokens, first what `score` returns, [N] each."""
        raise NotImplementedError

    # --- the phases of a run -------------------------------------------------------------------------------------------

    def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """Start a phase with a fresh optimiser and schedule; returns the number of parameters."""
        self.algorithm = algorithm
        self._balance = algorithm.expert_balance
        self.optimizer_config = optimizer
        self.optimizer = self._optimizer(optimizer)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: learning_rate_factor(optimizer, n, total_updates)
        )
        # An update without packs makes no step, and may be the first.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def _optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        """One that has made no step."""
        # Those of one mesh: the optimiser takes no others at once.
        alike: dict[Any, list[torch.nn.Parameter]] = defaultdict(list)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                alike[getattr(parameter, "device_mesh", None)].append(parameter)
        return torch.optim.AdamW(
            [{"params": own} for own in alike.values()],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,  # one pass over the parameters, no temporaries
        )

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Do every update of the batch; returns metrics, see `transfer.mean_metrics`, and the rate of the last update."""
        began = time.perf_counter()
        updates = [self._update(update) for update in batch.updates]
        skipped = sum(update.pop("skipped_updates") for update in updates)
        rate = {"lr": updates[-1]["lr"]} if updates else {}
        return mean_metrics(updates) | rate | {"skipped_updates": skipped, "seconds": time.perf_counter() - began}

    def score(self, packs: list[Pack]) -> list[FloatArray]:
        """What this model says at the loss tokens, 0 elsewhere, [T] a pack."""

        def ask(pack: Pack) -> FloatArray:
            result = np.zeros(len(pack.tokens), dtype=np.float32)
            said, *_ = self.shards.run(self._forward, pack, self._targets(pack))
            result[pack.loss_mask] = said.float().cpu().numpy()
            return result

        with torch.no_grad():
            return self.shards.run_packs(packs, self._pipeline_forward, ask)

    # --- weights in, weights out ---------------------------------------------------------------------------------------

    def save(self, place: Path) -> None:
        """Begin to write into `place`: Hugging Face weights, loadable as they are, tokenizer, optimiser, random generator.
        Returns once all is copied; training goes on while it is written, and `SAVED` is emitted when it is there."""
        self._writer.finish()
        self._writer.begin(partial(self._write, place, self._snapshot()))

    def _snapshot(self) -> "_Snapshot":
        """What this rank keeps of now: all ranks take part in putting each tensor together, and each keeps some."""
        rank, mesh = (self.mesh.rank if self.mesh else 0), self.config.mesh
        alike = mesh.world // mesh.pipeline  # ranks, which have the same layers
        kept = dict(self._kept())
        keepers = assign_blocks(kept.items(), alike)

        def mine(name: str) -> bool:
            return keepers.get(block_name(name)) == rank % alike

        weights, adapters, moments = State(), State(), dict[str, State]()
        if self.config.lora is not None:
            trained = {name: tensor.detach for name, tensor in self.shards.gather_parameters(trained=True)}
            adapters = gather_copies(trained, keep=self._is_first)
        for name, tensor in kept.items():
            if self.mesh is None and self.config.lora is not None:  # what is not trained is written from where it is
                weights[name] = adapters.get(name, tensor.detach().cpu())
            else:
                weights |= gather_copies({name: tensor.detach}, keep=mine(name))
        for name, state in self._moments():
            if name in kept:  # not of what another stage has, too
                whole = gather_copies(state, keep=mine(name))
                moments |= {name: whole} if mine(name) else {}
        training = {"moments": moments, "updates": self.scheduler.last_epoch, "random": torch.get_rng_state()}
        sizes: list[dict[str, int]] = [{}]
        if self.mesh is not None:
            outlines = self._merged({name: tensor.to("meta") for name, tensor in weights.items()})
            sizes = self.mesh.all_gather(file_sizes(self.model, outlines))
        return _Snapshot(rank, weights, adapters, training, sizes)

    def _write(self, place: Path, cut: "_Snapshot") -> None:
        with convert_save_errors(place):
            (place / TRAINING_STATE).mkdir(parents=True, exist_ok=True)
            torch.save(cut.training, place / TRAINING_STATE / f"{cut.rank}.pt")
            write_weights(self.model, self._merged(cut.weights), place / shard_file(cut.rank, len(cut.sizes)))
            if self._is_first:
                if self.config.lora is not None:
                    lora.save_adapters(cut.adapters, self.config.lora, place / ADAPTER)
                write_index(cut.sizes, place)
                write_config(self.model, self._kind, place)
                copy_tokenizer(self.model_path, place)
        hit("learner.saved")

    def _merged(self, weights: State) -> State:
        """Without adapters of their own."""
        return weights if self.config.lora is None else lora.merge_adapters(weights, self.config.lora.scale)

    def restore(self, directory: Path) -> None:
        """Go on from a checkpoint, after `begin`."""
        files = Checkpoint(directory, self._kind, self.model.config)
        if files.incompatibilities:
            raise DataError(f"{directory} is not a checkpoint of this model: {files.incompatibilities[:3]}")
        adapters = {} if self.config.lora is None else lora.load_adapters(directory / ADAPTER)
        states = [
            torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            for file in sorted((directory / TRAINING_STATE).glob("*.pt"))
        ]
        moments = {name: state for part in states for name, state in part["moments"].items()}
        for name, piece in self.shards.local_parameters():
            if not piece.requires_grad:
                continue
            try:
                self.shards.scatter_tensor(name, piece, adapters[name] if name in adapters else files[name])
                self._take_moments(name, piece, moments[name])
            except (KeyError, RuntimeError) as error:
                raise DataError(f"{directory} is not a checkpoint of this model: {name}: {error}") from error
        self._set_updates(states[0]["updates"])
        torch.set_rng_state(states[0]["random"])

    def _set_updates(self, count: int) -> None:
        """Have the schedule be where it is after so many updates. Of how many groups of parameters is the mesh's to say."""
        self.scheduler.last_epoch = count
        rates = [
            base * rule(count) for base, rule in zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.scheduler._last_lr = rates

    def _take_moments(self, name: str, parameter: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
        """Have the optimiser keep this of a parameter."""
        self.optimizer.state[parameter] = {key: self._taken(name, parameter, value) for key, value in kept.items()}

    def _taken(self, name: str, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of what is kept of each element of a parameter; a count of steps is one for all."""
        if not whole.dim():
            return whole.to(parameter.device, copy=True)
        piece = torch.empty_like(parameter)
        self.shards.scatter_tensor(name, piece, whole)
        return piece

    def _kept(self) -> Iterator[tuple[str, TensorSpec]]:
        """What a checkpoint has of the layers of this rank, under the names of a state dict."""
        yield from self.shards.gather_own_layers()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.nn.Parameter):
                yield name, tensor

    def _moments(self) -> Iterator[tuple[str, dict[str, GatherTensor]]]:
        """What the optimiser keeps of each parameter, whole when it is asked for, by all ranks."""
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            whole = partial(self.shards.gather_tensor, name)
            yield name, {key: partial(whole, value) if value.dim() else value.detach for key, value in state.items()}

    # --- a device that others use too ----------------------------------------------------------------------------------

    def offload(self) -> None:
        """Leave the device: everything is kept in the memory of its machine."""
        self._move(torch.device("cpu"))

    def reload(self) -> None:
        """Come back to the device."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.config.cpu_offload:
            return  # only what is computed with is ever there
        self.model.to(device)
        for state in self.optimizer.state.values() if hasattr(self, "optimizer") else ():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device)
        trim_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def advance(self) -> bool:
        """Wait a little for a checkpoint that is being written; see `Worker.advance`."""
        return self._writer.poll()

    def close(self) -> None:
        """See `Worker.close`: what is being written becomes whole."""
        self._writer.close()

    # --- one update ----------------------------------------------------------------------------------------------------

    def _update(self, update: Update) -> dict[str, float]:
        self._sequences = update.sequences or 1
        self._balances.clear()
        sums: dict[str, torch.Tensor] = {}
        packs = update.packs[self.shards.data]
        for own in (*self._measured(update), *self.shards.train_packs(packs, self._pipeline_forward, self._backward)):
            for name, value in own.items():
                sums[name] = sums[name] + value if name in sums else value
        totals = self.shards.reduce_sums(to_floats(sums))
        # Where one rank has no packs none has: without a gradient, momentum and decay are to move nothing either.
        norm = self._optimizer_step() if packs else 0.0
        made = math.isfinite(norm)  # as on all other ranks, which have the same norm
        self._count_skipped(made, norm)
        metrics = {"lr": self.scheduler.get_last_lr()[0], "tokens": totals.pop("tokens", 0.0)}
        metrics["skipped_updates"] = float(not made)
        if made:
            self.scheduler.step()
        loss = totals.pop("loss", 0.0)
        if packs and made:
            metrics |= {"loss": loss, "grad_norm": norm}
            metrics |= {"expert_balance": self._balanced()} if self._balance else {}
        metrics |= {name: value / max(metrics["tokens"], 1.0) for name, value in totals.items()}
        if metrics.get("mixed_share"):
            metrics["mixed_mismatch_kl"] /= metrics["mixed_share"]  # over the flagged tokens alone
        return metrics

    def _measured(self, update: Update) -> Iterator[dict[str, torch.Tensor]]:
        """As `_backward`, of what makes no gradient, and so has no loss either."""
        packs = update.forward_only[self.shards.data] if update.forward_only else ()
        with torch.no_grad():
            for own in self.shards.run_packs(packs, self._pipeline_forward, self._backward) if packs else ():
                yield {name: value for name, value in own.items() if name != "loss"}

    def _count_skipped(self, made: bool, norm: float) -> None:
        """`NonFiniteError` if the update was not made, and is not to be skipped."""
        self._skipped_in_a_row = 0 if made else self._skipped_in_a_row + 1
        said = f"the gradient norm is {norm}, and the update was not made"
        if not made and self.config.on_nonfinite == "fail":
            raise NonFiniteError(f"{said} (learner.on_nonfinite: fail)")
        if self._skipped_in_a_row >= NONFINITE_IN_A_ROW:
            raise NonFiniteError(f"{said}, as the {NONFINITE_IN_A_ROW - 1} before it (learner.on_nonfinite: skip)")

    def _balanced(self) -> float:
        """The `balance_loss` of the update's forwards, a mean over sequences and layers."""
        total = float(sum(loss for balance in self._balances for loss in balance.found.values()))
        if self.mesh is not None:  # ranks that share packs have other layers, or have computed the same
            total = self.mesh.all_reduce([total])[0] / (self.config.mesh.context * self.config.mesh.tensor)
        return total / (self._sequences * len(self._layers_with_experts))

    def _optimizer_step(self) -> float:
        """Make a step, if the gradient is finite; returns its norm, before it was clipped."""
        norm = self.shards.clip_gradient(self.optimizer_config.max_grad_norm)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _targets(self, pack: Pack) -> torch.Tensor:
        """The loss tokens of the pack, [N]."""
        return self._tensor(np.flatnonzero(pack.loss_mask))

    def _hidden(self, pack: Pack, targets: torch.Tensor, reader: AttentionReader | None = None) -> torch.Tensor:
        """The last hidden states from which the loss tokens are predicted, [N, H]."""
        hidden, layout = self._states(pack, reader)
        return hidden.index_select(0, layout.previous[targets])

    def _states(self, pack: Pack, reader: AttentionReader | None = None) -> tuple[torch.Tensor, PackLayout]:
        """The last hidden states of all tokens, [T, H], and where each token stands."""
        layout = self._layout(pack)
        hidden = self._run_layers(pack, layout, reader)
        _, context = self._context(len(layout.positions))
        return (hidden if context is None else gather_from_group(hidden, context)), layout

    def _pipeline_forward(self, pack: Pack, reader: AttentionReader | None = None) -> torch.Tensor:
        """The hidden states that this rank's layers come to, [1, n, H], for the rank that has the next."""
        with self._autocast():
            return self._run_layers(pack, self._layout(pack), reader)[None]

    def _layout(self, pack: Pack) -> PackLayout:
        layout = PackLayout.of(pack.lengths, pack.parents, self.device, multiple=self.config.mesh.context)
        self._route(pack, layout)
        return layout

    def _run_layers(self, pack: Pack, layout: PackLayout, reader: AttentionReader | None = None) -> torch.Tensor:
        """The hidden states of the tokens that this rank computes, after the layers that it has, [n, H]."""
        here, context = self._context(len(layout.positions))
        given: dict[str, torch.Tensor] = {}
        if self.shards.incoming is not None:
            given["inputs_embeds"] = self.shards.incoming
        else:
            given["input_ids"] = self._tokens(pack, layout)[None, here]
        hidden: torch.Tensor = self.model.base_model(
            **given,
            position_ids=layout.positions[None, here],
            use_cache=False,
            layout=layout,
            reader=reader,
            context=context,
        ).last_hidden_state[0]
        return hidden

    def _tokens(self, pack: Pack, layout: PackLayout) -> torch.Tensor:
        """The tokens of a pack, as many as its layout has, [T]."""
        return F.pad(self._tensor(pack.tokens).long(), (0, len(layout.positions) - len(pack.tokens)))

    def _context(self, tokens: int) -> tuple[slice, Any]:
        """Of so many tokens or other rows, those that this rank computes, and with whom it shares them."""
        ranks = self.config.mesh.context
        if self.mesh is None or ranks == 1:
            return slice(None), None
        place = self.mesh.coordinate("context")
        return slice(tokens * place // ranks, tokens * (place + 1) // ranks), self.mesh.group("context")

    def _split_over_context(
        self, rows: torch.Tensor, say: Callable[[torch.Tensor, slice], Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        """What is said of rows [N, H] that all ranks have who share tokens, [N] each: of each row, one of them says it."""
        here, context = self._context(len(rows))
        if context is None:
            return tuple(say(rows, here))
        around = (here.start, len(rows) - here.stop)
        return tuple(
            reduce_from_group(F.pad(own, around), context) for own in say(copy_to_group(rows, context)[here], here)
        )

    def _route(self, pack: Pack, layout: PackLayout) -> None:
        """Have the next forward, and what of it is computed again, take the experts that are known, and spread the others."""
        recorded = pack.streams.get(ROUTED_EXPERTS, None)
        if recorded is None and not self._balance:
            if self._routers is not None:
                self._routers.replayed = None
            return
        self._routers = self._routers or Routers(self._layers_with_experts)
        tokens = len(layout.positions)
        here, context = self._context(tokens)
        self._routers.replayed = None
        if recorded is not None:
            known = np.flatnonzero(recorded.any((1, 2)))
            # Siblings go on from one token, the last of their prompt: it takes the experts of the first of them in the pack.
            before, first = np.unique(previous_tokens(pack.lengths, pack.parents)[known], return_index=True)
            replayed = torch.full((tokens, *recorded.shape[1:]), -1, device=self.device)
            replayed[self._tensor(before)] = self._tensor(recorded[known[first]]).long() - 1
            self._routers.replayed = replayed[here]
        if self._balance:
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


def learning_rate_factor(config: OptimizerConfig, update: int, total: int) -> float:
    """Learning rate at `update` of `total`, relative to its peak: linear warm-up, then the schedule."""
    if update < config.warmup_steps:
        return (update + 1) / config.warmup_steps
    progress = min((update - config.warmup_steps) / max(total - config.warmup_steps, 1), 1.0)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - config.final_ratio) * progress
        case "cosine":
            return config.final_ratio + (1.0 - config.final_ratio) * (1 + math.cos(math.pi * progress)) / 2


def trim_memory() -> None:
    """Give back to the system what glibc's allocator keeps of freed gradients and activations, over a gibibyte beside a
    model of 135M parameters in float32: the copy of the weights needs the room."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


class _Snapshot(NamedTuple):
    """What a rank keeps of a checkpoint."""

    rank: int
    weights: State
    adapters: State  # all of them, on the first rank
    training: dict[str, Any]
    sizes: list[dict[str, int]]  # of what each rank writes, see `file_sizes`


def gather_copies(asks: Mapping[str, GatherTensor], *, keep: bool) -> State:
    """Take part in putting tensors together, one at a time; copies on the CPU, if this rank keeps them."""
    found = {}
    for name, ask in asks.items():
        if keep:
            found[name] = ask().detach().to("cpu", copy=True).contiguous()
        else:
            ask()
    return found

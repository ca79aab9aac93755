"""Checkpoints of a learner, and leaving a device to others."""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from antiphon.core.errors import DataError
from antiphon.core.failpoints import hit
from antiphon.learning.checkpoint_writer import CheckpointWriter
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.model import lora
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
from antiphon.learning.model.loading import Checkpoint
from antiphon.learning.model.quantized_base import is_quantized
from antiphon.learning.model_worker import ModelWorker
from antiphon.record.checkpoint import TRAINING_STATE, convert_save_errors
from antiphon.weights.manifest import TensorSpec

GatherTensor = Callable[[], torch.Tensor]  # gathers a tensor of which each rank may have a piece

KEPT = ("step", "exp_avg", "exp_avg_sq")  # of the state of AdamW, in a checkpoint
ADAPTER = "adapter"  # folder of a checkpoint with the adapters as peft reads them


class CheckpointedLearner(ModelWorker):
    """A model with an optimiser that is saved and restored, one checkpoint at a time."""

    optimizer: torch.optim.Optimizer
    optimizer_config: OptimizerConfig
    scheduler: torch.optim.lr_scheduler.LambdaLR

    def __init__(self, model_path: str, config: LearnerConfig, seed: int) -> None:
        self._writer = CheckpointWriter(lambda end: self.emit(end))
        super().__init__(model_path, config, seed)

    def save(self, place: Path) -> None:
        """Copy all that a checkpoint needs, and begin to write it into `place`.

        The files are Hugging Face weights that load as they are, tokenizer, optimiser state and random generator. Training may
        go on when this returns; `SAVED` is emitted when everything is written.
        """
        self._writer.finish()
        self._writer.begin(partial(self._write, place, self._snapshot()))

    def _snapshot(self) -> "_Snapshot":
        """Copy what this rank writes. All ranks take part in gathering each tensor; each keeps some of them."""
        rank, mesh = (self.mesh.rank if self.mesh else 0), self.config.mesh
        alike = mesh.world // mesh.pipeline  # ranks, which have the same layers
        kept = dict(self._saved_tensors())
        keepers = assign_blocks(kept.items(), alike)

        def mine(name: str) -> bool:
            return keepers.get(block_name(name)) == rank % alike

        weights, adapters, moments = State(), State(), dict[str, State]()
        if self.config.lora is not None:
            trained = {name: tensor.detach for name, tensor in self.shards.gather_parameters(trained=True)}
            adapters = gather_copies(trained, keep=self._is_first)
        for name, tensor in kept.items():
            if self.mesh is None and self.config.lora is not None:  # what is not trained is written from where it is
                weights[name] = adapters[name] if name in adapters else self._untrained(name, tensor)
            else:
                weights |= gather_copies({name: tensor.detach}, keep=mine(name))
        for name, state in self._optimizer_moments():
            if name in kept:  # not of what another stage has, too
                whole = gather_copies(state, keep=mine(name))
                moments |= {name: whole} if mine(name) else {}
        training = {"moments": moments, "updates": self._updates_made, "random": torch.get_rng_state()}
        if self.optimizer_config.moments == "8bit":
            training |= {"scales": self._own_scales(), "mesh": mesh.model_dump()}
        sizes: list[dict[str, int]] = [{}]
        if self.mesh is not None:
            outlines = self._merged({name: tensor.to("meta") for name, tensor in weights.items()})
            sizes = self.mesh.all_gather(file_sizes(self.model, outlines))
        return _Snapshot(rank, weights, adapters, training, sizes)

    def _untrained(self, name: str, tensor: TensorSpec) -> torch.Tensor:
        """Return a tensor that is not trained: a quantised one as it was before, which is what engines have."""
        quantized = is_quantized(self.model, name)
        return _in_single_precision(self._base_files[lora.base_name(name)] if quantized else tensor.detach().cpu())

    @cached_property
    def _base_files(self) -> Checkpoint:
        """The files that the model was loaded from."""
        return Checkpoint(self.model_path, self._kind, self.model.config)

    def _write(self, place: Path, cut: "_Snapshot") -> None:
        """Write what this rank keeps; the first rank writes the files beside the weights."""
        with convert_save_errors(place):
            (place / TRAINING_STATE).mkdir(parents=True, exist_ok=True)
            torch.save(cut.training, place / TRAINING_STATE / f"{cut.rank}.pt")
            write_weights(self.model, self._merged(cut.weights), place / shard_file(cut.rank, len(cut.sizes)))
            if self._is_first:
                if self.config.lora is not None:
                    lora.save_adapters(cut.adapters, self._names, self.config.lora, place / ADAPTER)
                write_index(cut.sizes, place)
                write_config(self.model, self._kind, place)
                copy_tokenizer(self.model_path, place)
        hit("learner.saved")

    def _merged(self, weights: State) -> State:
        """Return the weights with adapters merged into them."""
        return weights if self.config.lora is None else lora.merge_adapters(weights, self.config.lora.scale)

    def restore(self, directory: Path) -> None:
        """Continue from a checkpoint, after `begin`.

        Raises:
            DataError: The directory is not a checkpoint of this model.
        """
        files = Checkpoint(directory, self._kind, self.model.config)
        if files.incompatibilities:
            message = f"{directory} is not a checkpoint of this model: {files.incompatibilities[:3]}"
            raise DataError(message, path=directory)
        adapters = {} if self.config.lora is None else lora.load_adapters(directory / ADAPTER)
        states = {
            int(file.stem): torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            for file in (directory / TRAINING_STATE).glob("*.pt")
        }
        moments = {name: state for part in states.values() for name, state in part["moments"].items()}
        for name, scales in self._scales_in(states).items():
            moments[name] = moments[name] | {"scales": scales}
        for name, piece in self.shards.local_parameters():
            if not piece.requires_grad:
                continue
            try:
                self.shards.scatter_tensor(name, piece, adapters[name] if name in adapters else files[name])
                self._restore_moments(name, piece, moments[name])
            except (KeyError, RuntimeError) as error:
                message = f"{directory} is not a checkpoint of this model: {name}: {error}"
                raise DataError(message, path=directory) from error
        self._set_updates(states[0]["updates"])
        torch.set_rng_state(states[0]["random"])

    @property
    def _updates_made(self) -> int:
        return self.scheduler.last_epoch

    def _set_updates(self, count: int) -> None:
        """Set the learning-rate schedule to its state after so many updates."""
        self.scheduler.last_epoch = count
        rates = [
            base * rule(count) for base, rule in zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.scheduler._last_lr = rates

    def _scales_in(self, states: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """Return the scales that a checkpoint has of this rank's moments, by parameter; none from another mesh."""
        own = states.get(self.mesh.rank if self.mesh else 0, {})
        alike = self.optimizer_config.moments == "8bit" and own.get("mesh") == self.config.mesh.model_dump()
        return own["scales"] if alike else {}

    def _restore_moments(self, name: str, parameter: torch.Tensor, kept: dict[str, Any]) -> None:
        """Set the optimiser state of a parameter from whole tensors, with `scales` those of quantised moments."""
        state = {key: self._local_piece(name, parameter, kept[key]) for key in KEPT if key in kept}
        if self.optimizer_config.moments == "8bit":
            self.optimizer.restore(parameter, state, kept.get("scales"))
        else:
            self.optimizer.state[parameter] = state

    def _local_piece(self, name: str, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of an optimiser state tensor; a step count is the same on all ranks."""
        if not whole.dim():
            return whole.to(parameter.device, copy=True)
        piece = torch.empty_like(parameter)
        self.shards.scatter_tensor(name, piece, whole)
        return piece

    def _saved_tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield what a checkpoint has of the layers of this rank, under state-dict names."""
        yield from self.shards.gather_own_layers()
        state = self.model.state_dict(keep_vars=True)
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in state)

    def _optimizer_moments(self) -> Iterator[tuple[str, dict[str, GatherTensor]]]:
        """Yield the optimiser state of each parameter, as functions that gather it; all ranks must call them."""
        for name, parameter in self.model.named_parameters():
            kept = [key for key in self.optimizer.state.get(parameter, {}) if key in KEPT]
            yield name, {key: partial(self._gather_moment, name, parameter, key) for key in kept}

    def _own_scales(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of the scales of this rank's quantised moments, with which it can go on to the bit."""
        found = {name: self.optimizer.scales(parameter) for name, parameter in self.model.named_parameters()}
        return {name: {key: value.cpu().clone() for key, value in own.items()} for name, own in found.items() if own}

    def _gather_moment(self, name: str, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """Return the whole of a moment in float32, or the step count. All ranks must call this."""
        if self.optimizer_config.moments == "8bit":
            value = self.optimizer.read(parameter, key)
        else:
            value = self.optimizer.state[parameter][key]
        return self.shards.gather_tensor(name, value) if value.dim() else value.detach()

    # --- a device that others use too ----------------------------------------------------------------------------------

    def offload(self) -> None:
        """Move everything to the memory of the machine, so that others can use the device."""
        self._move(torch.device("cpu"))

    def reload(self) -> None:
        """Move everything back to the device."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        """Move model and optimiser state."""
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
        """Poll the checkpoint that is being written, if any; return True while there is one."""
        return self._writer.poll()

    def close(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        self._writer.close()


def _in_single_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose floats have single precision at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor


def trim_memory() -> None:
    """Return memory that glibc's allocator keeps of freed gradients and activations to the system.

    It is over a gibibyte beside a model of 135M parameters in float32, and the copy of the weights needs the room.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


class _Snapshot(NamedTuple):
    """The part of a checkpoint that one rank writes."""

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

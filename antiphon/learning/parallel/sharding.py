"""A model on the ranks of a mesh: what each has of it, and how what all have together is read and written.

Heads, feed-forward columns and the vocabulary are cut by hand, as the model's own plan for them says: each rank then has plain,
smaller layers, and what they sum to passes through one collective a block. Experts are divided as they are, and tokens sent to
them. What is left of each rank's layers FSDP2 cuts once more.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from antiphon.core.types import Pack
from antiphon.learning.config import LearnerConfig
from antiphon.learning.host_device_copy import to_floats
from antiphon.learning.mesh import Mesh
from antiphon.learning.model import lora
from antiphon.learning.model.loading import allocate, decoder_layers
from antiphon.learning.model.logprobs import Vocabulary
from antiphon.learning.parallel.experts import dispatch_to_experts
from antiphon.learning.parallel.pipeline import Pipeline
from antiphon.learning.parallel.tensor_parallel import (
    COLUMNS,
    GATHERED,
    PARTIAL,
    ROWS,
    SPLIT,
    check_division,
    copy_input_hook,
    find_expert_layers,
    gather_output_hook,
    planned_layers,
    reduce_output_hook,
    split_input_hook,
    vocabulary_embedding,
)
from antiphon.learning.parallel.whole_model import GatheredTensor, PipelineForward, WholeModel
from antiphon.weights.manifest import Piece, TensorSpec

T = TypeVar("T")


class ShardedModel(WholeModel):
    """This rank's share of a model."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh, config: LearnerConfig) -> None:
        """Cut the model, which every rank has whole, if without memory. `UnsupportedError` if it cannot be."""
        super().__init__(model)
        check_division(model, config.mesh)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.mesh = mesh
        self.data = mesh.data
        # Parameters that are divided among the ranks of `tensor`: in which dimension, and how much each has of it.
        self._cut: dict[str, tuple[int, list[int]]] = {}
        self._partial: list[str] = []  # parameters whose gradient each rank of `tensor` has a part of
        self._experts: dict[str, nn.Module] = {}  # by name, what has this rank's experts of a layer
        if config.mesh.expert > 1:
            self._divide_experts()
        if config.mesh.tensor > 1:
            self._divide()
        self._pipeline = Pipeline(model, mesh, self.run) if config.mesh.pipeline > 1 else None
        self._sharded = config.uses_fsdp  # else no rank has packs or tokens of its own
        if self._sharded:
            self._shard(config)
        known = [(name, shapes[name], p.dtype, p.requires_grad) for name, p in model.named_parameters()]
        self._stages = dict(self.mesh.all_gather((mesh.coordinate("pipeline"), known)))

    # --- cutting -------------------------------------------------------------------------------------------------------

    def _divide(self) -> None:
        """Tensor parallelism: layers by columns, then by rows; see Shoeybi et al. 2019, "Megatron-LM"."""
        model, blocks, group = self.model, set(), self.mesh.group("tensor")
        prefix = f"{model.base_model_prefix}."
        for name, module, style in list(planned_layers(model)):
            if style in (COLUMNS, GATHERED):
                blocks.add(name.rpartition(".")[0])
                self._cut_linear(prefix + name, module, 0)
            elif style in (ROWS, SPLIT):
                self._cut_linear(prefix + name, module, 1)
            elif style == PARTIAL:
                self._partial += [f"{prefix}{name}.{own}" for own, _ in module.named_parameters()]
            if style == GATHERED:
                module.register_forward_hook(gather_output_hook(group))
            elif style == SPLIT:
                module.register_forward_pre_hook(split_input_hook(group))
        for name in blocks:
            block = model.base_model.get_submodule(name)
            block.register_forward_pre_hook(copy_input_hook(group), with_kwargs=True)
            block.register_forward_hook(reduce_output_hook(group))
        self._divide_vocabulary()

    def _cut_linear(self, name: str, module: Any, dim: int) -> None:
        """Cut a linear layer by columns (0) or rows (1).

        Of an adapted layer either B or A is cut alike, and each rank has a part of the gradient of the other.
        """
        linear = getattr(module, "base_layer", module)
        self._cut_in(name if linear is module else f"{name}.base_layer", linear, dim)
        if linear is not module:
            cut, whole = ("lora_A", "lora_B") if dim else ("lora_B", "lora_A")
            self._cut_in(f"{name}.{cut}.{lora.NAME}", getattr(module, cut)[lora.NAME], dim)
            self._partial.append(f"{name}.{whole}.{lora.NAME}.weight")
            if dim:  # dropout of columns that other ranks have, too, must be that of one rank
                sizes = self._cut[f"{name}.{cut}.{lora.NAME}.weight"][1]
                module.lora_dropout[lora.NAME].first = sum(sizes[: self.mesh.coordinate("tensor")])

    def _divide_vocabulary(self) -> None:
        model, mesh = self.model, self.mesh
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head is not None and head.weight is embedding.weight
        names = {id(module): name for name, module in model.named_modules()}
        self._cut_in(names[id(embedding)], embedding, 0)
        self.vocabulary = Vocabulary(mesh.group("tensor"), self._cut[f"{names[id(embedding)]}.weight"][1])
        embedding.forward = vocabulary_embedding(embedding, self.vocabulary)
        if tied:
            head.weight = embedding.weight
        elif head is not None:
            self._cut_in(names[id(head)], head, 0)

    def _cut_in(self, name: str, module: nn.Module, dim: int) -> None:
        for own, parameter in list(module.named_parameters(recurse=False)):
            parts = parameter.tensor_split(self.mesh.config.tensor, dim)
            self._cut[f"{name}.{own}"] = dim, [part.shape[dim] for part in parts]
            piece = self._own(parameter.detach(), dim).clone()
            setattr(module, own, nn.Parameter(piece, requires_grad=parameter.requires_grad))

    def _own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.tensor_split(self.mesh.config.tensor, dim)[self.mesh.coordinate("tensor")]

    def _divide_experts(self) -> None:
        """Expert parallelism: each rank has some experts of a layer, and is sent all tokens that go there."""
        ranks, place = self.mesh.config.expert, self.mesh.coordinate("expert")
        self._experts = find_expert_layers(self.model)
        for module in self._experts.values():
            for own, parameter in list(module.named_parameters(recurse=False)):
                piece = parameter.detach().chunk(ranks)[place].clone()
                setattr(module, own, nn.Parameter(piece, requires_grad=parameter.requires_grad))
            module.num_experts //= ranks
            module.forward = dispatch_to_experts(module, self.mesh.group("expert"))

    def _shard(self, config: LearnerConfig) -> None:
        """Apply fully sharded data parallelism layer by layer; gradients are summed.

        A token's coefficient counts the tokens of all ranks already.
        """
        low = config.dtype == "bfloat16"
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
        on_gpu = torch.cuda.is_available()
        options: dict[str, Any] = {
            "mp_policy": precision,
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if config.cpu_offload else OffloadPolicy(),
        }
        model: Any = self.model
        model.within = MethodType(lambda _, function: function(), model)
        mesh, own = self._copies("sharded"), set[nn.Parameter]()
        for experts in self._experts.values():
            if self._copies("around").size() > 1:
                fully_shard(experts, mesh=self._copies("around"), **options)
            else:  # nobody else has them
                own |= set(experts.parameters())
        for layer in decoder_layers(model):
            if isinstance(layer, nn.Identity):  # another rank has it
                continue
            fully_shard(layer, mesh=mesh, ignored_params=own, **options)
        fully_shard(model, mesh=mesh, ignored_params=own, **options)
        register_fsdp_forward_method(model, "within")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _copies(self, axis: str) -> DeviceMesh:
        """The ranks of an axis, and their counterparts in all copies if there are several."""
        return self.mesh.axes["replicate", axis] if self.mesh.config.replicate > 1 else self.mesh.axes[axis]

    # --- computing -----------------------------------------------------------------------------------------------------

    def has_layer(self, number: int) -> bool:
        """Return True if a layer is on this rank."""
        return self.mesh.config.pipeline == 1 or not isinstance(decoder_layers(self.model)[number], nn.Identity)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that uses the parameters, which are gathered meanwhile."""
        if not self._sharded:
            return function(*args)
        found: T = self.model.within(partial(function, *args))  # of arguments in sight FSDP would make copies
        return found

    @property
    def incoming(self) -> torch.Tensor | None:  # type: ignore[override]
        """The hidden states that the layers begin with, if these are not the first."""
        return self._pipeline.incoming if self._pipeline else None

    def train_packs(self, packs: Sequence[Pack], pass_on: PipelineForward, backward: Callable[[Pack], T]) -> list[T]:
        """Add the gradients of packs."""
        if self._pipeline is None:
            return super().train_packs(packs, pass_on, backward)
        return self._pipeline.train_packs(packs, partial(self.run, pass_on), backward)

    def run_packs(self, packs: Sequence[Pack], pass_on: PipelineForward, ask: Callable[[Pack], T]) -> list[T]:
        """Run this rank's packs without gradients; return the results where the last layers are."""
        if self._pipeline is None:
            said = super().run_packs(packs, pass_on, ask)
        else:
            said = self._pipeline.run_packs(packs, partial(self.run, pass_on), ask)
        self._reshard()
        return said

    def _reshard(self) -> None:
        """Free all but this rank's pieces of the weights.

        Without a backward FSDP keeps the outermost module whole, and the modules at which a forward was ended early. Both would
        be published as if they were pieces.
        """
        model: Any = self.model
        if isinstance(model, FSDPModule):
            model.set_reshard_after_forward(True, recurse=False)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            model.set_reshard_after_forward(False, recurse=False)

    def reduce_sums(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Sum measures over the data-parallel ranks.

        Ranks that compute the same packs report the same sums, or none. Packs of other ranks may have streams that these lack,
        and so more measures.
        """
        of_data = {data: known for data, known in self.mesh.all_gather((self.data, dict(totals))) if known}
        names = dict.fromkeys(name for own in of_data.values() for name in own)
        return {name: sum(own.get(name, 0.0) for own in of_data.values()) for name in names}

    def clip_gradient(self, most: float) -> float:
        """Scale the gradient down to the norm `most` if it is larger; return its norm."""
        gradients = {name: _local(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        for name in self._partial:
            if name in gradients:
                distributed.all_reduce(gradients[name], group=self.mesh.group("tensor"))
        tied = self._tied
        if tied in gradients:
            assert self._pipeline is not None
            distributed.all_reduce(gradients[tied], group=self._pipeline.ends)
        device = self.mesh.device  # with `cpu_offload` experts of this rank alone are not where the others are
        squares = to_floats({name: gradient.double().square().sum().to(device) for name, gradient in gradients.items()})
        total = sum(square / self._holders(name) for name, square in squares.items())
        norm = math.sqrt(self.mesh.all_reduce([total])[0])
        if norm > most:
            for gradient in gradients.values():
                gradient.mul_(most / (norm + 1e-6))
        return norm

    def _holders(self, name: str) -> int:
        """Ranks that have the same piece of a parameter."""
        config = self.mesh.config
        return config.replicate * (1 if name in self._cut else config.tensor) * (2 if name == self._tied else 1)

    @property
    def _tied(self) -> str:
        """The embedding that is the head of the last stage, too; none if all is on one rank."""
        if self._pipeline is None or not self._pipeline.tied:
            return ""
        weights = self.model.get_input_embeddings()
        return next((name for name, p in self.model.named_parameters() if p is getattr(weights, "weight", None)), "")

    def _is_expert(self, name: str) -> bool:
        return name.rpartition(".")[0] in self._experts

    # --- reading and writing -------------------------------------------------------------------------------------------

    def gather_tensor(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Return the whole of a tensor of which this rank has a piece. All ranks must call this."""
        tensor = piece.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if self._is_expert(name):
            return _gather(tensor, self.mesh.group("expert"))
        if name not in self._cut:
            return tensor
        dim, sizes = self._cut[name]
        width = max(sizes)
        mine = F.pad(tensor.movedim(dim, 0), (0, 0) * (tensor.dim() - 1) + (0, width - tensor.shape[dim]))
        rows = _gather(mine, self.mesh.group("tensor"))
        if len(rows) > sum(sizes):  # some of which only fill up
            rows = torch.cat([part[:size] for part, size in zip(rows.split(width), sizes, strict=True)])
        return rows.movedim(0, dim)

    def gather_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, TensorSpec]]:
        """Yield all parameters on the first rank; the first rank of each pipeline stage sends what it has."""
        leads = self.mesh.rank and self.mesh.rank == self._leader(self.mesh.coordinate("pipeline"))
        for name, own in self.gather_own_layers(trained=trained):
            yield name, own._replace(detach=partial(_handed_on, own)) if leads else own
        for stage in sorted(self._stages)[1:] if self.mesh.rank == 0 else ():
            yield from self._of_stage(stage, trained)

    def gather_own_layers(self, *, trained: bool = False) -> Iterator[tuple[str, GatheredTensor]]:
        """Yield the parameters of the layers of this rank, whole on all ranks with the same layers."""
        for name, own in self._of_stage(self.mesh.coordinate("pipeline"), trained):
            yield name, own._replace(detach=partial(self._whole, name))

    def _of_stage(self, stage: int, trained: bool) -> Iterator[tuple[str, GatheredTensor]]:
        """The parameters that a stage has and none before it, as the first rank is handed them."""
        device, tied = self.mesh.device, self._tied  # parameters may be elsewhere between their uses
        for name, shape, dtype, learns in self._stages[stage]:
            if (learns or not trained) and not (stage and name == tied):
                handed = partial(_handed_here, shape, dtype, device, self._leader(stage))
                yield name, GatheredTensor(shape, dtype, device, handed)

    def _leader(self, stage: int) -> int:
        """The first rank of a stage."""
        return stage * self.mesh.config.world // self.mesh.config.pipeline

    def named_pieces(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield this rank's piece of each parameter of its layers, also of those that other ranks have, too."""
        stage, tied = self.mesh.coordinate("pipeline"), self._tied
        for name, shape, *_ in self._stages[stage]:
            if not (stage and name == tied):
                tensor = self.local_parameter(name).detach()
                local = _local(tensor)
                if local.numel():  # more ranks than rows leave some without
                    yield Piece(name, self._start(name, shape, tensor), tuple(local.shape), tuple(shape)), local

    def _start(self, name: str, shape: torch.Size, piece: torch.Tensor) -> tuple[int, ...]:
        """Return the index in a parameter of the first element of this rank's piece; see `scatter_tensor`."""
        start = [0] * len(shape)
        if name in self._cut:
            dim, sizes = self._cut[name]
            start[dim] += sum(sizes[: self.mesh.coordinate("tensor")])
        if self._is_expert(name):
            start[0] += shape[0] // self.mesh.config.expert * self.mesh.coordinate("expert")
        if isinstance(piece, DTensor):
            ranks = self.mesh.axes["around" if self._is_expert(name) else "sharded"]
            rows = -(-piece.shape[0] // ranks.size())
            start[0] += min(piece.shape[0], rows * ranks.get_local_rank())
        return tuple(start)

    def _whole(self, name: str) -> torch.Tensor:
        return self.gather_tensor(name, self.local_parameter(name))

    def scatter_tensor(self, name: str, piece: torch.Tensor, whole: torch.Tensor) -> None:
        """Set this rank's piece of a tensor from the whole of it."""
        whole = self._share(name, whole)
        if isinstance(piece, DTensor):
            ranks = self.mesh.axes["around" if self._is_expert(name) else "sharded"]
            parts = whole.chunk(ranks.size())
            whole = parts[ranks.get_local_rank()] if ranks.get_local_rank() < len(parts) else whole[:0]
        _local(piece.detach()).copy_(whole)

    def fill(self, whole: Mapping[str, torch.Tensor], device: torch.device, *, offload: bool) -> None:
        """Allocate pieces that have no memory yet and set them from whole tensors, one after another.

        Args:
            whole: Whole tensors, under the names of a model without adapters.
            device: Device of the pieces.
            offload: Keep pieces that FSDP shards in host memory.
        """
        empty = {name: piece for name, piece in self.local_parameters() if piece.is_meta}
        for piece in empty.values():
            allocate(piece, torch.device("cpu") if offload and isinstance(piece, DTensor) else device)
        # Where FSDP sees that its pieces are others, too.
        self.model._apply(lambda tensor: tensor if isinstance(tensor, DTensor) else tensor.to(device))
        for name, piece in empty.items():
            self.scatter_tensor(name, piece, whole[lora.base_name(name)])

    def _share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that the ranks which this one shards with have together."""
        if name in self._cut:
            dim, sizes = self._cut[name]
            whole = whole.split(sizes, dim)[self.mesh.coordinate("tensor")]
        if self._is_expert(name):
            whole = whole.chunk(self.mesh.config.expert)[self.mesh.coordinate("expert")]
        return whole


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gather(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The rows that the ranks of a group have, as many each, one after another."""
    found = tensor.new_empty(group.size() * len(tensor), *tensor.shape[1:])
    distributed.all_gather(list(found.chunk(group.size())), tensor.contiguous(), group=group)
    return found


def _handed_on(tensor: GatheredTensor) -> torch.Tensor:
    """Send a gathered tensor to the first rank."""
    whole = tensor.detach().to(tensor.device).contiguous()
    distributed.send(whole, 0)
    return whole


def _handed_here(shape: torch.Size, dtype: torch.dtype, device: torch.device, rank: int) -> torch.Tensor:
    """Receive a tensor that another rank sends."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    distributed.recv(whole, rank)
    return whole

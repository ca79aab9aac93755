"""The learner on Megatron-Core: its layers, its parallelism, its optimiser; our packs, our loss, our checkpoints.

The model is Megatron's on its local specification, but for attention, which is ours over packs. It computes hidden states
alone: log-probs and entropies come from them and the rows of the head that a rank has, as everywhere here. A coefficient counts
the tokens of all ranks already, so gradients are summed and never averaged.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from transformers import PreTrainedModel

from antiphon.algorithms.routing import find_routers
from antiphon.core.config import parse
from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.core.optional_packages import how_to_install
from antiphon.core.types import Pack
from antiphon.learning.backend_options import MEGATRON_VERSION, MegatronOptions, megatron_incompatibilities
from antiphon.learning.backends.megatron_attention import (
    AttentionInputs,
    PackedAttention,
    ZeroCenteredNorm,
    feed_latent_attention,
)
from antiphon.learning.backends.megatron_lora import adapter_parts, add_adapters
from antiphon.learning.backends.megatron_model import (
    attention_windows,
    has_interleaved_positions,
    sparse_layers,
    transformer_settings,
)
from antiphon.learning.backends.megatron_names import SCORE, Part, is_latent, parts
from antiphon.learning.backends.megatron_optimizer import ChainedOptimizer, KeptState, kept_states
from antiphon.learning.backends.megatron_schedule import Schedule
from antiphon.learning.backends.offloaded_storages import OffloadableModel, OffloadingLearner, find_tensors
from antiphon.learning.checkpointed_learner import GatherTensor
from antiphon.learning.config import LearnerConfig, LoraConfig, OptimizerConfig, megatron_problems
from antiphon.learning.mesh import LOOPBACK, Mesh, connect_store
from antiphon.learning.model import lora
from antiphon.learning.model.attention import AttentionReader
from antiphon.learning.model.loading import decoder_layers, resolve_device
from antiphon.learning.model.logprobs import Vocabulary
from antiphon.learning.model.pack_layout import PackLayout
from antiphon.learning.parallel.whole_model import PipelineForward, WholeModel
from antiphon.learning.torch_learner import TorchLearner

try:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
except ModuleNotFoundError as missing:
    raise UnsupportedError(
        f"the megatron learner cannot be imported here: there is no module {missing.name!r}: "
        f"{how_to_install('megatron-core')}"
    ) from missing

if not hasattr(moe_utils, "te_general_gemm"):  # forgotten by 0.16.1 where there is no Transformer Engine
    moe_utils.te_general_gemm = None
if not isinstance(multi_latent_attention.TELinear, type):  # as it takes it to be, there too
    multi_latent_attention.HAVE_TE = False

T = TypeVar("T")
MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronBackend(OffloadingLearner):
    """A learner of any objective, whose model Megatron-Core computes."""

    optimizer: ChainedOptimizer
    runs_on = "cuda"  # of Megatron-Core, much is written for nothing else
    loads_whole = True

    def __init__(self, model_path: str, config: LearnerConfig, seed: int, *objective: Any) -> None:
        for key, message in megatron_problems(config):
            raise ConfigError(message, key=f"learner.{key}")
        if resolve_device(config.device).type != self.runs_on:
            raise UnsupportedError(
                f"learner.kind: megatron needs a CUDA device, and the learner's is {resolve_device(config.device).type} "
                "(learner.device); kind torch runs anywhere, on the same meshes",
                key="learner.kind",
                value="megatron",
            )
        self.options = parse(MegatronOptions, config.options, "learner.options")
        super().__init__(model_path, config, seed, *objective)

    def _load_model(self) -> None:
        if self.mesh is None:
            self.mesh = Mesh(self.config.mesh, 0, connect_store(self.host(LOOPBACK)), self.device)
        torch.manual_seed(self.seed)
        source = self._load()
        if self.config.lora is not None:
            lora.add_adapters(source, self.config.lora)
            self._names = lora.tied_names(source)
        for key, message in megatron_incompatibilities(source.config.to_dict(), self.config.mesh):
            raise UnsupportedError(f"learner.{key}: {message}", key=f"learner.{key}")
        self._kind = type(source)
        self._frequencies = source.base_model.rotary_emb.inv_freq  # of rotary positions
        self._interleaved = has_interleaved_positions(source.config)
        self._embedding_scale = getattr(source.get_input_embeddings(), "scalar_embed_scale", 1.0)
        self._scaling = decoder_layers(source)[0].self_attn.scaling  # of attention
        self._windows = attention_windows(source.config)
        self.shards: MegatronModel = MegatronModel(source, self.mesh, self.config, self.options)
        self._layers_with_experts = self.shards.find_routers({*map(lora.base_name, dict(source.named_parameters()))})
        buffers = dict(source.named_buffers())
        self.model = source.to("meta")  # what it is called and how it is written
        self.model.tie_weights()
        for name, buffer in buffers.items():  # which checkpoints have, too
            owner, _, own = name.rpartition(".")
            setattr(self.model.get_submodule(owner), own, buffer)

    @property
    def head(self) -> torch.Tensor:
        """The language model head, this rank's rows of it."""
        return self.shards.head

    @property
    def score(self) -> torch.Tensor:
        """The head [1, H] of a critic or a reward model."""
        weight: torch.Tensor = self.shards.chunks[-1].score.weight
        return weight

    def _optimizer(self, config: OptimizerConfig) -> ChainedOptimizer:
        return self.shards.optimize(config)

    def _optimizer_moments(self) -> Iterator[tuple[str, dict[str, GatherTensor]]]:
        step = torch.tensor(float(self.optimizer.steps))
        for name in filter(self.shards.is_trained, self.shards.parts):
            found = {key: partial(self.shards.moment, name, key) for key in MOMENTS}
            yield name, found | {"step": lambda: step} if step else {}

    def _restore_moments(self, name: str, parameter: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
        self.optimizer.steps = int(kept.get("step", 0))
        for key, whole in kept.items():
            self.shards.take_moment(name, key, whole)

    def _pipeline_forward(self, pack: Pack, reader: AttentionReader | None = None) -> torch.Tensor:
        """As Megatron's stages send it, [n, 1, H]."""
        with self._autocast():
            return self._run_layers(pack, self._layout(pack), reader)[:, None]

    def _run_layers(self, pack: Pack, layout: PackLayout, reader: AttentionReader | None = None) -> torch.Tensor:
        model, (here, context) = self.shards.chunk, self._context(len(layout.positions))
        tokens, positions = self._tokens(pack, layout)[here], layout.positions[here]
        begun = self._embed(tokens, positions) if model.pre_process else None
        angles = positions[:, None] * self._frequencies
        both = angles.repeat_interleave(2, dim=-1) if self._interleaved else torch.cat([angles, angles], dim=-1)
        hidden: torch.Tensor = model.decoder(
            begun,
            None,
            rotary_pos_emb=both[:, None, None],
            # Which goes to attention as it is.
            attention_bias=AttentionInputs(self.attention, self._scaling, layout, reader, context, self._windows),
        )
        return self._repeat_dropout(hidden[:, 0].float())

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the token embeddings, [n, 1, H]. The row of the padding token gets no gradient, as in transformers."""
        begun: torch.Tensor = self.shards.chunk.embedding(tokens[None], positions[None]) * self._embedding_scale
        if self.config.lora is not None and torch.is_grad_enabled():
            begun.requires_grad_()  # or layers that are computed again for it would have no gradient
        pad = self.model.get_input_embeddings().padding_idx
        return begun if pad is None else torch.where((tokens == pad)[:, None, None], begun.detach(), begun)


class MegatronLearner(MegatronBackend, TorchLearner):
    """Trains a policy."""


class MegatronModel(OffloadableModel):
    """This rank's share of a model that is Megatron's. Tensors have the names and shapes of Hugging Face."""

    def __init__(self, source: PreTrainedModel, mesh: Mesh, config: LearnerConfig, options: MegatronOptions) -> None:
        """Load what is this rank's of a model that every rank has loaded whole."""
        whole, sizes = dict(source.named_parameters()), mesh.config
        if parallel_state.model_parallel_is_initialized():  # by what this process was before
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.pipeline_chunks if sizes.pipeline_chunks > 1 else None,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            # As our mesh has them: the ranks of a context are closer to each other than others, but not than those of experts.
            order="tp-ep-dp-cp-pp" if sizes.expert > 1 else "tp-cp-ep-dp-pp",
        )
        self.mesh, self.data, self._sharded = mesh, mesh.data, False
        self.chunks = [
            _build(source.config, {*map(lora.base_name, whole)}, config, chunk)
            for chunk in range(sizes.pipeline_chunks)
        ]
        WholeModel.__init__(self, nn.ModuleList(self.chunks))
        self._distributed = options.distributed_optimizer
        self.parts = self._place(source, {name: tensor.shape for name, tensor in whole.items()}, config.lora)
        own = dict(self.model.named_parameters())
        # Megatron's parameters that each is part of.
        self.fused = {name: [own[theirs] for theirs in part.names] for name, part in self.parts.items()}
        for name in self._cut:
            for parameter in self.fused[name]:
                parameter.tensor_model_parallel = True  # else Megatron counts it once in the gradient's norm
        for name, piece in self.local_parameters():
            self.scatter_tensor(name, piece, whole[name])
        self._take_settings(source)
        ends_here = mesh.coordinate("pipeline") == sizes.pipeline - 1
        self._schedule = Schedule(self.chunks, get_forward_backward_func(), sizes, ends_here=ends_here)
        gathered = WholeModel.gather_parameters(self)
        known = [(name, tensor.shape, tensor.dtype, self.is_trained(name)) for name, tensor in gathered]
        self._stages = dict(mesh.all_gather((mesh.coordinate("pipeline"), known)))

    def _place(
        self, source: PreTrainedModel, whole: dict[str, torch.Size], added: LoraConfig | None
    ) -> dict[str, Part]:
        """Return this rank's parts by name; add adapters to Megatron's model if there are any.

        Raises:
            UnsupportedError: A parameter has no place in Megatron's model.
        """
        shape, plain = source.config, {lora.base_name(name): name for name in whole if f".{lora.NAME}." not in name}
        sizes, place = self.mesh.config, self.mesh.coordinate
        rows = _evenly(shape.vocab_size, sizes.tensor)
        experts = (self.chunks[0].config.num_moe_experts or 0) // sizes.expert

        def parts_of(stage: int, stages: int) -> dict[str, Part]:
            here, per = (rows[place("tensor")], SCORE in whole), shape.num_hidden_layers // stages
            layers = range(stage * per, (stage + 1) * per)
            found = parts(shape, layers, experts, *here, first=stage == 0, last=stage == stages - 1)
            return {name: part.within(stage // sizes.pipeline) for name, part in found.items() if name in plain}

        if strange := plain.keys() - parts_of(0, 1).keys():
            if ".base_layer." in (first := min(strange)):  # of experts that have adapters, and are no layers
                message = f"learner.lora.targets: {first} has an adapter, which Megatron-Core cannot add; name others"
                raise UnsupportedError(message, key="learner.lora.targets", value=first)
            message = f"learner.kind: {first} of the model has no place in one of Megatron-Core {MEGATRON_VERSION}"
            raise UnsupportedError(message, key="learner.kind", value="megatron")
        stages, own = sizes.pipeline * sizes.pipeline_chunks, dict[str, Part]()
        for stage in range(place("pipeline"), stages, sizes.pipeline):
            own |= parts_of(stage, stages)
        if added is not None:
            group, adapters = self.mesh.group("tensor") if sizes.tensor > 1 else None, dict(adapter_parts(own, whole))
            add_adapters(self.model, source, own, added.scale, group)
            own = {plain[name]: part for name, part in own.items()} | adapters
        self._rows, self._cut = rows[place("tensor")], {}
        self._experts = {name.rpartition(".")[0]: self.model for name, part in own.items() if part.stacked}
        if sizes.tensor > 1:
            self.vocabulary = Vocabulary(self.mesh.group("tensor"), rows)
            cut = {name: part.cut for name, part in own.items() if part.cut is not None}
            self._cut = {name: (dim, _evenly(whole[name][dim], sizes.tensor)) for name, dim in cut.items()}
        return own

    def _take_settings(self, source: PreTrainedModel) -> None:
        """Set what is no parameter and not the same for all layers."""
        for name, part in self.parts.items():
            eps = getattr(source.get_submodule(name.rpartition(".")[0]), "variance_epsilon", None)
            if eps is not None:
                self.model.get_submodule(part.names[0].rpartition(".")[0]).eps = eps
        biases = {name: bias for name, bias in source.named_buffers() if name.endswith("e_score_correction_bias")}
        gates = self.find_routers({name.replace("e_score_correction_bias", "weight") for name in biases})
        for bias, router in zip(biases.values(), gates, strict=True):
            if hasattr(router, "expert_bias"):
                router.expert_bias.copy_(bias)
        for module in self.model.modules():
            if isinstance(module, multi_latent_attention.MLASelfAttention):
                feed_latent_attention(module, source.base_model.rotary_emb.attention_scaling)

    def find_routers(self, names: set[str]) -> list[nn.Module]:
        """Return the routers of all layers with experts, and something else for those on other ranks.

        Args:
            names: Parameters of the Hugging Face model.
        """
        own = iter(find_routers(self.model))
        return [next(own) if self.has_layer(layer) else nn.Module() for layer in sparse_layers(names)]

    def has_layer(self, number: int) -> bool:
        """Return True if a layer is on this rank."""
        sizes = self.mesh.config
        stage = number * sizes.pipeline * sizes.pipeline_chunks // self.chunks[0].config.num_layers
        return stage % sizes.pipeline == self.mesh.coordinate("pipeline")

    @property
    def chunk(self) -> GPTModel:
        """The stage that computes now, of those that this rank has."""
        return self.chunks[self._schedule.chunk]

    @cached_property
    def parallel(self) -> list[DistributedDataParallel]:
        """The chunks with room for gradients, which are summed over data-parallel ranks: of a model that learns."""
        options = DistributedDataParallelConfig(use_distributed_optimizer=self._distributed)
        return [DistributedDataParallel(chunk.config, options, chunk) for chunk in self.chunks]

    def train_packs(self, packs: Sequence[Pack], pass_on: PipelineForward, backward: Callable[[Pack], T]) -> list[T]:
        """Add the gradients of packs."""
        return self._schedule.train_packs(self.parallel, packs, pass_on, backward)

    def run_packs(self, packs: Sequence[Pack], pass_on: PipelineForward, ask: Callable[[Pack], T]) -> list[T]:
        """Run this rank's packs without gradients; return the results where the last layers are."""
        return self._schedule.run_packs(packs, pass_on, ask)

    @property
    def head(self) -> torch.Tensor:
        """This rank's rows of the language model head, without those that only fill it up."""
        model = self.chunks[-1]
        tied = model.share_embeddings_and_output_weights
        weight: torch.Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        return weight[: self._rows]

    @property
    def _tied(self) -> str:
        several = self.mesh.config.pipeline > 1
        return "model.embed_tokens.weight" if several and self.chunks[0].share_embeddings_and_output_weights else ""

    def is_trained(self, name: str) -> bool:
        """Return True if a parameter is trained, as all are without adapters."""
        return self.fused[name][0].requires_grad

    def local_parameter(self, name: str) -> torch.Tensor:
        """Return this rank's piece of a parameter; of a fused one, a copy."""
        return self.parts[name].read(self.fused[name]).detach().requires_grad_(self.is_trained(name))

    def local_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's piece of each parameter."""
        for name in self.parts:
            yield name, self.local_parameter(name)

    def scatter_tensor(self, name: str, piece: torch.Tensor, whole: torch.Tensor) -> None:
        """Set a parameter from the whole of it; `piece` may be a copy."""
        with torch.no_grad():
            self.parts[name].write(self.fused[name], self._share(name, whole))

    # --- gradients and the optimiser -----------------------------------------------------------------------------------

    def optimize(self, config: OptimizerConfig) -> ChainedOptimizer:
        """A fresh optimiser."""
        self._kept: dict[nn.Parameter, KeptState] = {}
        self._optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                use_distributed_optimizer=self._distributed,
            ),
            self.parallel,
            config_overrides={},  # all parameters decay
        )
        for optimizer in self._optimizer.chained_optimizers:
            self._kept |= dict(kept_states(optimizer, distributed=self._distributed))
        return ChainedOptimizer(self._optimizer)

    def clip_gradient(self, most: float) -> float:
        """Scale the gradient down to the norm `most` if it is larger; return its norm."""
        finalize_model_grads(self.parallel)
        self._optimizer.prepare_grads()
        norm: float = self._optimizer.get_grad_norm()
        if norm > most:
            for optimizer in self._optimizer.chained_optimizers:
                for parameter in optimizer.get_parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(most / (norm + 1e-6))
        return norm

    def moment(self, name: str, key: str) -> torch.Tensor:
        """Return an optimiser state tensor of a parameter, whole. All ranks must call this."""
        found = []
        for parameter in self.fused[name]:
            found.append(spread := self._kept_here(parameter, key))
            if self._distributed:
                distributed.all_reduce(spread, group=_alike(parameter))
        return self.gather_tensor(name, self.parts[name].read(found))

    def take_moment(self, name: str, key: str, whole: torch.Tensor) -> None:
        """Set what this rank keeps of that; a count of steps is one for all."""
        spread = [self._kept_here(parameter, key) for parameter in self.fused[name]]
        if whole.dim():
            self.parts[name].write(spread, self._share(name, whole))
        for parameter, tensor in zip(self.fused[name], spread, strict=True):
            if parameter in self._kept:
                state, like, span = self._kept[parameter]
                state[key] = tensor.flatten()[span].view_as(like).clone() if whole.dim() else whole.clone()

    def _kept_here(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """As much of a moment as this rank keeps, 0 elsewhere, in the shape of the parameter."""
        spread = torch.zeros_like(parameter, requires_grad=False)
        if parameter in self._kept and key in (kept := self._kept[parameter]).state:
            spread.view(-1)[kept.span] = kept.state[key].flatten()
        return spread

    # --- a device that others use too ----------------------------------------------------------------------------------

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """Yield parameters, buffers, what the optimiser keeps, and the routes of the last tokens to experts."""
        yield from (*self.model.parameters(), *self.model.buffers())
        for module in self.model.modules():
            if hasattr(module, "token_dispatcher"):
                yield from find_tensors(vars(module.token_dispatcher))
        for optimizer in self._optimizer.chained_optimizers if hasattr(self, "_optimizer") else ():
            for group in optimizer.optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.optimizer.state.values():
                yield from find_tensors(state)

    def scratch_tensors(self) -> Iterator[torch.Tensor]:
        """Yield buffers of gradients, which are zeros before each update."""
        for chunk in self.parallel if hasattr(self, "_optimizer") else ():
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data


def _alike(parameter: nn.Parameter) -> Any:
    """The ranks that have the same parameter."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _build(shape: Any, names: set[str], config: LearnerConfig, chunk: int) -> GPTModel:
    """Build one of this rank's stages of Megatron's model, with whatever is in memory as its weights.

    Args:
        shape: Configuration of the model.
        names: Names of its parameters in Hugging Face's model.
        config: Mesh of the learner, and what saves memory.
        chunk: Index of the stage among those of the rank.
    """
    mesh = config.mesh
    kind = MLATransformerConfig if is_latent(shape) else TransformerConfig
    made, scores = kind(**transformer_settings(shape, names, config)), SCORE in names
    spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization="RMSNorm", vp_stage=chunk)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
        if shape.model_type == "gemma":
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = ZeroCenteredNorm
    spec.layer_norm = spec.layer_specs[0].submodules.input_layernorm
    model = GPTModel(
        made,
        spec,
        vocab_size=-(-shape.vocab_size // mesh.tensor) * mesh.tensor,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage() and chunk == 0,
        post_process=parallel_state.is_pipeline_last_stage() and chunk == mesh.pipeline_chunks - 1,
        share_embeddings_and_output_weights=shape.tie_word_embeddings and not scores,
        position_embedding_type="none",  # positions come with each pack
        vp_stage=chunk,
    )
    if scores and model.post_process:
        del model.output_layer
        model.score = nn.Linear(shape.hidden_size, 1, bias=False, device=model.decoder.final_layernorm.weight.device)
    return model


def _evenly(count: int, ranks: int) -> list[int]:
    """As Megatron divides: all have as many, but where the last ones have only what fills it up."""
    each = -(-count // ranks)
    return [min(max(count - rank * each, 0), each) for rank in range(ranks)]

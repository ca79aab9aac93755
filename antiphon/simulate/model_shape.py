"""The shape of a model, counted exactly from its config.json without weights, and its share on each rank of the learner.

The model is built without memory, on torch's meta device, and divided as the learner shards it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from antiphon.learning.config import LoraConfig
from antiphon.learning.mesh_config import MeshConfig
from antiphon.learning.model.loading import build_on_meta
from antiphon.learning.model.lora import tied_names
from antiphon.learning.parallel.tensor_parallel import COLUMNS, GATHERED, ROWS, SPLIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter of the model, and how the learner shards it."""

    shape: tuple[int, ...]
    names: tuple[str, ...] = ()  # several if it is tied
    layers: tuple[int, ...]  # layers whose rank holds it: its own, the first or the last
    in_layer: bool = True  # not an embedding, a head or a final norm
    tensor_dim: int | None = None  # dimension that `mesh.tensor` divides
    is_expert: bool = False  # of all experts of a layer, stacked in dimension 0
    is_linear: bool = False  # of a linear layer, and not tied to an embedding

    def count_on_rank(self, mesh: MeshConfig, *, gathered: bool = False) -> int:
        """Return how many of its numbers the fullest rank, the first, holds; `gathered`: while it computes."""
        sizes, ranks = list(self.shape), mesh.shard * mesh.context
        if self.tensor_dim is not None:
            sizes[self.tensor_dim] = -(-sizes[self.tensor_dim] // mesh.tensor)
        if self.is_expert:
            sizes[0] //= mesh.expert
            ranks //= mesh.expert
        if sizes and not gathered:
            sizes[0] = -(-sizes[0] // ranks)
        return math.prod(sizes)


class RankShare(NamedTuple):
    """The parameters of one rank of the learner, in numbers."""

    held: int  # at all times
    trained: int  # of those held
    computed: int  # gathered: of its layers and outside of layers
    around: int  # of these, outside of layers
    layer: int  # of these, in the largest layer
    experts: int  # of these, in experts
    linear: int  # of those not trained, in linear layers of decoder layers
    head: int  # of those not trained, in a head that is not tied to the embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The shape of a decoder."""

    weights: tuple[Weight, ...]
    layers: int
    hidden: int
    queries: int = 0  # query size of all heads
    key_heads: int = 0
    head: int = 0  # size of a head
    feed_forward: int = 0  # intermediate size that a token passes
    vocabulary: int = 0
    experts: int = 1
    active_experts: int = 1  # of a layer, for one token
    normed_heads: bool = False  # queries and keys have norms of their own

    @staticmethod
    def read(model: Path) -> "Architecture":
        """Read the shape from the config.json of a model directory; raise `UnsupportedError` if it is no decoder."""
        whole = build_on_meta(model)
        shape = whole.config.get_text_config()
        experts = getattr(shape, "num_experts", None) or getattr(shape, "num_local_experts", None) or 1
        active_experts = shape.num_experts_per_tok if experts > 1 else 1
        inner = getattr(shape, "moe_intermediate_size", None) if experts > 1 else None
        return Architecture(
            weights=tuple(_read_weights(whole)),
            layers=shape.num_hidden_layers,
            hidden=shape.hidden_size,
            queries=shape.num_attention_heads * (head := _head_size(shape)),
            key_heads=getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads,
            head=head,
            feed_forward=active_experts * (inner or getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size),
            vocabulary=shape.vocab_size,
            experts=experts,
            active_experts=active_experts,
            normed_heads=any(name.endswith("q_norm") for name, _ in whole.named_modules()),
        )

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def active(self) -> int:
        """Number of parameters that one token uses."""
        idle = sum(math.prod(weight.shape) for weight in self.weights if weight.is_expert)
        return self.parameters - idle * (self.experts - self.active_experts) // self.experts

    @property
    def cached_per_token(self) -> int:
        """Numbers in the KV cache per token."""
        return 2 * self.layers * self.key_heads * self.head

    def shares(self, mesh: MeshConfig, lora: LoraConfig | None = None) -> list[RankShare]:
        """Return the share of the first rank of each pipeline stage, as `ShardedModel` shards the model, without adapters."""

        def is_trained(weight: Weight) -> bool:
            return lora is None or any(map(lora.saves, weight.names))

        found = []
        per = self.layers // (mesh.pipeline * mesh.pipeline_chunks) or 1
        for place in range(mesh.pipeline):
            own = [
                weight
                for weight in self.weights
                if any(layer // per % mesh.pipeline == place for layer in weight.layers)
            ]
            sizes = Counter[int]()
            for weight in own:
                sizes[weight.layers[0] if weight.in_layer else -1] += weight.count_on_rank(mesh, gathered=True)
            around = sizes.pop(-1, 0)
            linear = [weight for weight in own if weight.is_linear and not is_trained(weight)]
            found.append(
                RankShare(
                    held=sum(weight.count_on_rank(mesh) for weight in own),
                    trained=sum(weight.count_on_rank(mesh) for weight in own if is_trained(weight)),
                    computed=around + sizes.total(),
                    around=around,
                    layer=max(sizes.values(), default=0),
                    experts=sum(weight.count_on_rank(mesh, gathered=True) for weight in own if weight.is_expert),
                    linear=sum(weight.count_on_rank(mesh) for weight in linear if weight.in_layer),
                    head=sum(weight.count_on_rank(mesh) for weight in linear if not weight.in_layer),
                )
            )
        return found


def _head_size(shape: Any) -> int:
    size: int = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return size


def _read_weights(model: Any) -> Iterator[Weight]:
    """Yield the parameters of a model on the meta device."""
    layers = getattr(model.base_model, "layers", ())  # a model without layers of that name is not divided
    layer_of = {id(p): (number,) for number, layer in enumerate(layers) for p in layer.parameters()}
    first: tuple[int, ...] = (0,)
    last = (len(layers) - 1,)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends: dict[int, tuple[int, ...]] = {id(head.weight): last} if head is not None else {}
    ends[id(embedding.weight)] = first + last if id(embedding.weight) in ends else first
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    tensor_dims = dict.fromkeys(ends, 0)
    for name, module in model.base_model.named_modules():
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style in (COLUMNS, GATHERED, ROWS, SPLIT):
            tensor_dims |= {id(p): int(style in (ROWS, SPLIT)) for p in module.parameters(recurse=False)}
    experts = {
        id(parameter)
        for module in model.modules()
        if isinstance(getattr(module, "num_experts", None), int)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3
    }
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)} - {id(embedding.weight)}
    for names in tied_names(model).values():
        parameter = model.get_parameter(names[0])
        key = id(parameter)
        yield Weight(
            names=tuple(names),
            shape=tuple(parameter.shape),
            layers=layer_of.get(key) or ends.get(key) or last,
            in_layer=key in layer_of,
            tensor_dim=tensor_dims.get(key),
            is_expert=key in experts,
            is_linear=key in linear,
        )

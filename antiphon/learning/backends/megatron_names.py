"""Mapping between the parameters of a Hugging Face decoder and those of Megatron-Core, which fuses some. Imports no megatron.

Queries, keys and values are rows of one matrix, group after group: the queries of a group, its key, its value. Gate and up are
rows of one, the gate first. Each expert has matrices of its own, which Hugging Face stacks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

SCORE = "score.weight"  # the head of a critic or a reward model, which has one name in both


@dataclass(frozen=True, slots=True)
class Part:
    """One Hugging Face parameter, as rows of Megatron's."""

    names: tuple[str, ...]  # of Megatron's parameters; with `stacked`, one for each expert of this rank
    cut: int | None = None  # dimension of which ranks of `tensor` have some each
    rows: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole  # a view of one of them
    stacked: bool = False

    def within(self, chunk: int) -> "Part":
        """Return the part in a list of chunks of Megatron's model, of which one has its parameters."""
        return replace(self, names=tuple(f"{chunk}.{name}" for name in self.names))

    def read(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's piece, from tensors of the shapes of Megatron's parameters."""
        found = [rows.flatten(0, rows.dim() - whole.dim()) for whole, rows in self._pairs(tensors)]
        return torch.stack(found) if self.stacked else found[0]

    def write(self, tensors: Sequence[torch.Tensor], piece: torch.Tensor) -> None:
        """Set what `read` would return."""
        for (_, rows), own in zip(self._pairs(tensors), piece if self.stacked else [piece], strict=True):
            rows.copy_(own.reshape(rows.shape))

    def _pairs(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((tensor, self.rows(tensor)) for tensor in tensors)


def parts(
    shape: Any, layers: range, experts: int, vocabulary: int, scores: bool, *, first: bool, last: bool
) -> dict[str, Part]:
    """Return the parts of a pipeline stage by Hugging Face name.

    Args:
        shape: Configuration of the model.
        layers: Layers of the stage.
        experts: Experts of a layer on this rank.
        vocabulary: This rank's rows of embedding and head, without padding rows.
        scores: The head is that of a critic or a reward model.
        first: The stage has the embedding.
        last: The stage has the head.
    """
    rows: Any = {"cut": 0, "rows": lambda whole: whole[:vocabulary]}
    tied = last and not first and shape.tie_word_embeddings
    found = {"model.embed_tokens.weight": Part(("embedding.word_embeddings.weight",), **rows)} if first else {}
    if last:
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        if scores:
            found[SCORE] = Part((SCORE,))
        else:
            found[head] = found.get(head) or Part(("output_layer.weight",), **rows)
        found["model.norm.weight"] = Part(("decoder.final_layernorm.weight",))
    for here, layer in enumerate(layers):
        found |= {
            f"model.layers.{layer}.{name}": part for name, part in _layer(shape, f"decoder.layers.{here}", experts)
        }
    return found


def head_size(shape: Any) -> int:
    """Return the size of an attention head."""
    return getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads


def is_latent(shape: Any) -> bool:
    """Return True if a model has multi-latent attention."""
    return getattr(shape, "kv_lora_rank", None) is not None


def _layer(shape: Any, at: str, experts: int) -> Iterable[tuple[str, Part]]:
    mlp = f"{at}.mlp"
    yield from (_latent if is_latent(shape) else _grouped)(shape, f"{at}.self_attention")
    yield "self_attn.o_proj.weight", Part((f"{at}.self_attention.linear_proj.weight",), 1)
    yield "input_layernorm.weight", Part((f"{at}.input_layernorm.weight",))
    yield "post_attention_layernorm.weight", Part((f"{at}.pre_mlp_layernorm.weight",))
    yield from _dense("mlp", mlp)
    for shared in ("shared_expert", "shared_experts"):
        yield from _dense(f"mlp.{shared}", f"{mlp}.shared_experts")
    yield "mlp.shared_expert_gate.weight", Part((f"{mlp}.shared_experts.gate_weight",))
    yield "mlp.gate.weight", Part((f"{mlp}.router.weight",))
    for own, theirs in {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}.items():
        names = tuple(f"{mlp}.experts.local_experts.{expert}.{theirs}.weight" for expert in range(experts))
        yield f"mlp.experts.{own}", Part(names, stacked=True)


def _dense(own: str, theirs: str) -> Iterable[tuple[str, Part]]:
    """A gated block, under both names."""
    for number, name in enumerate(("gate", "up")):
        yield f"{own}.{name}_proj.weight", Part((f"{theirs}.linear_fc1.weight",), 0, _half(number))
    yield f"{own}.down_proj.weight", Part((f"{theirs}.linear_fc2.weight",), 1)


def _latent(shape: Any, attention: str) -> Iterable[tuple[str, Part]]:
    """Multi-latent attention, whose rows are alike in both."""
    linear = {
        "q_proj": "linear_q_proj",
        "q_a_proj": "linear_q_down_proj",
        "q_b_proj": "linear_q_up_proj",
        "kv_a_proj_with_mqa": "linear_kv_down_proj",
        "kv_b_proj": "linear_kv_up_proj",
    }
    for own, theirs in linear.items():
        yield f"self_attn.{own}.weight", Part((f"{attention}.{theirs}.weight",), 0)
    for own in ("q", "kv"):
        yield f"self_attn.{own}_a_layernorm.weight", Part((f"{attention}.{own}_layernorm.weight",))


def _grouped(shape: Any, attention: str) -> Iterable[tuple[str, Part]]:
    """Attention of which some queries share a key and a value."""
    per = shape.num_attention_heads // shape.num_key_value_heads
    for own, heads in {"q": slice(0, per), "k": slice(per, per + 1), "v": slice(per + 1, per + 2)}.items():
        rows = _heads(per + 2, head_size(shape), heads)
        for kind in ("weight", "bias"):
            yield f"self_attn.{own}_proj.{kind}", Part((f"{attention}.linear_qkv.{kind}",), 0, rows)
    for own in ("q", "k"):
        yield f"self_attn.{own}_norm.weight", Part((f"{attention}.{own}_layernorm.weight",))


def _heads(per: int, size: int, own: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """Some heads of every group, each of which has `per` in all."""
    return lambda whole: whole.unflatten(0, (-1, per, size))[:, own]


def _half(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda whole: whole.unflatten(0, (2, -1))[number]

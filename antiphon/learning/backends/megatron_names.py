"""Mapping between the parameters of a Hugging Face decoder and those of Megatron-Core, which fuses some. Imports no megatron.

Queries, keys and values are rows of one matrix, group after group: the queries of a group, its key, its value. Gate and up are
rows of one, the gate first. Each expert has matrices of its own, which Hugging Face stacks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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


def _layer(shape: Any, at: str, experts: int) -> Iterable[tuple[str, Part]]:
    attention, mlp = f"{at}.self_attention", f"{at}.mlp"
    per = shape.num_attention_heads // shape.num_key_value_heads
    for own, heads in {"q": slice(0, per), "k": slice(per, per + 1), "v": slice(per + 1, per + 2)}.items():
        rows = _heads(per + 2, head_size(shape), heads)
        for kind in ("weight", "bias"):
            yield f"self_attn.{own}_proj.{kind}", Part((f"{attention}.linear_qkv.{kind}",), 0, rows)
    for own in ("q", "k"):
        yield f"self_attn.{own}_norm.weight", Part((f"{attention}.{own}_layernorm.weight",))
    yield "self_attn.o_proj.weight", Part((f"{attention}.linear_proj.weight",), 1)
    yield "input_layernorm.weight", Part((f"{at}.input_layernorm.weight",))
    yield "post_attention_layernorm.weight", Part((f"{at}.pre_mlp_layernorm.weight",))
    for number, own in enumerate(("gate", "up")):
        yield f"mlp.{own}_proj.weight", Part((f"{mlp}.linear_fc1.weight",), 0, _half(number))
    yield "mlp.down_proj.weight", Part((f"{mlp}.linear_fc2.weight",), 1)
    shared = f"{mlp}.shared_experts"
    for number, own in enumerate(("gate", "up")):
        yield f"mlp.shared_expert.{own}_proj.weight", Part((f"{shared}.linear_fc1.weight",), 0, _half(number))
    yield "mlp.shared_expert.down_proj.weight", Part((f"{shared}.linear_fc2.weight",), 1)
    yield "mlp.shared_expert_gate.weight", Part((f"{shared}.gate_weight",))
    yield "mlp.gate.weight", Part((f"{mlp}.router.weight",))
    for own, theirs in {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}.items():
        names = tuple(f"{mlp}.experts.local_experts.{expert}.{theirs}.weight" for expert in range(experts))
        yield f"mlp.experts.{own}", Part(names, stacked=True)


def _heads(per: int, size: int, own: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """Some heads of every group, each of which has `per` in all."""
    return lambda whole: whole.unflatten(0, (-1, per, size))[:, own]


def _half(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda whole: whole.unflatten(0, (2, -1))[number]

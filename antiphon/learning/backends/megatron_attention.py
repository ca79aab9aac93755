"""Attention over packs, and norms, in Megatron-Core's layers. Imports no megatron."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from antiphon.learning.model.attention import AttentionReader
from antiphon.learning.model.pack_layout import PackLayout


class AttentionInputs(NamedTuple):
    """The facts that attention needs to know of a pack."""

    kind: str  # of attention
    scaling: float
    layout: PackLayout
    reader: AttentionReader | None
    context: Any  # the ranks that have the other tokens, if not all are here
    windows: Sequence[int | None]  # tokens that each layer of the model looks back


class PackedAttention(nn.Module):
    """Megatron's core attention, over the sequences of a pack."""

    inputs: AttentionInputs | None = None  # where the layer does not hand them on

    def __init__(self, config: Any, layer_number: int, **others: Any) -> None:
        super().__init__()
        self.layer_idx = layer_number - 1

    def forward(
        self,
        query: torch.Tensor,  # [T, 1, heads, head size]
        key: torch.Tensor,  # [T, 1, key heads, head size]
        value: torch.Tensor,
        attention_mask: None,
        attention_bias: AttentionInputs | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """[T, 1, heads x head size]."""
        inputs = attention_bias or self.inputs
        assert inputs is not None
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        kind, scaling, layout, reader, context, windows = inputs
        options = {"layout": layout, "reader": reader, "context": context, "sliding_window": windows[self.layer_idx]}
        out, _ = ALL_ATTENTION_FUNCTIONS[kind](self, query, key, value, None, scaling=scaling, **options)
        return out[0].flatten(1)[:, None]


class LatentPositions(nn.Module):
    """The rotary positions of Megatron's multi-latent attention, which asks for those of one sequence and gets a pack's."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale  # of sine and cosine
        self.angles: torch.Tensor | None = None  # [T, 1, 1, size]

    def get_rotary_seq_len(self, *inputs: Any) -> int:
        """Return the length that `forward` is called with, which does not use it."""
        return 0

    def forward(self, length: int, packed_seq: bool) -> tuple[torch.Tensor | None, float]:
        """Return the angles of the pack, and the scale."""
        return self.angles, self._scale


def feed_latent_attention(attention: Any, scale: float) -> None:
    """Have one of Megatron's multi-latent attentions take what it refuses as arguments: angles, and facts of the pack."""
    attention.rotary_pos_emb = LatentPositions(scale)
    attention.config.rope_type = "yarn"  # the kind that asks positions for a scale, too

    def take(module: Any, args: Any, options: dict[str, Any]) -> Any:
        module.rotary_pos_emb.angles = options["rotary_pos_emb"]
        module.core_attention.inputs = options["attention_bias"]
        return args, options | {"rotary_pos_emb": None, "attention_bias": None}

    attention.register_forward_pre_hook(take, with_kwargs=True)


class ZeroCenteredNorm(nn.RMSNorm):
    """RMSNorm with the factor 1 + weight, as Gemma has it."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension, in float32."""
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)

"""Attention over a forest of pieces is that of its sequences, however it is gathered."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface

from antiphon.core.errors import UnsupportedError
from antiphon.learning.model.attention import CONTEXT_ATTENTION, PACKED_ATTENTION, packed_attention
from antiphon.learning.model.pack_layout import PackLayout


@st.composite
def forests(draw):
    """Lengths and parents of pieces; the first may be long, the others empty."""
    count = draw(st.integers(1, 9))
    lengths = [draw(st.integers(1, 60)), *(draw(st.integers(0, 20)) for _ in range(count - 1))]
    parents = [-1, *(draw(st.integers(-1, piece - 1)) for piece in range(1, count))]
    return np.array(lengths, np.int32), np.array(parents, np.int32)


def attended(layout, *states):
    out, _ = packed_attention(torch.nn.Identity(), *states, None, layout=layout)
    return out


@settings(max_examples=150, deadline=None)
@given(forest=forests(), seed=st.integers(0, 99))
@example(forest=(np.array([9, 1, 1, 1], np.int32), np.array([-1, 0, 0, 0], np.int32)), seed=0)
def test_every_token_sees_what_came_before_in_its_sequence(forest, seed):
    layout = PackLayout.of(*forest)
    tokens, generator = int(forest[0].sum()), torch.Generator().manual_seed(seed)
    states = [torch.randn(1, heads, tokens, 4, dtype=torch.double, generator=generator) for heads in (4, 2, 2)]
    wanted = F.scaled_dot_product_attention(*states, attn_mask=layout.visible(slice(0, tokens)), enable_gqa=True)
    assert torch.allclose(attended(layout, *states), wanted.transpose(1, 2), atol=1e-12)


def test_only_long_prompts_are_shared_between_responses():
    def entries(prompt: int, answer: int) -> int:
        lengths, parents = np.array([prompt, *[answer] * 8]), np.array([-1, *[0] * 8])
        return sum(
            block.rows.numel() * (block.rows if block.keys is None else block.keys).size(1)
            for block in PackLayout.of(lengths, parents).blocks
        )

    assert entries(1024, 64) == 1024 * 1024 + 8 * 64 * (1024 + 64)
    assert entries(64, 256) == 8 * (64 + 256) ** 2


@pytest.mark.parametrize("name", [PACKED_ATTENTION, CONTEXT_ATTENTION["keys"]])
@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"sliding_window": 3}])
def test_attention_that_is_no_plain_softmax_is_refused(name, option):
    layout = PackLayout.of(np.array([4], np.int32), np.array([-1], np.int32))
    states = torch.zeros(3, 1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match=" ".join(option).replace("sliding_", "sliding ")):
        AttentionInterface()[name](torch.nn.Identity(), *states, None, context=None, layout=layout, **option)

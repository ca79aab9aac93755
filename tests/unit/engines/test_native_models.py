"""Which models the native engine runs, and how far: what it would compute differently is refused before it is asked for."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from antiphon.core.errors import ConfigError, RequestError, UnsupportedError
from antiphon.core.types import FinishReason
from antiphon.engines.config import EngineConfig
from antiphon.engines.native.engine import NativeEngine
from antiphon.engines.native.models import longest_plain_sequence
from tests.unit.engines.native_support import SHAPE, Host, make_host, prompt


def host_of(model, **config) -> Host:
    return Host(model.eval(), EngineConfig(slots=2, device="cpu", **config))


def test_sequences_end_at_the_sliding_window():
    """The engine has no windows: a longer sequence would end the run in the middle of a step."""
    torch.manual_seed(0)
    host = host_of(
        MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=40, tie_word_embeddings=True)), max_length=90
    )
    assert host.engine.max_length == 40
    host.add("fits", prompt(0, 30), max_tokens=10)
    with pytest.raises(RequestError, match="41 in all"):
        host.add("does not", prompt(0, 31), max_tokens=10)
    host.run()
    assert len(host.tokens("fits")) == 10 and host.finish("fits") is FinishReason.LENGTH
    assert host.logprob_errors()[0].max() < 1e-4


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"sliding_window": 40, "layer_types": ["full_attention"]}, 64),
        ({"sliding_window": 40, "layer_types": ["full_attention", "sliding_attention"]}, 40),
        ({"sliding_window": 0}, 64),
        ({"sliding_window": 400}, 64),
        ({}, 64),
    ],
)
def test_window_of_no_layer_is_no_limit(config, longest):
    config = SimpleNamespace(max_position_embeddings=64, rope_parameters={"rope_theta": 1e4}, **config)
    config.get_text_config = lambda: config
    assert longest_plain_sequence(SimpleNamespace(config=config), 0) == longest
    assert longest_plain_sequence(SimpleNamespace(config=config), 30) == 30


def test_no_sequence_is_longer_than_learned_positions():
    def engine(max_length: int) -> NativeEngine:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=32, n_head=4, n_layer=2, n_positions=48))
        return host_of(model, max_length=max_length).engine

    assert (engine(0).max_length, engine(20).max_length) == (48, 20)
    with pytest.raises(ConfigError, match="48 positions") as refused:
        engine(49)
    assert refused.value.key == "engine.max_length"


def test_values_of_another_size_than_keys_are_refused():
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE, **ranks, first_k_dense_replace=2))
    with pytest.raises(UnsupportedError, match="keys of 16 and values of 8"):
        host_of(model)


def test_mask_that_a_layer_makes_is_refused():
    host = host_of(DogeForCausalLM(DogeConfig(**SHAPE, tie_word_embeddings=True, keep_window_size=8)))
    host.add("r", prompt(0, 30), max_tokens=3)
    with pytest.raises(UnsupportedError, match="mask that layer 0 makes"):
        host.run()


def test_what_overflowed_in_a_slot_does_no_harm_to_later_requests():
    """A mask hides no NaN: 0 times infinity is one."""
    host = make_host(slots=2, prefill_tokens=512)
    host.add("long", prompt(1, 40), max_tokens=100)
    host.add("broken", prompt(0, 30), max_tokens=6)
    host.step(2)
    (slot,) = (slot for slot, request in host.engine._table.requests.items() if request.id == "broken")
    with torch.inference_mode():
        host.engine._cache.layer(0, host.engine._like)[:, slot, :, 20:30] = torch.inf
    host.step(8)
    assert np.isnan(host._joined("broken", "logprobs")[2:]).all()
    del host.requests["broken"], host.deltas["broken"]
    host.add("short", prompt(2, 4), max_tokens=10)
    host.step(12)
    host.add("the same", prompt(0, 30), max_tokens=6)
    host.run()
    assert host.logprob_errors()[0].max() < 1e-4

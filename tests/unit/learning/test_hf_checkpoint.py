"""Files of a model that several ranks write: whatever is divided, all have together what one would write."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from antiphon.learning.config import LoraConfig
from antiphon.learning.model import lora
from antiphon.learning.model.hf_checkpoint import (
    assign_blocks,
    block_name,
    file_sizes,
    shard_file,
    to_file_format,
    write_config,
    write_index,
)
from antiphon.learning.model.loading import load_model

from .conftest import SHAPE

MODELS = {
    "qwen2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "hrm_text": {"head_dim": 8},  # whose queries, keys, values and gates are one tensor in files
}


def make(kind):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **MODELS[kind]))


def shares(named, ranks):
    keepers = assign_blocks(named.items(), ranks)
    return [
        {name: tensor for name, tensor in named.items() if keepers[block_name(name)] == rank} for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 99])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_one_tensor_in_files_is_not_assign_blocks(kind, ranks):
    model = make(kind)
    named = dict(model.named_parameters())
    one, several = to_file_format(model, named), {}
    for share in shares(named, ranks):
        own = to_file_format(model, share) if share else {}
        assert not own.keys() & several.keys()
        several |= own
    assert {name: tensor.shape for name, tensor in several.items()} == {
        name: tensor.shape for name, tensor in one.items()
    }
    assert kind == "qwen2" or one.keys() != named.keys()


def test_ranks_share_files_evenly_adapters_with_their_weights():
    named = {name: torch.zeros(p.shape) for name, p in make("qwen2").named_parameters()}
    sizes = [sum(tensor.nbytes for tensor in share.values()) for share in shares(named, 2)]
    assert max(sizes) < 1.3 * min(sizes)
    model = make("qwen2").to_empty(device="cpu")
    lora.add_adapters(model, LoraConfig(rank=2))
    for share in shares(dict(model.named_parameters()), 3):
        assert lora.merge_adapters(share, 1.0).keys() == {lora.base_name(name) for name in share}


def test_what_a_rank_will_write_is_known_from_outlines():
    model = make("qwen2").to_empty(device="cpu")
    lora.add_adapters(model, LoraConfig(rank=2))
    state = dict(model.named_parameters())
    outlines = lora.merge_adapters({name: tensor.to("meta") for name, tensor in state.items()}, 1.0)
    written = to_file_format(model, lora.merge_adapters(state, 1.0))
    assert file_sizes(model, outlines) == {name: tensor.nbytes for name, tensor in written.items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_files_keep_their_precision(model_directories, tmp_path, device):
    """Where layers are gathered for a forward they have another, and files are written in the middle of it."""
    model = load_model(str(model_directories["llama"]), attention="sdpa", device=torch.device(device))
    write_config(model.to(torch.bfloat16), type(model), tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.float32


def test_the_index_says_which_rank_has_which_weights(tmp_path):
    write_index([{"a": 4}], tmp_path)
    assert list(tmp_path.iterdir()) == [], "one file is found by its name"
    write_index([{"a": 4, "b": 2}, {}, {"c": 8}], tmp_path)
    (index,) = tmp_path.iterdir()
    found = json.loads(index.read_text())
    assert found["metadata"]["total_size"] == 14
    assert found["weight_map"] == {"a": shard_file(0, 3), "b": shard_file(0, 3), "c": shard_file(2, 3)}
    assert len({shard_file(rank, 3) for rank in range(3)}) == 3 and shard_file(0, 1) == "model.safetensors"

"""Ranks that each read their share of a model have together what one rank loads, and none of them ever has much more."""

import asyncio
import sys

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from antiphon.learning.config import LearnerConfig
from antiphon.learning.mesh_config import MeshConfig
from tests.parity.test_meshes import MODELS, bench  # noqa: F401 - a fixture
from tests.parity.workbench import Workbench

CASES = {
    "tied, pipeline 2, tensor 2": ("qwen3", {"pipeline": 2, "tensor": 2}, {}),
    "mixture, shard 4, expert 2": ("mixture", {"shard": 4, "expert": 2}, {}),
    "adapters, shard 2, tensor 2": ("llama", {"shard": 2, "tensor": 2}, {"lora": {"rank": 4}}),
    "critic, shard 3": ("qwen3", {"shard": 3}, {"kind": "antiphon.learning.objectives.critic:ScalarLearner"}),
}
# Tensors of 4 MB at most, 300 MB in all.
LARGE = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 18}
LARGE |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 256}


def saved(place, make):
    torch.manual_seed(3)
    model = make()
    model.to(torch.bfloat16).save_pretrained(place, max_shard_size="20MB")
    return str(place), 4 * sum(parameter.numel() for parameter in model.parameters())


async def on_ranks(members, model, settings, method):
    members = members[: settings.mesh.world]
    where = await members[0].call("host", "127.0.0.1")
    await asyncio.gather(*(member.call("prepare", settings) for member in members))
    await asyncio.gather(*(member.call("open", model, settings, rank, where) for rank, member in enumerate(members)))
    return await asyncio.gather(*(member.call(method) for member in members))


@pytest.mark.parametrize("case", CASES)
def test_ranks_have_together_what_one_loads(bench, tmp_path, case):  # noqa: F811
    kind, mesh, more = CASES[case]
    model, _ = saved(tmp_path, MODELS[kind])
    alone = Workbench()
    alone.open(model, LearnerConfig(**more), 0, "")
    runner, members = bench
    found, *_ = runner.run(on_ranks(members, model, LearnerConfig(mesh=MeshConfig(**mesh), **more), "weights"))
    expected = alone.weights()
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read where Linux keeps it")
@pytest.mark.parametrize("mesh", [{"shard": 4}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_no_rank_ever_has_much_more_than_its_share(bench, tmp_path, mesh):  # noqa: F811
    model, whole = saved(tmp_path, lambda: Qwen3ForCausalLM(Qwen3Config(**LARGE, tie_word_embeddings=True)))
    runner, members = bench
    rows = runner.run(on_ranks(members, model, LearnerConfig(mesh=MeshConfig(**mesh)), "grown"))
    for held, peak in rows:
        assert held < 0.3 * whole
        # What was mapped of the files counts here, too, half of the whole at most.
        assert held <= peak < 0.8 * whole, [size >> 20 for size in (held, peak, whole)]

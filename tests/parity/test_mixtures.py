"""What routers are told on a mesh: the experts that tokens were sampled by, and to spread sequences over all of them."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.core.types import ROUTED_EXPERTS
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.config import LearnerConfig
from antiphon.learning.mesh_config import MeshConfig
from tests.parity.test_meshes import ALGORITHM, apart, bench, models, samples  # noqa: F401 - fixtures

LAYERS, EXPERTS, CHOSEN = 4, 6, 2
SPEC = ROUTED_EXPERTS
MESHES = {
    "shard 2": {"shard": 2},
    "context 2": {"context": 2},
    "pipeline 2": {"pipeline": 2},
    "pipeline 2, interleaved": {"pipeline": 2, "pipeline_chunks": 2},
    "expert 2, context 2": {"shard": 2, "expert": 2, "context": 2},
    "tensor 2": {"tensor": 2},
    "expert 2, tensor 2": {"shard": 2, "expert": 2, "tensor": 2},
}
QUICK = {"context 2", "pipeline 2"}


def recorded(sample, rng):
    """The sample, with other experts than its router would take; not for the first, which is drawn from what a prompt's last
    token was computed by, and that is the same for all siblings."""
    mask = sample.segment.loss_mask
    chosen = np.argsort(rng.random((len(mask), LAYERS, EXPERTS)), axis=-1)[..., :CHOSEN] + 1
    chosen[~mask] = chosen[mask.argmax()] = 0
    return replace(sample, streams=sample.streams.with_stream(SPEC, chosen.astype(SPEC.dtype)))


def batch_for(ranks=1, tokens=90, replayed=False):
    rng, groups = np.random.default_rng(1), samples()
    if replayed:
        groups = [[recorded(sample, rng) for sample in group] for group in groups]
    how = {"aggregation": "sequence_mean_token_mean", "max_tokens": 1, "tokens_per_pack": tokens}
    return build_batch(groups, BatchOptions(ranks=ranks, **how))


async def trained(members, model, algorithm, tokens=90, replayed=False, config=None, **mesh):
    settings = LearnerConfig(mesh=MeshConfig(**mesh), **(config or {}))
    batch = batch_for(settings.mesh.data, tokens, replayed)
    members = members[: settings.mesh.world]
    where = await members[0].call("host", "127.0.0.1")
    await asyncio.gather(*(member.call("open", model, settings, rank, where) for rank, member in enumerate(members)))
    found = await asyncio.gather(*(member.call("train", algorithm, batch) for member in members))
    gradient = {name: array for rank in reversed(found) for name, array in rank["gradient"].items()}
    return gradient, found[0]["moved"], [update.get("expert_balance") for update in found[0]["plain"]]


@pytest.fixture(scope="module")
def alone(bench, models):  # noqa: F811
    """What one rank makes of it: plainly; with the balance; with experts replayed, too."""
    runner, members = bench
    balanced = ALGORITHM.model_copy(update={"expert_balance": 0.5})
    ways = {"plain": (ALGORITHM, False), "balanced": (balanced, False), "replayed": (balanced, True)}
    return {
        name: (algorithm, replayed, runner.run(trained(members, models["mixture"], algorithm, replayed=replayed)))
        for name, (algorithm, replayed) in ways.items()
    }


def test_each_of_them_changes_what_is_learned_and_packs_do_not(bench, models, alone):  # noqa: F811
    runner, members = bench
    gradients = [found[0] for _, _, found in alone.values()]
    assert apart(gradients[1], gradients[0]) > 1e-3
    assert apart(gradients[2], gradients[1]) > 1e-3
    algorithm, replayed, expected = alone["replayed"]
    in_other_packs = runner.run(trained(members, models["mixture"], algorithm, tokens=400, replayed=replayed))
    assert apart(in_other_packs[0], expected[0]) <= 1e-5
    assert in_other_packs[2] == pytest.approx(expected[2], rel=1e-5)


def test_the_balance_is_told(models, alone):  # noqa: F811
    """As DeepSeek-V3 has it, by what the routers of a model of transformers are given for one sequence after another."""
    model, seen, found = AutoModelForCausalLM.from_pretrained(models["mixture"]), [], []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, given, _: seen.append(given[0] @ gate.weight.T))
    for sample in (sample for group in samples() for sample in group):
        with torch.no_grad():
            model(torch.from_numpy(sample.segment.tokens).long()[None])
    for scores in (logits.reshape(-1, EXPERTS).softmax(-1).numpy() for logits in seen):
        counts = np.bincount(np.argsort(-scores)[:, :CHOSEN].ravel(), minlength=EXPERTS)
        found.append(float((EXPERTS / (CHOSEN * len(scores)) * counts * scores.mean(0)).sum()))
    assert len(found) == LAYERS * 15
    told = {name: balances for name, (_, _, (_, _, balances)) in alone.items()}
    assert told["balanced"][0] == pytest.approx(np.mean(found), rel=1e-5)
    assert told["balanced"][-1] < told["balanced"][0], "it is learned"
    assert told["plain"] == [None] * 3


@pytest.mark.parametrize("mesh", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in MESHES])
def test_ranks_learn_what_one_does(bench, models, alone, mesh):  # noqa: F811
    runner, members = bench
    algorithm, replayed, expected = alone["replayed"]
    ours = runner.run(trained(members, models["mixture"], algorithm, replayed=replayed, **MESHES[mesh]))
    assert apart(ours[0], expected[0]) <= 1e-5
    assert apart(ours[1], expected[1]) <= 1e-5
    assert ours[2] == pytest.approx(expected[2], rel=1e-5)

"""Several ranks learn what one does: the same loss, the same gradient, the same parameters after some steps."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.errors import ConfigError, WeightsError
from antiphon.core.types import (
    MIXED_CACHE,
    OLD_VALUE,
    REFERENCE_LOGPROBS,
    RETURNS,
    SAMPLING_SUPPORT,
    TEACHER_LOGPROBS,
    VALUES,
    FinishReason,
    GenerateRequest,
    Sampling,
    Streams,
)
from antiphon.engines.deltas import Delta
from antiphon.inspect.audit import audit
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.config import LearnerConfig
from antiphon.learning.mesh_config import MeshConfig
from antiphon.learning.parallel.rank_group import RankGroup
from antiphon.learning.stages import annotate
from antiphon.learning.step import Step
from antiphon.record.checkpoint import checkpoint_name, newest_checkpoint, publish_checkpoint, staging_dir
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.models import make_step_pipeline, start_models
from antiphon.weights.base import CHANNELS, TransferContext
from antiphon.weights.reshard import receive_weights
from antiphon.weights.shared_memory import SharedMemory
from tests.parity.samples_for_tests import sample_of
from tests.parity.workbench import Workbench
from tests.raising import raises_with
from tests.system.test_placement import BOTH

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 100}  # a pad has a row of the second half of ranks
SHAPE = {
    **SPECIAL,
    "vocab_size": 131,  # which no two ranks can divide evenly
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=8)),  # it scales its embedding
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SHAPE)),  # with fused projections
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SHAPE)),  # whose norms are over all heads
    "mixture": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
}
ALGORITHM = AlgorithmConfig(ratio_level="sequence", entropy_coefficient=0.01)
MESHES = {
    "shard 2": {"shard": 2},
    "shard 4": {"shard": 4},
    "replicate 2, shard 2": {"replicate": 2, "shard": 2},
    "tensor 2": {"tensor": 2},
    "context 2": {"context": 2},
    "context 4": {"context": 4},
    "context 3, by keys": {"context": 3, "context_attention": "keys"},
    "shard 2, tensor 2": {"shard": 2, "tensor": 2},
    "shard 2, context 2": {"shard": 2, "context": 2},
    "pipeline 2": {"pipeline": 2},
    "pipeline 4": {"pipeline": 4},
    "pipeline 2, interleaved": {"pipeline": 2, "pipeline_chunks": 2},
    "pipeline 2, tensor 2": {"pipeline": 2, "tensor": 2},
    "pipeline 2, shard 2": {"pipeline": 2, "shard": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return saved_models(tmp_path_factory)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """With matrices of which two ranks have pieces that are large enough to have their moments quantised."""
    shape = SHAPE | {"hidden_size": 128, "intermediate_size": 256}
    return saved_models(tmp_path_factory, {"wide": lambda: LlamaForCausalLM(LlamaConfig(**shape))})["wide"]


def saved_models(tmp_path_factory, kinds=MODELS):
    torch.set_num_threads(1)
    found = {}
    for name, make in kinds.items():
        torch.manual_seed(3)
        found[name] = str(tmp_path_factory.mktemp(name))
        make().save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def bench():
    """Four ranks, and one that is alone."""
    yield from ranks()


def ranks(kind="tests.parity.workbench:Workbench"):
    with asyncio.Runner() as runner:
        cluster = runner.run(_cluster())
        yield runner, runner.run(_spawn(cluster, kind))
        runner.run(cluster.close())


async def _cluster():
    # What a fork comes to look at of its parent's memory would count as its own.
    return LocalCluster(ClusterConfig(fork=False))


async def _spawn(cluster, kind):
    return [cluster.spawn(f"rank-{rank}", kind) for rank in range(4)]


def samples():
    """Groups whose siblings share a prompt, of many lengths; the engine of one has told more of its tokens. Every special token
    is in prompts and among those that were sampled."""
    rng = np.random.default_rng(5)
    groups = []
    for group in range(5):
        prompt = rng.integers(0, 131, 5 + 7 * group).astype(np.int32)
        prompt[: len(SPECIAL)] = [*SPECIAL.values()]
        groups.append([])
        for sibling in range(3):
            count = int(rng.integers(2, 30))
            tokens = rng.integers(0, 131, count).astype(np.int32)
            tokens[-1 - len(SPECIAL) : -1] = [*SPECIAL.values()][
                : count - 1
            ]  # others follow, and so have their gradients
            request = GenerateRequest(
                id=str(3 * group + sibling), tokens=prompt, sampling=Sampling(max_tokens=count, temperature=0.8)
            )
            delta = Delta(
                request=request.id,
                tokens=tokens,
                logprobs=(-5 + rng.normal(0, 0.3, count)).astype(np.float32),
                versions=np.zeros(count, np.int32),
                streams=streams_of(group, tokens, rng),
                finish=FinishReason.STOP,
            )
            groups[-1].append(with_targets(sample_of(request, [delta], float(rng.normal()))))
    return groups


def streams_of(group, tokens, rng):
    """One group is flagged in part; one was sampled from 1 to 40 tokens of the vocabulary, but for the first of each reply."""
    if group == 1:
        return Streams({MIXED_CACHE: rng.random(len(tokens)) < 0.5})
    if group != 2:
        return Streams()
    support = np.stack([rng.permutation(131)[:40] + 1 for _ in tokens]).astype(np.int32)
    support[np.arange(40) >= rng.integers(1, 40, (len(tokens), 1))] = 0
    support[:, 0] = tokens + 1
    support[0] = 0
    return Streams({SAMPLING_SUPPORT: support})


def batch_for(mesh):
    """Of which a group has no advantage, and so is measured alone."""
    *groups, last = samples()
    groups.append([replace(sample, advantages=0 * sample.advantages) for sample in last])
    how = {"aggregation": "sequence_mean_token_mean", "max_tokens": 1, "tokens_per_pack": 90}
    return build_batch(groups, BatchOptions(skip_zero_advantage=True, ranks=mesh.data, **how))


async def opened(members, model, mesh, **config):
    """The ranks of a mesh that have a model."""
    settings = LearnerConfig(mesh=MeshConfig(**mesh), **config)
    members = members[: settings.mesh.world]
    where = await members[0].call("host", "127.0.0.1")
    await asyncio.gather(*(member.call("open", model, settings, rank, where) for rank, member in enumerate(members)))
    return members, settings.mesh


async def on_mesh(members, model, mesh, method, *args, may_fail=False, **config):
    """What each rank answers."""
    members, ranks = await opened(members, model, mesh, **config)
    calls = (member.call(method, *args, ALGORITHM, batch_for(ranks)) for member in members)
    return await asyncio.gather(*calls, return_exceptions=may_fail)


async def asked(members, model, mesh, given=(), **config):
    """What ranks say of packs, and the rhythm of attention that they read."""
    members, ranks = await opened(members, model, mesh, **config)
    learner = RankGroup(members, ranks)
    await learner.call("begin", ALGORITHM)
    said = await learner.call("predict", list(given) or packs())
    return said, await learner.call("attention_stats", packs())


def with_targets(sample):
    """For a critic."""
    count = len(sample.advantages)
    returns = sample.streams.with_stream(RETURNS, np.linspace(-1, 1, count, dtype=np.float32))
    return replace(sample, streams=returns.with_stream(OLD_VALUE, np.zeros(count, np.float32)))


def packs():
    """An odd number of them."""
    ((own,),) = [update.packs for update in batch_for(MeshConfig()).updates]
    return list(own[: len(own) - 1 + len(own) % 2])


async def trained(members, model, mesh, **config):
    found = await on_mesh(members, model, mesh, "train", **config)
    of_stages = {name: array for rank in reversed(found) for name, array in rank["gradient"].items()}
    return found[0] | {"gradient": of_stages}


@pytest.fixture(scope="module")
def references(models):
    return alone(models)


def alone(models, **config):
    """What one process makes of it."""
    found = {}
    for name, model in models.items():
        bench = Workbench()
        bench.open(model, LearnerConfig(**config), 0, "")
        batch = batch_for(MeshConfig())
        found[name] = bench.train(ALGORITHM, batch)
    return found


def idle(runner, members, model, mesh, **config):
    """Updates without packs move nothing, and leave the others and the schedule as they are on one rank of torch."""
    bench = Workbench()
    bench.open(model, LearnerConfig(), 0, "")
    expected, _ = bench.idle(ALGORITHM, batch_for(MeshConfig()))
    for said, moved in runner.run(on_mesh(members, model, mesh, "idle", **config)):
        assert moved == [False, True, True, False, True]
        for mine, theirs in zip(said, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def leaves_its_device(runner, members, model, mesh, **config):
    """To leave the device between updates changes nothing; returns the bytes of tensors before and meanwhile, of each rank."""
    stayed = runner.run(on_mesh(members, model, mesh, "leave", False, **config))
    left = runner.run(on_mesh(members, model, mesh, "leave", True, **config))
    for (found, weights, _), (expected, others, _) in zip(left, stayed, strict=True):
        assert found == expected
        assert weights.keys() == others.keys()
        assert all(np.array_equal(weights[name], array) for name, array in others.items())
    return [held for _, _, held in left]


def weights_in(checkpoint):
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def shares_its_devices(project, learner):
    """A run whose engines and ranks take turns on their devices learns as one whose engines have others, and goes on."""
    saved = []
    for placement in ({}, {"learner": BOTH, "engine": "with learner"}):
        path = project.config(
            model={"path": "mytask:build_deep"},
            learner=learner,
            placement=placement,
            engine={"replicas": 2},
            rollout={"async_ratio": 1, "deterministic": True},
            sft={"steps": 2, "batch_size": 8},
            checkpoint={"every": 2, "keep_last": 5},
            steps=3,
        )
        for arguments in (("--overwrite",), ("--resume", "steps=4")):
            done = project.run("train", path, *arguments)
            assert done.returncode == 0, done.stderr
        run = project.folder / "runs" / "run"
        assert not audit(run).violations
        saved.append([weights_in(run / "checkpoints" / checkpoint_name(step)) for step in (2, 3, 4)])
    moved = most_apart(saved[0][0], saved[0][-1])
    for ours, theirs in zip(*saved, strict=True):
        assert most_apart(ours, theirs) < 0.02 * moved, "but for rounding: memory that comes back lies elsewhere"


def most_apart(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - tensor).abs().max()) for name, tensor in theirs.items())


def apart(ours, theirs):
    """The most that two sets of arrays differ by, relative to the largest number in them."""
    assert ours.keys() == theirs.keys()
    scale = max(float(np.abs(array).max()) for array in theirs.values())
    return max(float(np.abs(ours[name] - array).max()) for name, array in theirs.items()) / scale


OF_EXPERTS = {
    "expert 2": {"shard": 2, "expert": 2},
    "shard 4, expert 2": {"shard": 4, "expert": 2},
    "expert 2, context 2": {"shard": 2, "expert": 2, "context": 2},
    "expert 2, replicate 2": {"replicate": 2, "shard": 2, "expert": 2},
    "expert 2, tensor 2": {"shard": 2, "expert": 2, "tensor": 2},
}
QUICK = {
    ("llama", "shard 2"),
    ("qwen3", "shard 4"),
    ("llama", "replicate 2, shard 2"),
    ("qwen3", "tensor 2"),
    ("llama", "context 2"),
    ("qwen3", "context 3, by keys"),
    ("qwen3", "shard 2, tensor 2"),
    ("llama", "shard 2, context 2"),
    ("qwen3", "pipeline 2"),
    ("llama", "pipeline 2, interleaved"),
    ("llama", "pipeline 2, tensor 2"),
    ("gemma3", "tensor 2"),
    ("phi3", "shard 2, tensor 2"),
    ("olmo2", "tensor 2"),
    ("mixture", "shard 4, expert 2"),
    ("mixture", "expert 2, tensor 2"),
}
CASES = [(model, mesh) for model in ("llama", "qwen3") for mesh in MESHES] + [
    ("gemma3", "tensor 2"),
    ("phi3", "shard 2, tensor 2"),
    ("olmo2", "tensor 2"),
    *(("mixture", mesh) for mesh in ("shard 2", "tensor 2", *OF_EXPERTS)),
]


@pytest.fixture(scope="module")
def measured(request):
    modules = ("torch_learner", "model_worker", "pack_learner", "mesh", "parallel")
    yield from kept(request, "parity_meshes", CASES, modules)


def kept(request, result, cases, modules):
    """Deviations, written to a result of these modules of `learning` when all cases have been tried."""
    found = {}
    yield found
    if request.config.getoption("--long") and len(found) == len(cases):
        sys.path.insert(0, str(request.config.rootpath / "benchmarks"))
        from _common import write_result

        digits = {
            f"digits of the {name}, {case}": -float(np.log10(max(value, 1e-12)))
            for case, of in found.items()
            for name, value in of.items()
        }
        figures = {"fewest digits": min(digits.values())} | digits
        write_result(result, figures, command="make parity", measures=[f"antiphon.learning.{name}" for name in modules])


def deviations(ours, theirs):
    """By how much several learn something else than one, which is not to be more than rounding."""
    found = {
        "gradient": apart(ours["gradient"], theirs["gradient"]),
        "three SGD steps": apart(ours["moved"], theirs["moved"]),
    }
    assert max(found.values()) <= 1e-5, found
    for mine, expected in zip(ours["plain"], theirs["plain"], strict=True):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert ours["curve"] == pytest.approx(theirs["curve"], rel=1e-4, abs=1e-6)
    return found


@pytest.mark.parametrize(
    ("model", "mesh"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.long) for case in CASES]
)
def test_ranks_learn_what_one_does(bench, models, references, measured, model, mesh):
    runner, members = bench
    ours = runner.run(trained(members, models[model], (MESHES | OF_EXPERTS)[mesh]))
    measured[f"{model}, {mesh}"] = deviations(ours, references[model])


@pytest.mark.parametrize("mesh", ["shard 2", "tensor 2", "context 2"])
def test_frozen_parameters_stay_on_every_rank(bench, models, mesh):
    runner, members = bench
    frozen = {"freeze": ("model.embed_tokens.weight", "model.layers.0.*")}
    alone = Workbench()
    alone.open(models["llama"], LearnerConfig(**frozen), 0, "")
    before = {name: tensor.copy() for name, tensor in alone.weights().items()}
    metrics, weights, _ = alone.leave(False, ALGORITHM, batch_for(MeshConfig()))
    found, after, _ = runner.run(on_mesh(members, models["llama"], MESHES[mesh], "leave", False, **frozen))[0]
    assert apart(after, weights) <= 1e-4
    for mine, theirs in zip(found, metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    still = {name for name in before if np.array_equal(after[name], before[name])}
    assert still == {name for name in before if "embed_tokens" in name or "layers.0." in name}


OFFLOADED = {"cpu_offload": True}


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ({}, OFFLOADED),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ({"shard": 2}, OFFLOADED),
                ({"tensor": 2}, OFFLOADED),
                ({"pipeline": 2}, OFFLOADED),
                ({"shard": 2}, {"gradient_checkpointing": True}),
            ]
        ),
    ],
    ids=str,
)
def test_what_saves_memory_changes_nothing(bench, models, references, tmp_path, mesh, how):
    runner, members = bench
    ours = runner.run(trained(members, models["llama"], mesh, **how))
    assert apart(ours["gradient"], references["llama"]["gradient"]) <= 1e-5
    assert apart(ours["moved"], references["llama"]["moved"]) <= 1e-5
    there, *_ = runner.run(on_mesh(members, models["llama"], mesh, "save", tmp_path, **how))
    elsewhere, *_ = runner.run(on_mesh(members, models["llama"], {}, "restore", tmp_path))
    for mine, theirs in zip(elsewhere, there, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("mesh", [{"shard": 2}, pytest.param({"tensor": 2}, marks=pytest.mark.long)], ids=str)
def test_moments_of_8_bits_go_on_to_the_bit_and_come_near_on_another_mesh(bench, wide, tmp_path, mesh):
    runner, members = bench
    how = {"optimizer": {"moments": "8bit"}}
    weights, held = runner.run(on_mesh(members, wide, mesh, "hold", **how))[0]
    assert held < 0.6 * weights, "two bytes a weight, but for small ones"
    there, *_ = runner.run(on_mesh(members, wide, mesh, "save", tmp_path, **how))
    for on, exact in ((mesh, True), ({}, False)):
        found, *_ = runner.run(on_mesh(members, wide, on, "restore", tmp_path, **how))
        for mine, theirs in zip(found, there, strict=True):
            assert mine == (theirs if exact else pytest.approx(theirs, rel=2e-3, abs=1e-4))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "mesh"),
    [("llama", {"shard": 2}), ("qwen3", {"tensor": 2}), ("qwen3", {"context": 2}), ("llama", {"pipeline": 2})],
    ids=str,
)
def test_half_precision_comes_near_it_on_ranks_too(bench, models, references, model, mesh):
    runner, members = bench
    ours = runner.run(trained(members, models[model], mesh, dtype="bfloat16", gradient_checkpointing=True))
    assert apart(ours["gradient"], references[model]["gradient"]) <= 0.1
    assert ours["curve"] == pytest.approx(references[model]["curve"], rel=0.05)


ADAPTED = [
    ("qwen3", {"tensor": 2}),
    ("llama", {"shard": 2, "tensor": 2}),
    ("llama", {"pipeline": 2}),
    ("phi3", {"tensor": 2}),
    ("qwen3", {"context": 2}),
]
ADDED = {"rank": 4, "dropout": 0.2, "modules_to_save": ["embed_tokens", "input_layernorm"]}


@pytest.mark.parametrize(
    ("model", "mesh"), [pytest.param(*case, marks=[pytest.mark.long] * bool(i)) for i, case in enumerate(ADAPTED)]
)
def test_ranks_learn_adapters_as_one_does(bench, models, tmp_path, model, mesh):
    runner, members = bench
    lora = {"lora": ADDED}
    how = {"gradient_checkpointing": True, **lora}  # while other packs are under way in a pipeline
    alone, ours = (runner.run(trained(members, models[model], on, **given)) for on, given in (({}, lora), (mesh, how)))
    assert {kind for name in alone["gradient"] for kind in ("lora", "norm", "embed") if kind in name} == {
        "lora",
        "norm",
        "embed",
    }
    assert apart(ours["gradient"], alone["gradient"]) <= 1e-5
    assert apart(ours["moved"], alone["moved"]) <= 1e-5
    assert ours["curve"] == pytest.approx(alone["curve"], rel=1e-4, abs=1e-6)
    there, *_ = runner.run(on_mesh(members, models[model], mesh, "save", tmp_path, **lora))
    elsewhere, *_ = runner.run(on_mesh(members, models[model], {}, "restore", tmp_path, **lora))
    for mine, theirs in zip(elsewhere, there, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    with_adapters = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models[model]), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(merged), logits(with_adapters), rtol=1e-4, atol=1e-5)


async def adapted(members, model, mesh, exchange, **config):
    """The adapters that ranks send when these have learned, and what the ranks say with and without them."""
    members, ranks = await opened(members, model, mesh, **{"lora": {"rank": 4}, **config})
    learner = RankGroup(members, ranks)
    await learner.call("descend", ALGORITHM, batch_for(ranks))
    said = [await learner.call(method, packs()) for method in ("predict", "predict_base")]
    update, _ = await learner.call("publish", exchange, ALGORITHM, batch_for(ranks))
    bare = replace(update, manifest=replace(update.manifest, adapters=None))
    return {name: tensor.numpy().copy() for name, tensor in SharedMemory.receive(bare)}, update.manifest.adapters, *said


@pytest.mark.parametrize("mesh", [{"shard": 2}, pytest.param({"pipeline": 2}, marks=pytest.mark.long)], ids=str)
def test_ranks_send_adapters_and_know_their_base_as_one_does(bench, models, tmp_path, mesh):
    runner, members = bench
    alone, ours = (
        runner.run(adapted(members, models["llama"], on, TransferContext(tmp_path), lora=ADDED)) for on in ({}, mesh)
    )
    (expected, base, said, of_base), (found, same, *others) = alone, ours
    assert apart(found, expected) <= 1e-5 and all(array.any() for array in expected.values())
    assert same == base and {"model.embed_tokens.weight", "model.layers.3.input_layernorm.weight"} < expected.keys()
    for mine, theirs in zip([*others[0], *others[1]], [*said, *of_base], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not any(np.allclose(with_them, without, atol=1e-4) for with_them, without in zip(said, of_base, strict=True))


def test_updates_without_packs_move_nothing(bench, models):
    idle(*bench, models["llama"], {"shard": 2})


CRITICS = [{"shard": 2}, {"context": 2}, {"shard": 2, "tensor": 2}, {"pipeline": 2, "context": 2}]


@pytest.mark.parametrize("mesh", ({"shard": 2}, {"replicate": 2}, {"tensor": 2}, {"pipeline": 2}), ids=str)
def test_ranks_skip_an_update_that_is_not_finite(bench, models, mesh):
    """All of them, also those whose own packs are as they should be; then the others move what they would have moved."""
    runner, members = bench
    for skipped, weights, expected in runner.run(on_mesh(members, models["llama"], mesh, "skip")):
        assert skipped == [0, 1, 0, 0, 0]
        for name in expected:
            np.testing.assert_array_equal(weights[name], expected[name])


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[pytest.mark.long] * (i > 1)) for i, mesh in enumerate(CRITICS)]
)
def test_ranks_fit_a_critic_as_one_does(bench, models, mesh):
    runner, members = bench
    alone, ours = (
        runner.run(trained(members, models["llama"], on, kind="tests.parity.workbench:Critic")) for on in ({}, mesh)
    )
    deviations(ours, alone)


def run_on(model, mesh, meshes):
    """A run whose critic, reference and teacher have meshes of their own."""
    return RunConfig(
        name="run",
        steps=9,
        model={"path": model},
        tasks=[{"name": "sums", "prompts": {"source": "jsonl", "path": "sums.jsonl"}, "reward": "math"}],
        rollout={"groups_per_step": 5, "group_size": 3, "sampling": {"max_tokens": 30}},
        algorithm={"recipe": "ppo", "kl": {"coefficient": 0.1}, "teacher_coefficient": 0.5},
        learner={"mesh": mesh, "tokens_per_pack": 90, "optimizer": {"learning_rate": 1e-3}},
        critic={"optimizer": {"learning_rate": 1e-3}},
        teachers=[{"path": model}],
        meshes=meshes,
    )


async def steps_on(cluster, config, numbers, goes_on=None, into=None):
    """What models say of the samples, and what they learn, in so many steps after a checkpoint; between steps they leave their
    devices and come back."""
    models, workers = await start_models(LaunchContext(cluster=cluster, config=config), Path(config.model.path))
    found = []
    try:
        await models.begin(config.algorithm, config.learner, config.critic, config.steps)
        if goes_on is not None:
            await models.restore(goes_on)
        training = make_step_pipeline(config, models.learner, models.reference, models.critics, models.teachers)
        for number in numbers:
            paid = [
                [replace(sample, streams=Streams(), reward=float(place)) for place, sample in enumerate(group)]
                for group in samples()
            ]
            step = Step(number=number, version=number - 1, samples=paid, pipeline=training)
            await annotate(step)
            said = [sample.streams[spec] for sample in step.flat for spec in SAID]
            for stage in training.stages[1:]:
                await stage(step)
            kept = {name: value for name, value in step.metrics.items() if not name.endswith(OF_PACKS)}
            found.append((said, kept))
            await models.offload()
            await models.reload()
        if into is not None:
            await asyncio.gather(*await models.save(into))
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))
    return found


async def from_mesh_to_mesh(model, first, then, place):
    """What is said and learned in a step on some meshes and one on others; and in both on one rank each."""
    cluster = LocalCluster(ClusterConfig())
    try:
        alone = await steps_on(cluster, run_on(model, {}, {}), (1, 2))
        ours = await steps_on(cluster, run_on(model, *first), (1,), into=place)
        return alone, ours + await steps_on(cluster, run_on(model, *then), (2,), goes_on=place)
    finally:
        await cluster.close()


OF_PACKS = ("seconds", "/tokens")  # what depends on how samples are packed
SAID = (VALUES, REFERENCE_LOGPROBS, TEACHER_LOGPROBS)
OF_ROLES = [
    ({"tensor": 2}, {"critic": {"shard": 2}, "reference": {"pipeline": 2}, "teacher": {}}),
    ({}, {"critic": {"context": 2}, "reference": {"tensor": 2}, "teacher": {"shard": 2}}),
]
OF_MANY = [
    ({"shard": 2}, {"critic": {"shard": 2, "tensor": 2}, "reference": {}, "teacher": {"pipeline": 2}}),
    ({"pipeline": 2, "shard": 2}, {"critic": {}, "reference": {"shard": 3}}),
    ({"shard": 3}, {"critic": {"pipeline": 2, "context": 2}, "teacher": {"replicate": 2}}),
]


@pytest.mark.parametrize(
    ("first", "then"),
    [(OF_ROLES[0], OF_ROLES[1]), *(pytest.param(one, OF_ROLES[1], marks=pytest.mark.long) for one in OF_MANY)],
)
def test_models_on_own_meshes_match_one_rank(models, tmp_path, first, then):
    """And go on, each on another."""
    alone, ours = asyncio.run(from_mesh_to_mesh(models["llama"], first, then, tmp_path))
    assert np.abs(alone[1][0][0]).max() > 0, "the critic has learned"
    for (said, metrics), (expected, measures) in zip(ours, alone, strict=True):
        for mine, theirs in zip(said, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        assert metrics == pytest.approx(measures, rel=1e-4, abs=1e-6)
        assert metrics["critic/0/grad_norm"] > 0


def test_unfit_mesh_is_refused_before_a_rank_starts(models):
    with raises_with(ConfigError, key="meshes.critic.pipeline"):
        asyncio.run(
            steps_on(LocalCluster(ClusterConfig()), run_on(models["llama"], {}, {"critic": {"pipeline": 3}}), ())
        )


ASKED = [
    ("llama", {"shard": 2}),
    ("llama", {"pipeline": 2, "pipeline_chunks": 2}),
    pytest.param("qwen3", {"tensor": 2}, marks=pytest.mark.long),
    pytest.param("llama", {"context": 2}, marks=pytest.mark.long),
    ("llama", {"context": 3, "context_attention": "keys"}),
    pytest.param("qwen3", {"context": 2, "context_attention": "keys", "tensor": 2}, marks=pytest.mark.long),
    pytest.param("llama", {"context": 2, "context_attention": "keys", "pipeline": 2}, marks=pytest.mark.long),
    pytest.param("llama", {"tensor": 2, "pipeline": 2}, marks=pytest.mark.long),
    pytest.param("qwen3", {"tensor": 2, "context": 2}, marks=pytest.mark.long),
    pytest.param("mixture", {"shard": 2, "expert": 2}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("model", "mesh"), ASKED)
def test_ranks_say_what_one_does(bench, models, model, mesh):
    runner, members = bench
    alone, rhythm = runner.run(asked(members, models[model], {}))
    ours, theirs = runner.run(asked(members, models[model], mesh))
    for mine, expected in zip([*ours, *theirs], [*alone, *rhythm], strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


REMESHED = [
    pytest.param("llama", {"shard": 2}, {"tensor": 2}, marks=pytest.mark.long),
    ("qwen3", {"tensor": 2}, {}),
    pytest.param("qwen3", {}, {"pipeline": 2}, marks=pytest.mark.long),
    ("llama", {"pipeline": 2, "tensor": 2}, {"shard": 3}),
    ("mixture", {"shard": 2, "expert": 2}, {"shard": 3}),
]


@pytest.mark.parametrize(("model", "before", "after"), REMESHED)
def test_what_one_mesh_has_saved_another_goes_on_with(bench, models, tmp_path, model, before, after):
    runner, members = bench
    there, *_ = runner.run(on_mesh(members, models[model], before, "save", tmp_path))
    elsewhere, *_ = runner.run(on_mesh(members, models[model], after, "restore", tmp_path))
    for mine, theirs in zip(elsewhere, there, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {name: p.shape for name, p in loaded.named_parameters()} == {
        name: p.shape for name, p in AutoModelForCausalLM.from_pretrained(models[model]).named_parameters()
    }


@pytest.mark.parametrize("mesh", [{"shard": 2}, {"shard": 2, "pipeline": 2}])
def test_scoring_changes_neither_published_nor_saved_weights(bench, models, mesh):
    """Which leave FSDP with whole parameters, in the precision that is computed in."""
    runner, members = bench
    questions = ["predict", "attention_stats"]
    found = runner.run(on_mesh(members, models["llama"], mesh, "known_when_asked", questions, dtype="bfloat16"))
    for before, *after in found:
        assert any("exp_avg" in name for name in before)
        for kept in after:
            assert kept.keys() == before.keys()
            for name in kept:
                np.testing.assert_array_equal(kept[name], before[name], err_msg=name)


def test_a_run_goes_from_mesh_to_mesh_and_nothing_is_lost(bench, models, tmp_path):
    """What one has saved another reads and writes to the last bit, and the losses are those of one mesh all along."""
    runner, members = bench
    expected, *_ = runner.run(on_mesh(members, models["llama"], {"shard": 2}, "save", tmp_path / "1"))
    for step, mesh in ((1, {"tensor": 2}), (2, {})):
        places = [tmp_path / name for name in (f"{step}", f"{step} again", f"{step + 1}")]
        ours, *_ = runner.run(on_mesh(members, models["llama"], mesh, "rewrite", *places))
        assert ours == pytest.approx(expected[step - 1], rel=1e-4, abs=1e-6)
        before, again, later = map(kept_in, places)
        assert before.keys() == again.keys() == later.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
        assert not any(torch.equal(later[name], tensor) for name, tensor in before.items())


def kept_in(checkpoint):
    """All weights and moments."""
    weights = weights_in(checkpoint)
    parts = [torch.load(file)["moments"] for file in checkpoint.glob("training_state/*.pt")]
    moments = {name: state for part in parts for name, state in part.items()}
    assert moments.keys() == weights.keys()
    return weights | {(name, key): value for name, state in moments.items() for key, value in state.items()}


@pytest.mark.parametrize(
    "mesh", [{"shard": 2}, pytest.param({"shard": 2, "tensor": 2}, marks=pytest.mark.long)], ids=str
)
def test_to_leave_the_device_between_updates_changes_nothing(bench, models, mesh):
    leaves_its_device(*bench, models["qwen3"], mesh)


@pytest.mark.parametrize(("model", "mesh"), [("llama", {"shard": 2}), ("mixture", {"shard": 2, "expert": 2})], ids=str)
def test_a_rank_has_one_layer_whole_at_a_time(bench, models, model, mesh):
    """The reason to shard: a model that fits on no device is computed layer by layer."""
    runner, members = bench
    for found in runner.run(on_mesh(members, models[model], mesh, "whole_layers")):
        assert found and set(found) == {1}


def logits(model):
    with torch.no_grad():
        return model(torch.arange(100)[None]).logits


def damaged(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


SAVED = [
    ("qwen3", {"shard": 2, "tensor": 2}),
    ("mixture", {"replicate": 2, "shard": 2, "expert": 2}),
    pytest.param("qwen3", {"pipeline": 2, "shard": 2}, marks=pytest.mark.long),
    pytest.param("mixture", {"pipeline": 2, "shard": 2, "expert": 2}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("model", "mesh"), SAVED)
def test_each_rank_writes_its_share_of_one_model(bench, models, tmp_path, model, mesh):
    """It is loaded as it is; where a rank's file is missing or torn, the checkpoint is passed over."""
    runner, members = bench
    before, last = (tmp_path / checkpoint_name(step) for step in (1, 2))
    for directory in (before, last):
        aside = staging_dir(directory)
        (weights, _), *_ = cut = runner.run(on_mesh(members, models[model], mesh, "cut", aside))
        assert max(most for _, most in cut) <= 2, (
            "tensors whole at once, on any rank: the thread of a collective may have the last one yet"
        )
        publish_checkpoint(aside, directory, {})
    files = sorted(last.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert len(files) == 4 and max(sizes) < 1.5 * sum(sizes) / 4 and min(sizes) > 0.5 * sum(sizes) / 4
    loaded = AutoModelForCausalLM.from_pretrained(last)
    expected = AutoModelForCausalLM.from_pretrained(models[model])
    expected.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()}, strict=False)
    assert torch.equal(logits(loaded), logits(expected))
    assert dict(loaded.named_parameters()).keys() == weights.keys()
    kept = [torch.load(file)["moments"].keys() for file in last.glob("training_state/*.pt")]
    assert sorted(name for names in kept for name in names) == sorted(weights), "each once"
    for file in files[2:]:
        assert newest_checkpoint(tmp_path, print) == last
        content, told = file.read_bytes(), []
        for tear in (Path.unlink, damaged):
            tear(file)
            assert newest_checkpoint(tmp_path, told.append) == before
            assert file.name in told.pop()
            file.write_bytes(content)


@pytest.mark.parametrize(
    ("model", "mesh"), [SAVED[0], pytest.param("mixture", {"pipeline": 2, "shard": 2, "expert": 2})]
)
def test_publishing_makes_one_tensor_whole_at_a_time(bench, models, tmp_path, model, mesh):
    """Also where the first rank has no room for what comes, no other waits for it."""
    runner, members = bench
    gone = runner.run(
        on_mesh(members, models[model], mesh, "publish", TransferContext(tmp_path / "gone"), may_fail=True)
    )
    assert isinstance(gone[0], WeightsError) and not any(isinstance(each, Exception) for each in gone[1:])
    found = runner.run(on_mesh(members, models[model], mesh, "publish", TransferContext(tmp_path)))
    assert max(most for _, most in found) <= 2, "on any rank, as above"
    received = {name: tensor.clone() for name, tensor in SharedMemory.receive(found[0][0])}
    expected = dict(AutoModelForCausalLM.from_pretrained(models[model]).named_parameters())
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())


SENDERS = [
    ("mixture", {"shard": 4, "expert": 2}),
    ("qwen3", {"shard": 2, "tensor": 2}),
    ("llama", {"replicate": 2, "shard": 2}),
    ("llama", {"pipeline": 2, "tensor": 2}),
    ("qwen3", {"pipeline": 2, "shard": 2}),
    ("gemma3", {"context": 4}),
    ("mixture", {"pipeline": 2, "shard": 2, "expert": 2}),
]


@pytest.mark.parametrize("channel", ["shared_memory", "distributed"])
@pytest.mark.parametrize(("model", "mesh"), SENDERS, ids=str)
def test_every_rank_sends_its_pieces_and_none_gathers(bench, models, tmp_path, model, mesh, channel):
    runner, members = bench
    exchange = TransferContext(tmp_path, channel, senders="all")
    found = runner.run(on_mesh(members, models[model], mesh, "publish", exchange))
    assert [most for _, most in found] == [0] * len(found), "no rank puts a tensor together"
    update = found[0][0]
    received = {name: tensor.clone() for name, tensor in receive_weights(CHANNELS.resolve(channel), update)}
    expected = dict(AutoModelForCausalLM.from_pretrained(models[model]).named_parameters())
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
    sizes = [sum(layout.size for layout in part.update.manifest.tensors) for part in update.manifest.parts]
    assert len(sizes) == len(found)
    assert sum(sizes) == sum(tensor.nbytes for tensor in expected.values()), "each byte is sent once"
    stages = mesh.get("pipeline", 1)  # which are not equally large
    assert max(sizes) <= 1.25 * sum(sizes) / len(sizes) or stages > 1


def test_a_rank_that_cannot_send_is_heard_by_all(bench, models, tmp_path):
    runner, members = bench
    exchange = TransferContext(tmp_path / "gone", senders="all")
    found = runner.run(on_mesh(members, models["llama"], {"shard": 4}, "publish", exchange, may_fail=True))
    assert all(isinstance(each, WeightsError) for each in found)

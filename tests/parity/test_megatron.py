"""The learner on Megatron-Core learns what one rank of the learner on torch does: on real processes, on a CPU by a shim."""

import asyncio
import importlib.util
from functools import cache

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from antiphon.core.errors import UnsupportedError
from antiphon.inspect.audit import audit
from antiphon.weights.base import TransferContext
from tests.parity import test_mixtures as mixtures
from tests.parity.test_meshes import (
    ALGORITHM,
    MODELS,
    SHAPE,
    adapted,
    alone,
    apart,
    asked,
    deviations,
    idle,
    kept,
    leaves_its_device,
    logits,
    on_mesh,
    opened,
    packs,
    ranks,
    saved_models,
    shares_its_devices,
    trained,
)
from tests.raising import raises_with

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="needs the extra megatron: make parity has an environment with it",
)
KIND = "tests.parity.megatron_bench:ShimmedLearner"
PLAIN = {"kind": KIND, "options": {"distributed_optimizer": False}}
SHARDED = {"kind": KIND, "options": {"distributed_optimizer": True}}


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **SHAPE,
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7}


def biased(model):
    """With a bias for the choice of experts, as DeepSeek-V3 has learned one."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.05)
    return model


OTHERS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),  # with biases
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=6)),
    "shared": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SHAPE, **EXPERTS, num_experts=6, shared_expert_intermediate_size=24)
    ),
    "deepseek_v2": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **LATENT, q_lora_rank=None, first_k_dense_replace=2, topk_method="greedy", norm_topk_prob=True
        )  # whose routers do not read the last
    ),
    "deepseek_v3": lambda: biased(
        DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **LATENT,
                q_lora_rank=20,
                first_k_dense_replace=1,
                n_group=2,
                topk_group=1,
                rms_norm_eps=1e-4,
                rope_parameters=YARN | {"mscale_all_dim": 0.5},
            )
        )
    ),
    "dots1": lambda: biased(
        Dots1ForCausalLM(
            Dots1Config(
                **SHAPE,
                **EXPERTS,
                head_dim=8,
                n_routed_experts=6,
                n_shared_experts=1,
                norm_topk_prob=True,
                first_k_dense_replace=2,
            )
        )
    ),
    "ernie": lambda: Ernie4_5ForCausalLM(Ernie4_5Config(**SHAPE, head_dim=8)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SHAPE, head_dim=8)),
    "glm4_moe": lambda: biased(
        Glm4MoeForCausalLM(
            Glm4MoeConfig(
                **SHAPE,
                **EXPERTS,
                n_routed_experts=6,
                first_k_dense_replace=0,
                attention_bias=True,
                use_qk_norm=True,
            )
        )
    ),
    "glm4_moe_lite": lambda: biased(Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**LATENT, q_lora_rank=20))),
    "seed": lambda: SeedOssForCausalLM(SeedOssConfig(**SHAPE, head_dim=8)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1, 1])),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return saved_models(tmp_path_factory, MODELS | OTHERS)


@pytest.fixture(scope="module")
def references(models):
    """What one process of torch makes of a model."""
    return cache(lambda name: alone({name: models[name]})[name])


@pytest.fixture(scope="module")
def bench():
    yield from ranks("tests.parity.megatron_bench:MegatronBench")


@pytest.fixture(scope="module")
def one():
    """One rank of the learner on torch."""
    for runner, members in ranks():
        yield runner, members[:1]


CASES = [
    ("llama", {}),
    ("qwen3", {"tensor": 2}),
    ("qwen2", {"tensor": 2}),
    ("llama", {"pipeline": 2}),
    ("qwen3", {"pipeline": 2}),
    ("llama", {"pipeline": 2, "pipeline_chunks": 2}),
    ("qwen3", {"pipeline": 2, "pipeline_chunks": 2, "shard": 2}),
    ("mixture", {"pipeline": 2, "pipeline_chunks": 2}),
    ("llama", {"shard": 2}),
    ("qwen3", {"pipeline": 2, "tensor": 2}),
    ("qwen3", {"shard": 2, "tensor": 2}),
    ("llama", {"context": 2}),
    ("qwen3", {"context": 2, "context_attention": "keys"}),
    ("qwen3", {"shard": 2, "context": 2}),
    ("llama", {"tensor": 2, "context": 2}),
    ("mixture", {"shard": 2, "expert": 2}),
    ("mixture", {"pipeline": 2, "shard": 2, "expert": 2}),
    ("mixture", {"shard": 2, "expert": 2, "context": 2}),
    ("mistral", {"tensor": 2}),
    ("mixtral", {"shard": 2, "expert": 2}),
    ("shared", {"shard": 2, "expert": 2}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"pipeline": 2, "pipeline_chunks": 2}),
    ("deepseek_v3", {"shard": 2, "expert": 2, "context": 2}),
    ("deepseek_v2", {"pipeline": 2}),
    ("dots1", {"shard": 2, "expert": 2}),
    ("ernie", {"tensor": 2}),
    ("gemma", {"pipeline": 2, "tensor": 2}),
    ("glm4_moe", {"shard": 2, "expert": 2}),
    ("glm4_moe_lite", {"pipeline": 2}),
    ("seed", {"tensor": 2}),
    ("smollm3", {"pipeline": 2, "tensor": 2}),
]


@pytest.fixture(scope="module")
def measured(request):
    yield from kept(
        request,
        "parity_megatron",
        CASES,
        (
            *(f"backends.megatron{part}" for part in ("", "_attention", "_model", "_names", "_optimizer", "_schedule")),
            "model_worker",
            "pack_learner",
        ),
    )


@pytest.mark.parametrize(("model", "mesh"), CASES, ids=str)
def test_it_learns_what_torch_does(bench, models, references, measured, model, mesh):
    runner, members = bench
    ours = runner.run(trained(members, models[model], mesh, **PLAIN))
    case = [model, *(f"{axis} {ranks}" for axis, ranks in mesh.items())]
    measured[", ".join(case)] = deviations(ours, references(model))


IDLE = [({"shard": 2}, PLAIN), ({"shard": 2}, SHARDED), ({"pipeline": 2, "tensor": 2}, PLAIN)]


@pytest.mark.parametrize(("mesh", "how"), IDLE, ids=str)
def test_updates_without_packs_move_nothing(bench, models, mesh, how):
    idle(*bench, models["llama"], mesh, **how)


@pytest.mark.parametrize(
    ("model", "mesh", "how"),
    [
        ("llama", {"shard": 2}, PLAIN),
        ("llama", {"shard": 2}, SHARDED),
        ("qwen3", {"pipeline": 2, "tensor": 2}, SHARDED),
        ("mixture", {"shard": 2, "expert": 2}, SHARDED),
    ],
    ids=str,
)
def test_a_device_that_is_left_has_nothing_of_it(bench, models, model, mesh, how):
    for before, *away in leaves_its_device(*bench, models[model], mesh, **how):
        assert max(away) < 0.02 * before


def goes_on(there, elsewhere):
    for mine, theirs in zip(elsewhere, there, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


SAVED = [
    ("qwen3", {"pipeline": 2, "tensor": 2}, PLAIN),
    ("qwen3", {"pipeline": 2, "pipeline_chunks": 2}, SHARDED),
    ("llama", {"shard": 2, "tensor": 2}, SHARDED),
    ("llama", {"shard": 2, "context": 2}, SHARDED),
    ("mixture", {"pipeline": 2, "shard": 2, "expert": 2}, SHARDED),
    ("deepseek_v3", {"pipeline": 2, "pipeline_chunks": 2}, SHARDED),
]


@pytest.mark.parametrize(("model", "mesh", "how"), SAVED, ids=str)
def test_torch_and_megatron_resume_each_others_checkpoints(bench, one, models, tmp_path, model, mesh, how):
    (runner, members), (other, alone) = bench, one
    path = models[model]
    for place in ("ours", "theirs"):
        (tmp_path / place).mkdir()
    there, *_ = runner.run(on_mesh(members, path, mesh, "save", tmp_path / "ours", **how))
    goes_on(there, other.run(on_mesh(alone, path, {}, "restore", tmp_path / "ours"))[0])
    saved, begun = (AutoModelForCausalLM.from_pretrained(at) for at in (tmp_path / "ours", path))
    shapes = [{name: p.shape for name, p in each.named_parameters()} for each in (saved, begun)]
    assert shapes[0] == shapes[1]
    buffers = dict(begun.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in saved.named_buffers()), "biases of experts"
    there, *_ = other.run(on_mesh(alone, path, {}, "save", tmp_path / "theirs"))
    goes_on(there, runner.run(on_mesh(members, path, mesh, "restore", tmp_path / "theirs", **how))[0])


ADAPTED = [
    ("llama", {"shard": 2}, PLAIN),
    ("qwen2", {"tensor": 2}, SHARDED),
    ("qwen3", {"pipeline": 2, "tensor": 2}, SHARDED),
    ("qwen3", {"pipeline": 2, "pipeline_chunks": 2}, SHARDED),
    ("mixture", {"shard": 2, "expert": 2}, SHARDED),
    ("mixture", {"shard": 2, "context": 2}, PLAIN),
    ("deepseek_v3", {"shard": 2, "expert": 2}, SHARDED),
]


@pytest.mark.parametrize(("model", "mesh", "how"), ADAPTED, ids=str)
def test_it_learns_adapters_as_torch_does(bench, one, models, tmp_path, model, mesh, how):
    (runner, members), (other, alone) = bench, one
    targets = ["q_b_proj", "kv_b_proj", "o_proj"] if model == "deepseek_v3" else []
    added = {"lora": {"rank": 4, "dropout": 0.2, "targets": targets}}
    theirs, ours = (
        other.run(trained(alone, models[model], {}, **added)),
        runner.run(trained(members, models[model], mesh, **PLAIN, **added)),
    )
    assert ours["gradient"] and all("lora" in name for name in ours["gradient"])
    assert apart(ours["gradient"], theirs["gradient"]) <= 1e-5
    assert apart(ours["moved"], theirs["moved"]) <= 1e-5
    assert ours["curve"] == pytest.approx(theirs["curve"], rel=1e-4, abs=1e-6)
    there, *_ = runner.run(on_mesh(members, models[model], mesh, "save", tmp_path, **how, **added))
    goes_on(there, other.run(on_mesh(alone, models[model], {}, "restore", tmp_path, **added))[0])
    goes_on(there, runner.run(on_mesh(members, models[model], mesh, "restore", tmp_path, **how, **added))[0])
    with_adapters = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models[model]), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(merged), logits(with_adapters), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "how", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4, "targets": ["v_proj", "up_proj"]}}], ids=str
)
def test_it_sends_adapters_and_knows_their_base_as_torch_does(bench, one, models, tmp_path, how):
    (runner, members), (other, alone) = bench, one
    (expected, base, said, of_base), (found, same, *others) = (
        run.run(adapted(those, models["llama"], mesh, TransferContext(tmp_path), **kind, **how))
        for run, those, mesh, kind in ((other, alone, {}, {}), (runner, members, {"pipeline": 2, "tensor": 2}, PLAIN))
    )
    assert apart(found, expected) <= 1e-5 and all(array.any() for array in expected.values())
    assert same == base
    for mine, theirs in zip([*others[0], *others[1]], [*said, *of_base], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not any(np.allclose(with_them, without, atol=1e-4) for with_them, without in zip(said, of_base, strict=True))


SAID = [
    ("llama", {"shard": 2}),
    ("qwen3", {"pipeline": 2, "tensor": 2}),
    ("llama", {"pipeline": 2, "pipeline_chunks": 2}),
    ("qwen3", {"tensor": 2, "context": 2}),
    ("qwen3", {"context": 2, "context_attention": "keys", "pipeline": 2}),
]


@pytest.mark.parametrize(("model", "mesh"), SAID, ids=str)
def test_it_says_what_torch_does(bench, one, models, model, mesh):
    (runner, members), (other, alone) = bench, one
    says, rhythm = other.run(asked(alone, models[model], {}))
    ours, theirs = runner.run(asked(members, models[model], mesh, **SHARDED))
    for mine, expected in zip([*ours, *theirs], [*says, *rhythm], strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def test_packs_that_fill_up_a_pipeline_are_not_answered(bench, models):
    runner, members = bench

    async def said():
        own, _ = await opened(members, models["llama"], {"pipeline": 2, "pipeline_chunks": 2}, **PLAIN)
        await asyncio.gather(*(member.call("begin", ALGORITHM) for member in own))
        return await asyncio.gather(*(member.call("predict", packs()) for member in own))

    assert len(packs()) % 2 and [len(answers) for answers in runner.run(said())] == [0, len(packs())]


SAVING = [
    ("llama", {"gradient_checkpointing": True}, True),
    ("deepseek_v3", {"gradient_checkpointing": True}, True),
    ("llama", {"dtype": "bfloat16"}, False),
]


@pytest.mark.parametrize(("model", "how", "exact"), SAVING)
def test_what_saves_memory_changes_nothing_or_little(bench, models, references, model, how, exact):
    runner, members = bench
    ours, theirs = runner.run(trained(members, models[model], {"pipeline": 2}, **PLAIN, **how)), references(model)
    assert apart(ours["gradient"], theirs["gradient"]) <= (1e-5 if exact else 0.05)


ROUTED = [
    {"shard": 2, "expert": 2},
    {"pipeline": 2},
    {"shard": 2, "expert": 2, "context": 2},
]


@pytest.mark.parametrize("mesh", ROUTED, ids=str)
def test_its_routers_replay_and_are_balanced_as_those_of_torch(bench, one, models, mesh):
    (runner, members), (other, alone) = bench, one
    balanced = mixtures.ALGORITHM.model_copy(update={"expert_balance": 0.5})
    gradient, moved, balances = other.run(mixtures.trained(alone, models["mixture"], balanced, replayed=True))
    ours = runner.run(mixtures.trained(members, models["mixture"], balanced, replayed=True, config=PLAIN, **mesh))
    assert apart(ours[0], gradient) <= 1e-5
    assert apart(ours[1], moved) <= 1e-5
    assert ours[2] == pytest.approx(balances, rel=1e-5)


def test_sigmoid_routers_replay_as_those_of_torch(bench, one, models):
    (runner, members), (other, alone) = bench, one
    path, mesh = models["glm4_moe"], {"shard": 2, "expert": 2}
    gradient, moved, _ = other.run(mixtures.trained(alone, path, mixtures.ALGORITHM, replayed=True))
    ours = runner.run(mixtures.trained(members, path, mixtures.ALGORITHM, replayed=True, config=PLAIN, **mesh))
    assert apart(ours[0], gradient) <= 1e-5
    assert apart(ours[1], moved) <= 1e-5


RUNS = [("build_deep", {"tensor": 2}), ("build_four", {"pipeline": 2, "pipeline_chunks": 2})]


@pytest.mark.parametrize(("model", "mesh"), RUNS, ids=str)
def test_a_run_trains_on_it_and_torch_goes_on(project, model, mesh):
    path = project.config(
        model={"path": f"mytask:{model}"},
        learner={"kind": KIND, "mesh": mesh},
        algorithm={"rhythm": {"kind": "coupled"}},
        rollout={"async_ratio": 1},
        sft={"steps": 2, "batch_size": 8},
        checkpoint={"every": 1},
        steps=3,
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    mismatches = [step["learner/mismatch_kl"] for step in project.metrics() if "learner/mismatch_kl" in step]
    assert len(mismatches) == 3 and max(mismatches) < 0.05, "engines have what was learned"
    more = project.run("train", path, "--resume", "steps=4", "learner.kind=torch", "learner.mesh={}")
    assert more.returncode == 0, more.stderr
    assert project.summary()["steps"] == 4
    assert not audit(project.folder / "runs" / "run").violations


def test_a_run_whose_engines_have_its_devices(project):
    shares_its_devices(project, {**SHARDED, "mesh": {"shard": 2}})


def test_sigmoid_routers_are_not_balanced(models):
    """As those of torch: they have a bias for that. On ranks of their own, because an update that fails ends one."""
    balanced = mixtures.ALGORITHM.model_copy(update={"expert_balance": 0.5})
    for runner, members in ranks("tests.parity.megatron_bench:MegatronBench"):
        with pytest.raises(UnsupportedError):
            runner.run(mixtures.trained(members, models["glm4_moe"], balanced, config=PLAIN))


def test_an_adapter_without_a_layer_of_its_own_is_refused(bench, models):
    runner, members = bench
    with raises_with(UnsupportedError, key="learner.lora.targets", value="model.layers.0.mlp.shared_expert_gate"):
        runner.run(opened(members, models["shared"], {"shard": 2}, **PLAIN, lora={"rank": 4}))
    with raises_with(UnsupportedError, key="learner.lora.targets"):  # peft gives the experts some, too
        runner.run(opened(members, models["deepseek_v3"], {"shard": 2}, **PLAIN, lora={"rank": 4}))

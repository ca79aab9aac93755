"""Meshes that cannot be, or would mean nothing."""

import tomllib
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import pytest
from pydantic import ValidationError
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.learning.backend_options import MEGATRON_VERSION
from antiphon.learning.config import LearnerConfig
from antiphon.learning.mesh_config import MeshConfig, MeshesConfig
from antiphon.learning.parallel.pipeline import schedule
from antiphon.run.config import RunConfig
from antiphon.run.launch.model_checks import check_installed, check_layers, check_mesh, check_meshes, check_shares
from tests.raising import raises_with

DEEPSEEK = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "num_experts_per_tok": 8, "n_routed_experts": 64}
SHAPE = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_experts": 8,
}


@pytest.mark.parametrize(
    ("mesh", "key"),
    [
        ({"tensor": 4}, "tensor"),
        ({"shard": 3, "expert": 3}, "expert"),
        ({"context": 4}, "context"),
        ({"tensor": 2, "context": 2}, "context"),
        ({"pipeline": 4}, "pipeline"),
        ({"pipeline": 2, "pipeline_chunks": 2}, "pipeline"),
    ],
)
def test_what_a_model_cannot_be_divided_into_is_named(mesh, key):
    assert {found for found, _ in MeshConfig(**mesh).incompatibilities(SHAPE)} == {key}


@pytest.mark.parametrize(
    "mesh",
    [
        {"tensor": 2},
        {"context": 6},
        {"context": 4, "context_attention": "keys"},
        {"pipeline": 3},
        {"shard": 4, "expert": 4},
    ],
)
def test_what_it_can_be_divided_into_is_not(mesh):
    assert not [*MeshConfig(**mesh).incompatibilities(SHAPE)]


SMALL = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
KINDS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "mesh", "axis", "layer"),
    [
        (LlamaConfig(**SMALL, attention_bias=True), {"tensor": 2}, "tensor", "o_proj"),
        (LlamaConfig(**SMALL, mlp_bias=True), {"tensor": 2}, "tensor", "down_proj"),
        (GPT2Config(n_embd=32, n_head=4, n_layer=2), {"tensor": 2}, "tensor", "GPT2"),
        (GPT2Config(n_embd=32, n_head=4, n_layer=2), {"shard": 2, "expert": 2}, "expert", "GPT2"),
        (Gemma3TextConfig(**SMALL, head_dim=8, layer_types=KINDS), {"pipeline": 2}, "pipeline", "rotary"),
        (GraniteConfig(**SMALL, embedding_multiplier=12.0), {"pipeline": 2}, "pipeline", "embedding_multiplier"),
    ],
)
def test_indivisible_layers_are_named_before_the_start(tmp_path, config, mesh, axis, layer):
    """From config.json alone: there are no weights here."""
    config.save_pretrained(tmp_path)
    with raises_with(UnsupportedError, match=layer, key=f"learner.mesh.{axis}"):
        check_layers(tmp_path, LearnerConfig(mesh=mesh))
    for other in (LearnerConfig(mesh={"shard": 2}), LearnerConfig(kind="mine:Learner", mesh=mesh)):
        check_layers(tmp_path, other)


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (Qwen3Config(**SMALL, attention_bias=False), {"tensor": 2}),
        (Qwen3MoeConfig(**SMALL, num_experts=4), {"shard": 2, "expert": 2}),
        (Qwen3MoeConfig(**SMALL, num_experts=4), {"tensor": 2}),
        (Phi3Config(**SMALL), {"tensor": 2}),
        (Gemma2Config(**SMALL, head_dim=8, layer_types=KINDS), {"pipeline": 2}),
        (Gemma3TextConfig(**SMALL, head_dim=8, layer_types=KINDS[:1] * 2), {"pipeline": 2}),
        (GraniteConfig(**SMALL, embedding_multiplier=1.0), {"pipeline": 2}),
    ],
)
def test_layers_that_can_be_divided_are_not(tmp_path, config, mesh):
    config.save_pretrained(tmp_path)
    check_mesh(tmp_path, LearnerConfig(mesh=mesh))
    check_layers(tmp_path, LearnerConfig(mesh=mesh))


@pytest.mark.parametrize(("counts", "message"), [({}, "no experts to divide"), ({"num_experts": None}, "no experts")])
def test_a_dense_model_has_no_experts_to_divide(counts, message):
    ((key, said),) = MeshConfig(shard=2, expert=2).incompatibilities(counts)
    assert key == "expert" and message in said


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_experts_are_counted_whatever_they_are_called(name):
    mesh = MeshConfig(shard=4, expert=4)
    assert [key for key, _ in mesh.incompatibilities({name: 6})] == ["expert"]
    assert not [*mesh.incompatibilities({name: 8})]


@pytest.mark.parametrize(
    ("learner", "key"),
    [
        ({"mesh": {"shard": 3, "expert": 2}}, "mesh.expert"),
        ({"mesh": {"pipeline_chunks": 2}}, "mesh.pipeline_chunks"),
        ({"mesh": {"context_attention": "keys"}}, "mesh.context_attention"),
        ({"kind": "deepspeed"}, "mesh.shard"),
        ({"kind": "deepspeed", "mesh": {"shard": 2}, "optimizer": {"moments": "8bit"}}, "optimizer.moments"),
        *(
            ({"kind": "deepspeed", "mesh": {"shard": 2, axis: 2}}, f"mesh.{axis}")
            for axis in ("replicate", "context", "tensor", "pipeline", "expert")
        ),
    ],
)
def test_options_that_would_be_passed_over_are_named(learner, key):
    assert {found for found, _ in LearnerConfig(**learner).problems()} == {key}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_every_stage_of_zero_can_be(stage, cpu_offload):
    learner = LearnerConfig(kind="deepspeed", options={"stage": stage}, mesh={"shard": 2}, cpu_offload=cpu_offload)
    assert not [*learner.problems()]


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_missing_backend_names_its_extra():
    with raises_with(ConfigError, match=r"\[deepspeed\]", key="learner.kind", value="deepspeed"):
        check_installed("deepspeed")


@pytest.mark.parametrize(
    ("learner", "key"),
    [
        ({"freeze": ("model.norm.*",)}, "freeze"),
        ({"cpu_offload": True, "mesh": {"shard": 2}}, "cpu_offload"),
        ({"optimizer": {"moments": "8bit"}}, "optimizer.moments"),
        ({"mesh": {"replicate": 2}}, "mesh.replicate"),
        ({"mesh": {"context": 2, "shard": 4, "expert": 2}}, "mesh.shard"),
    ],
)
def test_what_the_megatron_learner_has_not_is_named(learner, key):
    assert {found for found, _ in LearnerConfig(kind="megatron", **learner).problems()} == {key}
    assert not [*LearnerConfig(**learner).problems()]


@pytest.mark.parametrize(
    ("mesh", "shape", "key"),
    [
        ({}, {"model_type": "gemma3"}, "kind"),
        ({}, {"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}, "kind"),
        ({}, {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic"}}, "kind"),
        ({}, {"model_type": "llama", "hidden_act": "relu2"}, "kind"),
        ({}, {"model_type": "glm4_moe", "norm_topk_prob": False, "num_experts_per_tok": 8}, "kind"),
        ({}, {"model_type": "dots1", "num_experts_per_tok": 1}, "kind"),
        ({}, DEEPSEEK | {"n_group": 8, "topk_group": 2}, "kind"),
        ({}, DEEPSEEK | {"rope_interleave": False}, "kind"),
        ({}, DEEPSEEK | {"model_type": "deepseek_v2", "n_group": 8, "topk_group": 4}, "kind"),
        ({"tensor": 2}, {"model_type": "qwen3_moe"} | SHAPE, "mesh.tensor"),
        ({"tensor": 2}, {"model_type": "mixtral", "num_local_experts": 8}, "mesh.tensor"),
    ],
)
def test_models_that_megatron_does_not_compute_are_named(mesh, shape, key):
    assert {found for found, _ in LearnerConfig(kind="megatron", mesh=mesh).incompatibilities(shape)} == {key}
    assert not [*LearnerConfig(mesh=mesh).incompatibilities(shape)]


def test_a_refused_model_names_megatrons_version():
    pins = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["megatron"]
    assert pins == [f"megatron-core=={MEGATRON_VERSION}"]
    ((_, message),) = LearnerConfig(kind="megatron").incompatibilities({"model_type": "gemma3"})
    assert MEGATRON_VERSION in message


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        ({}, DEEPSEEK),
        ({}, DEEPSEEK | {"n_group": 8, "topk_group": 4, "rope_scaling": {"type": "yarn"}}),
        ({}, DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "greedy", "n_group": 8, "topk_group": 4}),
        ({"pipeline": 3, "pipeline_chunks": 2}, {"model_type": "qwen3_moe"} | SHAPE),
        ({}, {"model_type": "qwen3_moe"} | SHAPE),
        ({}, {"model_type": "mistral", "num_attention_heads": 4}),
        ({"shard": 2, "expert": 2, "context": 2}, {"model_type": "mixtral", "num_local_experts": 8}),
        (
            {"tensor": 2},
            {"model_type": "qwen3"} | {name: count for name, count in SHAPE.items() if name != "num_experts"},
        ),
        ({}, {"model_type": "llama", "hidden_act": "silu", "rope_scaling": {"type": "linear"}}),
        ({}, {"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}),
    ],
)
def test_models_that_megatron_computes_are_not(mesh, shape):
    assert not [*LearnerConfig(kind="megatron", mesh=mesh).incompatibilities(shape)]


@pytest.mark.parametrize(
    ("error", "meshes", "key"),
    [
        (ConfigError, {"critic": {"tensor": 3}}, "meshes.critic.tensor"),
        (UnsupportedError, {"critic": {"tensor": 2}}, "meshes.critic.tensor"),
        (ConfigError, {"reference": {"pipeline": 3}}, "meshes.reference.pipeline"),
        (ConfigError, {"teacher": {"shard": 2, "expert": 2}}, "meshes.teacher.expert"),
    ],
)
def test_each_role_is_held_to_its_own_mesh(tmp_path, error, meshes, key):
    LlamaConfig(**SMALL, attention_bias=True).save_pretrained(tmp_path)
    asked = {"recipe": "ppo", "kl": {"coefficient": 0.1}, "teacher_coefficient": 1}
    config = RunConfig(
        name="run",
        steps=1,
        model={"path": str(tmp_path)},
        tasks=[{"name": "sums", "prompts": {"source": "jsonl", "path": "sums.jsonl"}, "reward": "math"}],
        rollout={"groups_per_step": 2, "group_size": 2, "sampling": {"max_tokens": 8}},
        algorithm=asked,
        critic={},
        teachers=[{"path": str(tmp_path)}],
        meshes=meshes,
    )
    with raises_with(error, key=key):
        check_meshes(config, tmp_path)
    check_meshes(config.model_copy(update={"meshes": MeshesConfig()}), tmp_path)


def test_an_axis_has_at_least_one_rank():
    with pytest.raises(ValidationError):
        MeshConfig(tensor=0)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("packs", [1, 4, 12])
def test_a_schedule_never_waits_for_what_comes_later(ranks, chunks, packs):
    """All ranks are played at once: each action's turn comes, and every pack passes all stages forth and back."""
    packs = packs if chunks == 1 else -(-packs // ranks) * ranks
    left = [schedule(place, ranks, chunks, packs) for place in range(ranks)]
    done = set()
    last = ranks * chunks - 1
    while any(left):
        before = len(done)
        for place, actions in enumerate(left):
            while actions:
                backward, pack, chunk = actions[0]
                stage = chunk * ranks + place
                if backward:
                    needed = (False, pack, stage) if stage == last else (True, pack, stage + 1)
                else:
                    needed = (False, pack, stage - 1)
                if (stage or backward) and needed not in done:
                    break
                assert not backward or (False, pack, stage) in done
                done.add((backward, pack, stage))
                actions.pop(0)
        assert len(done) > before, "nobody can go on"
    assert len(done) == 2 * packs * (last + 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("packs", [1, 4, 12])
def test_a_schedule_keeps_as_few_packs_as_its_source(ranks, packs):
    """Activations are kept from a forward to its backward: of p - r packs on rank r; of v chunks (v - 1) p + 2 (p - r) - 1."""
    for place in range(ranks):
        assert _most_kept(schedule(place, ranks, 1, packs)) == min(ranks - place, packs)
        whole = -(-packs // ranks) * ranks
        bound = 2 * ranks + 2 * (ranks - place) - 1
        assert _most_kept(schedule(place, ranks, 3, whole)) == min(bound, 3 * whole)


def _most_kept(actions):
    return max(accumulate(-1 if action.backward else 1 for action in actions))


def test_ranks_read_their_shares_of_safetensors_alone(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    several = LearnerConfig(mesh=MeshConfig(shard=2))
    with raises_with(ConfigError, match="save_pretrained", key="learner.mesh"):
        check_shares(tmp_path, several)
    with raises_with(ConfigError, key="meshes.critic"):
        check_shares(tmp_path, several, "meshes.critic")
    check_shares(tmp_path, LearnerConfig())
    check_shares(tmp_path, several.model_copy(update={"kind": "deepspeed"}))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    check_shares(tmp_path, several)


def test_a_model_that_does_not_say_its_layers_is_not_refused():
    assert not [*MeshConfig(pipeline=2).incompatibilities({})]


def test_copies_follow_deepspeeds_stage():
    """By its documentation stage 1 divides moments, 2 (the default here) gradients too, and 3 weights as well."""
    mesh = {"shard": 4}
    copies = {
        stage: LearnerConfig(kind="deepspeed", mesh=mesh, options={"stage": stage} if stage else {}).copies
        for stage in (None, 1, 2, 3)
    }
    assert copies == {None: (5, 1), 1: (5, 4), 2: (5, 1), 3: (2, 1)}

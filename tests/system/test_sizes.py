"""What sizes alone say: parameters without weights, memory of each device, speeds, and the recipes for clusters."""

import json
import re
from pathlib import Path

import pytest
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from antiphon.core.config import load
from antiphon.core.errors import ConfigError
from antiphon.learning.config import LearnerConfig
from antiphon.learning.model.lora import is_adapter
from antiphon.learning.model.quantized_base import is_quantized
from antiphon.learning.torch_learner import TorchLearner
from antiphon.run.config import RunConfig
from antiphon.run.model_files import count_parameters
from antiphon.simulate.device_memory import device_memory, engine_memory, find_misfits, learner_memory, transient_memory
from antiphon.simulate.devices import DEVICES, Device, find_device, resolve_on_devices
from antiphon.simulate.fitting import find_changes
from antiphon.simulate.model_facts import ModelFacts, read_model_facts
from antiphon.simulate.model_shape import Architecture, Weight
from antiphon.simulate.planner import predict
from antiphon.simulate.speed_estimate import estimate
from tests import warm
from tests.raising import raises_with

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "recipes" / "clusters"
RECIPES = {path.stem: path for path in sorted(CLUSTERS.glob("*.yaml"))}
PUBLISHED = {  # parameters, and those that a token is computed with, as their makers count them
    "qwen2.5-7b": (7_615_616_512, 7_615_616_512),
    "qwen3-32b": (32_762_123_264, 32_762_123_264),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
}
SHAPE = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "plain": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
    "mixture": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
}
BITS = ("float32", "8bit")
SMALL = Device(operations=1e12, read=1e12, memory=1e9, link=1e11, network=1e10)
MODEL = ModelFacts(
    shape=Architecture(
        weights=(
            Weight(shape=(1000, 1000), layers=(0,), tensor_dim=0),
            Weight(shape=(8, 100, 1000), layers=(1,), is_expert=True),
        ),
        layers=2,
        hidden=100,
        key_heads=4,
        head=32,
        vocabulary=1000,
        experts=8,
        active_experts=2,
    ),
    prompt_tokens=(10, 20),
)


def config(*overrides, recipe="dense_7b_8gpu"):
    shape = ROOT / load(RECIPES[recipe], model=RunConfig).model.path
    return load(RECIPES[recipe], [f"model.path={shape}", *overrides], model=RunConfig)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_parameters_are_counted_alike_with_and_without_weights(make, tmp_path):
    make().save_pretrained(tmp_path)
    assert Architecture.read(tmp_path).parameters == count_parameters(str(tmp_path))


@pytest.mark.parametrize("name", PUBLISHED)
def test_well_known_models_have_their_well_known_sizes(name):
    shape = Architecture.read(CLUSTERS / name)
    assert (shape.parameters, shape.active) == PUBLISHED[name]


def test_a_token_is_computed_with_the_experts_that_it_chooses():
    assert MODEL.shape.parameters == 1_800_000
    assert MODEL.shape.active == 1_200_000


def test_what_a_rank_holds_is_divided_by_the_mesh():
    one = learner_memory(MODEL, config("learner.mesh={shard: 1}"))
    for mesh, part in {"{shard: 4}": 4, "{shard: 2, replicate: 2}": 2, "{shard: 2, context: 2}": 4}.items():
        rank = learner_memory(MODEL, config(f"learner.mesh={mesh}"))
        assert rank["weights"] == one["weights"] / part == rank["gradients"] == rank["moments"] / 2, mesh
    cut = learner_memory(MODEL, config("learner.mesh={tensor: 2}"))
    assert cut["weights"] == 4 * (500_000 + 800_000), "experts are not divided by tensor"
    staged = learner_memory(MODEL, config("learner.mesh={pipeline: 2}"))
    assert staged["weights"] == 4 * 1_000_000, "the fullest stage counts"
    few = learner_memory(MODEL, config("learner.mesh={shard: 16}"))
    assert few["weights"] == 4 * (63_000 + 100_000), "eight experts are not divided among sixteen ranks"


def test_checkpointing_adapters_and_offloading_save_memory():
    full, base = "learner.gradient_checkpointing=false", learner_memory(MODEL, config())
    assert learner_memory(MODEL, config(full))["activations"] > base["activations"]
    assert learner_memory(MODEL, config("learner.lora={rank: 8}"))["moments"] == 0
    assert learner_memory(MODEL, config("learner.cpu_offload=true"))["weights"] == 0
    assert learner_memory(MODEL, config("learner.tokens_per_pack=32768"))["activations"] == 2 * base["activations"]


def test_moments_of_8_bits_take_a_byte_each_and_their_scales():
    given = ("learner.mesh={shard: 1}", "learner.optimizer.moments=")
    moments = {bits: learner_memory(MODEL, config(given[0], given[1] + bits))["moments"] for bits in BITS}
    blocks = 2 * MODEL.shape.parameters / 256
    assert moments["8bit"] == int(2 * MODEL.shape.parameters + 4 * blocks) == int(moments["float32"] / 4 + 4 * blocks)


def test_what_is_offloaded_is_in_host_memory():
    one = ["learner.mesh={shard: 1}", "learner.optimizer.moments=8bit"]
    here, there = config(*one), config(*one, "learner.cpu_offload=true")
    held = sum(learner_memory(MODEL, here)[part] for part in ("weights", "gradients", "moments"))
    rows = device_memory(MODEL, there, SMALL)
    assert rows["each learner rank, in host memory"] == held
    assert not any(learner_memory(MODEL, there)[part] for part in ("weights", "gradients", "moments"))
    assert "each learner rank, in host memory" not in device_memory(MODEL, here, SMALL)


def test_offloading_takes_the_time_of_the_copies():
    fast = Device(operations=1e18, read=1e18, memory=1e9, link=1e18, network=1e18)
    seconds = [
        estimate(config("learner.mesh={shard: 1}", f"learner.cpu_offload={on}"), MODEL, fast).learner.per_token
        for on in ("false", "true")
    ]
    copied = 3 * 4 * MODEL.shape.parameters
    assert seconds[1] * 16384 == pytest.approx(copied / 25e9, rel=0.01)
    assert seconds[1] > 100 * seconds[0]


@pytest.mark.parametrize("saved", [[], ["embed_tokens"], ["lm_head", "layers.1"]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_of_four_bits_takes_what_is_said(dtype, saved, tmp_path):
    shape = SHAPE | {"hidden_size": 64, "intermediate_size": 256}
    LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().save_pretrained(tmp_path)
    given = [f"learner.dtype={dtype}", "learner.mesh={shard: 1}", "learner.lora={rank: 4, quantize: nf4}"]
    given.append(f"learner.lora.modules_to_save={saved}")
    model = ModelFacts(shape=Architecture.read(tmp_path), prompt_tokens=(10,))
    added = {"rank": 4, "quantize": "nf4", "modules_to_save": saved}
    learner = TorchLearner(str(tmp_path), LearnerConfig(device="cpu", dtype=dtype, lora=added), 0)
    held = whole = 0
    for name, parameter in learner.model.named_parameters():
        whole += parameter.nbytes if parameter.requires_grad and not is_adapter(name) else 0
        if not is_adapter(name):
            held += parameter.nbytes
        if is_quantized(learner.model, name):
            state = parameter.quant_state
            held += state.absmax.nbytes
    found = learner_memory(model, config(*given))
    assert found["weights"] == pytest.approx(held, rel=0.01)
    assert found["gradients"] == whole == found["moments"] / 2 and bool(saved) == bool(whole)


def test_a_cache_takes_what_there_is_or_all_that_it_may_need():
    slots, size = 128, 2 * MODEL.shape.cached_per_token
    longest = 20 + 8192
    vllm, native = config(), config("engine.kind=native")
    assert engine_memory(MODEL, native, SMALL)["KV cache, at most"] == slots * longest * size
    room = int(SMALL.memory * 0.9) - 3_600_000
    assert engine_memory(MODEL, vllm, SMALL) == {"weights": 3_600_000, "KV cache, at most": room}
    assert list(find_misfits(MODEL, config("learner.tokens_per_pack=16", "learner.logits_chunk=8"), SMALL)) == []
    assert re.fullmatch("each device of an engine: needs 1 GiB, .*", *misfits_of(native))
    (line,) = misfits_of(config("rollout.sampling.max_tokens=9000000", "engine.max_length=0"))
    assert line.startswith("each device of an engine, for one sequence of the longest: needs 9 GiB")


def misfits_of(run):
    return [line for line in find_misfits(MODEL, run, SMALL) if "engine" in line]


ONE_DEVICE = [
    "learner.mesh={shard: 1}",
    "learner.gradient_checkpointing=false",
    "placement={learner: 'gpu:0', engine: 'gpu:0'}",
    "engine={kind: native, slots: 64, replicas: 1, options: {}}",
    "rollout.sampling.max_tokens=1000",
]


@pytest.mark.parametrize("gigabytes", [0.01, 0.03, 0.04, 0.06, 0.2, 0.5, 2])
def test_changes_make_a_run_fit_and_each_is_needed(gigabytes):
    device = Device(operations=1e12, read=1e12, memory=gigabytes * 1e9)

    def load_changed(changes):
        return config(*ONE_DEVICE, *changes)

    def fits(changes):
        try:
            return not list(find_misfits(MODEL, load_changed(changes), device))
        except ConfigError:  # one change may need another
            return False

    changes = find_changes(MODEL, load_changed, device)
    if gigabytes == 0.01:
        assert changes is None, "its weights alone are too large"
        return
    assert fits(changes) and bool(changes) != fits([])
    for change in changes:
        assert not fits([other for other in changes if other != change])


@pytest.mark.parametrize(("kind", "found"), [("torch", True), ("megatron", False)])  # which has no such moments
def test_changes_that_are_not_valid_are_not_proposed(kind, found):
    device = Device(operations=1e12, read=1e12, memory=0.03e9)
    given = [*ONE_DEVICE, f"learner.kind={kind}"]
    changes = find_changes(MODEL, lambda changes: config(*given, *changes), device)
    assert (changes is not None and "learner.optimizer.moments=8bit" in changes) is found


@pytest.mark.reasoning_gym
def test_misfit_names_need_and_capacity():
    model, run = read_model_facts(config("learner.mesh={shard: 4}")), config("learner.gradient_checkpointing=false")
    lines = list(find_misfits(model, run, DEVICES["h100"]))
    need = device_memory(model, run, DEVICES["h100"])["learner, all"] / 2**30
    assert f"each learner rank: needs {need:,.0f} GiB, and there are 75" in lines


def test_ranks_of_a_backend_alone_load_all_of_the_model():
    kinds = ("torch", "deepspeed")
    need = [transient_memory(MODEL, config("learner.mesh={shard: 4}", f"learner.kind={kind}")) for kind in kinds]
    assert [of.get("each learner rank, as it loads the model") for of in need] == [None, 4 * 1_800_000]


def test_publishing_needs_one_tensor_beside_the_shares():
    passing = "each learner rank, as it publishes or saves"
    shares, largest, whole = 3 * 4 * 450_000, 4 * 1_000_000, 4 * 1_800_000
    assert transient_memory(MODEL, config("learner.mesh={shard: 4}"))[passing] == shares + 2 * largest
    there = config("learner.mesh={shard: 4}", "weights.channel=device_memory")
    assert transient_memory(MODEL, there)[passing] == shares + 2 * largest + whole


def test_more_devices_are_faster_until_they_wait_for_each_other():
    def speeds(*overrides, device=DEVICES["h100"]):
        return estimate(config(*overrides), MODEL, device)

    one, two = speeds(), speeds("engine.options={tensor_parallel_size: 2}")
    assert one.engine.prefill / 2 < two.engine.prefill
    assert two.engine.per_token == one.engine.per_token / 2
    without = Device(operations=989e12, read=1e12)
    ranks = [speeds(f"learner.mesh={{shard: {n}}}", device=without).learner.per_token for n in (1, 4)]
    assert ranks[0] == pytest.approx(4 * ranks[1])
    small = speeds("learner.mesh={shard: 16}", "learner.tokens_per_pack=64")
    assert small.learner.per_token > 2 * ranks[0] / 16, "gathering takes longer than computing so little"
    bubble = speeds("learner.mesh={pipeline: 2}", device=without).learner.per_token
    packs = 64 * 8 * (15 + 4096) / 16384
    assert bubble == pytest.approx(ranks[0] / 2 * (1 + 1 / packs))


def test_models_on_meshes_of_their_own_are_planned_so():
    given = ["learner.mesh={shard: 4}", "algorithm={kl: {coefficient: 0.1}}", "placement.reference=with learner"]
    alike, apart = config(*given), config(*given, "meshes.reference={shard: 2}")
    held = 4 * 1_800_000
    assert learner_memory(MODEL, alike)["reference"] == held // 4
    assert learner_memory(MODEL, apart)["reference"] == held // 2, "on some of the learner's devices"
    alone = config("algorithm=ppo", "critic={count: 1}", "learner.mesh={shard: 4}", "meshes.critic={}")
    need = device_memory(MODEL, alone, SMALL)["each critic rank"]
    assert need > 4 * held
    small = Device(operations=1e12, read=1e12, memory=need - 1, link=1e11, network=1e10)
    assert any(line.startswith("each critic rank: needs") for line in find_misfits(MODEL, alone, small))


@pytest.mark.reasoning_gym
def test_plan_refuses_a_mesh_that_cannot_divide_the_model():
    with raises_with(ConfigError, key="learner.mesh.expert"):
        read_model_facts(config("learner.mesh={shard: 2, expert: 2}"))
    with raises_with(ConfigError, key="learner.mesh.tensor"):
        read_model_facts(config("learner.mesh={tensor: 3}", recipe="moe_235b_1024gpu"))


def test_a_published_device_is_named_or_the_others_are():
    with raises_with(ConfigError, key="--device", value="h1000", valid=tuple(DEVICES)):
        find_device("h1000")


@pytest.mark.parametrize(
    ("recipe", "override", "key"),
    [
        ("dense_32b_64gpu", "engine.replicas=20", "placement.engine"),
        ("dense_7b_8gpu", "placement={learner: 'cpu:0-3', engine: with learner}", "placement.engine"),
        ("dense_32b_64gpu", "weights.host=127.0.0.1", "weights.host"),
        ("dense_32b_64gpu", "placement.engine=gpu:22-61", "placement.engine"),
    ],
)
def test_placement_is_resolved_on_absent_devices(recipe, override, key):
    with raises_with(ConfigError, key=key):
        resolve_on_devices(config(override, recipe=recipe), "h100")


def test_engines_of_vllm_take_turns_with_what_trains_on_gpus():
    found = resolve_on_devices(config("placement.engine=gpu:0-3"), "h100")
    assert found.time_shared["engine"] == {0, 1, 2, 3}


@pytest.mark.reasoning_gym
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_for_clusters_can_be_planned(recipe):
    run = config(recipe=recipe)
    gpus = int(re.search(r"_(\d+)gpu", recipe).group(1))
    device = DEVICES["h200" if gpus == 1024 else "h100"]
    placement = resolve_on_devices(run, "h100")
    used = {
        (place.node, gpu) for role in ("learner", "engine") for place in placement.places[role] for gpu in place.gpus
    }
    assert len(used) == gpus
    model = read_model_facts(run)
    assert list(find_misfits(model, run, device)) == []
    lent = len(placement.time_shared.get("engine", ()))
    assert lent == (8 if "colocated" in recipe else 0)
    small = run.model_copy(update={"rollout": run.rollout.model_copy(update={"groups_per_step": 8})})
    plan = predict(small, estimate(run, model, device, lent), lent=lent, attempts=0)
    assert plan.step_seconds > 0 and plan.ages[1] > 0.5


def antiphon(*arguments, cwd=ROOT):
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from antiphon.cli.app import main; main()"
    return warm.run("-c", script, *arguments, directory=cwd)


@pytest.mark.reasoning_gym
def test_model_without_weights_can_be_planned_not_trained(tmp_path):
    path = str(RECIPES["dense_7b_8gpu"])
    dry = antiphon("train", path, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "Memory for 7,615,616,512 parameters" in dry.stdout
    small = json.loads((CLUSTERS / "qwen2.5-7b" / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(small))
    (tmp_path / "tokenizer.json").write_text((CLUSTERS / "qwen2.5-7b" / "tokenizer.json").read_text())
    changes = (f"model.path={tmp_path}", "rollout.groups_per_step=2", "learner.tokens_per_pack=8388608")
    changes = (*changes, "learner.dtype=auto")
    plan = antiphon("plan", path, *changes, "--device", "h100")
    assert plan.returncode == 0, plan.stderr
    assert "learner.dtype: auto is bfloat16" in plan.stdout
    assert "seconds a step" in plan.stdout and "memory of each h100" in plan.stdout
    assert re.search(r"does not fit: each learner rank: needs [\d,]+ GiB, and there are 75", plan.stdout)
    assert "fits with: learner.tokens_per_pack=" in plan.stdout
    train = antiphon("train", path, f"model.path={tmp_path}", cwd=tmp_path)
    assert train.returncode == 2
    assert "has a config.json and no weights (*.safetensors)" in train.stderr and "Traceback" not in train.stderr
    assert not (tmp_path / "runs").exists()

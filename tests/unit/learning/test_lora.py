"""Adapters: what is trained, what travels, what is kept."""

from contextlib import suppress

import bitsandbytes
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.errors import ConfigError, DataError, WeightsError
from antiphon.engines.native.weights import copy_weights
from antiphon.learning.config import CriticConfig, LearnerConfig, LoraConfig, OptimizerConfig
from antiphon.learning.data_samples import supervised_batch
from antiphon.learning.learner import SAVED
from antiphon.learning.model import lora
from antiphon.learning.model.quantized_base import is_quantized, round_base_to_nf4
from antiphon.learning.objectives.critic import CriticLearner
from antiphon.learning.packing import pack_samples
from antiphon.weights.base import TransferContext
from antiphon.weights.shared_memory import SharedMemory
from tests.raising import raises_with

from .conftest import SHAPE, make_learner, make_sample
from .test_learner import critic_batch, examples

LORA = LoraConfig(rank=2, alpha=8.0)


def trained(directory, steps=3, **config):
    learner = make_learner(directory, lora=LORA.model_copy(update=config))
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-2), 9)
    for _ in range(steps):
        learner.step(supervised_batch(examples(), 100))
    return learner


def saved(learner, place):
    told = []
    learner.emit = told.append
    place.mkdir()
    learner.save(place)
    while learner.advance():
        pass
    assert told == [SAVED]
    return place


def packs():
    return pack_samples([make_sample(np.random.default_rng(4), 12, number) for number in range(5)], 40)[1]


@pytest.fixture(scope="module")
def directories(model_directories, tmp_path_factory):
    """With a mixture, whose files have the experts one by one."""
    own = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    directory = str(tmp_path_factory.mktemp("mixture"))
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **own)).save_pretrained(directory)
    return model_directories | {"mixture": directory}


@pytest.mark.parametrize("model", ["tied llama", "qwen2", "qwen3", "mixture"])
def test_what_engines_receive_is_what_the_learner_has(model, directories, tmp_path):
    """Only adapters travel; a model that is given what arrives says what the learner says, and so does its checkpoint."""
    learner = trained(directories[model])
    update = learner.publish(1, TransferContext(tmp_path))
    assert all("lora" in place.name for place in update.manifest.tensors)
    engine = AutoModelForCausalLM.from_pretrained(directories[model])
    copy_weights(engine, SharedMemory.receive(update))
    place = saved(learner, tmp_path / "step")
    loaded = AutoModelForCausalLM.from_pretrained(place)
    base = AutoModelForCausalLM.from_pretrained(directories[model])
    adapted = PeftModel.from_pretrained(base, place / "adapter")
    for pack, ours, before in zip(packs(), learner.predict(packs()), learner.predict_base(packs()), strict=True):
        theirs = [said_by(pack, other) for other in (engine, loaded, adapted)]
        for found in theirs:
            np.testing.assert_allclose(ours, found, atol=2e-5)
        assert np.abs(ours - before).max() > 1e-3
        with adapted.disable_adapter():
            np.testing.assert_allclose(before, said_by(pack, adapted), atol=2e-5)


def said_by(pack, model):
    """Log-probs of the loss tokens, sequence by sequence."""
    found, starts = np.zeros(len(pack.tokens), np.float32), np.concatenate([[0], np.cumsum(pack.lengths)])
    for piece, parent in enumerate(pack.parents):
        if piece in pack.parents:
            continue
        own = np.arange(starts[piece], starts[piece + 1])
        path = own if parent < 0 else np.concatenate([np.arange(starts[parent], starts[parent + 1]), own])
        tokens = torch.from_numpy(pack.tokens[path])[None].long()
        with torch.no_grad():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        values = logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
        mask = pack.loss_mask[path][1:]
        found[path[1:][mask]] = values[mask]
    return found


def test_nothing_else_is_trained(model_directories):
    learner, base = trained(model_directories["llama"], targets=("q_proj",)), make_learner(model_directories["llama"])
    assert sum(p.numel() for p in learner.model.parameters() if p.requires_grad) == 2 * 2 * (32 + 32)
    before = dict(base.model.named_parameters())
    for name, parameter in learner.model.named_parameters():
        with suppress(KeyError):
            assert torch.equal(parameter, before[name.replace(".base_layer", "")])


def test_before_the_first_step_nothing_has_changed(model_directories):
    learner, plain = trained(model_directories["llama"], steps=0), make_learner(model_directories["llama"])
    for ours, theirs in zip(learner.predict(packs()), plain.predict(packs()), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_restored_learner_goes_on_to_the_bit(model_directories, tmp_path):
    learner = trained(model_directories["llama"])
    place = saved(learner, tmp_path / "step")
    other = trained(model_directories["llama"], steps=0)
    other.restore(place)
    metrics = [each.step(supervised_batch(examples(7), 100)) for each in (learner, other)]
    ours, theirs = ({name: value for name, value in m.items() if name != "seconds"} for m in metrics)
    assert ours == theirs
    for ours, theirs in zip(learner.predict(packs()), other.predict(packs()), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_critic_with_adapters_learns_its_head_too(model_directories, tmp_path):
    critic = CriticConfig(optimizer={"learning_rate": 1e-2})
    learners = [CriticLearner(str(model_directories["qwen3"]), LearnerConfig(lora=LORA), n, critic) for n in range(2)]
    for learner in learners:
        learner.begin(AlgorithmConfig(), critic.optimizer, 9)
    for _ in range(3):
        learners[0].step(critic_batch())
    learners[1].restore(saved(learners[0], tmp_path / "step"))
    (pack,) = critic_batch().updates[0].packs[0]
    scored = [learner.predict([pack])[0] for learner in learners]
    assert np.abs(scored[0]).max() > 0 and (scored[0] == scored[1]).all()


def test_what_cannot_be_adapted_is_said(model_directories, tmp_path):
    with raises_with(ConfigError, key="learner.lora.targets", value=("q_prj",)):
        trained(model_directories["llama"], targets=("q_prj",))
    learner = trained(model_directories["llama"])
    place = saved(learner, tmp_path / "step")
    with raises_with(DataError, match="lora_A", path=place):
        trained(model_directories["llama"], steps=0, rank=3).restore(place)
    update = learner.publish(1, TransferContext(tmp_path))
    object.__setattr__(update.manifest.adapters, "base", str(tmp_path / "none"))  # a directory without weights
    with pytest.raises(WeightsError) as caught:
        dict(SharedMemory.receive(update))
    assert caught.value.tensor.startswith("model.layers.0.")


def linear_dtypes(model):
    """Of the weights of linear layers that are frozen."""
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return {module.weight.dtype for module in linear if not module.weight.requires_grad}


@pytest.fixture(scope="module")
def rounded(directories, tmp_path_factory):
    """Models whose files are in bfloat16, as published ones are."""
    found = {}
    for name in ("llama", "tied llama", "mixture"):
        found[name] = str(tmp_path_factory.mktemp("rounded"))
        AutoModelForCausalLM.from_pretrained(directories[name]).bfloat16().save_pretrained(found[name])
    return found


@pytest.mark.parametrize("model", ["llama", "tied llama", "mixture"])
def test_a_base_in_half_of_the_memory_changes_no_result(model, rounded, tmp_path):
    def open_learner():
        learner = make_learner(rounded[model], lora=LORA, dtype="bfloat16")
        learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-2), 9)
        return learner

    learner, whole = open_learner(), open_learner()
    assert linear_dtypes(learner.model) == {torch.bfloat16} | ({torch.float32} if model == "tied llama" else set())
    assert learner.model.get_input_embeddings().weight.dtype == torch.float32
    whole.model.float()
    steps = [[each.step(supervised_batch(examples(), 100)) for _ in range(3)] for each in (learner, whole)]
    for ours, theirs in zip(*steps, strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
    for ours, theirs in zip(learner.predict_base(packs()), whole.predict_base(packs()), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    places = [saved(each, tmp_path / name) for each, name in ((learner, "ours"), (whole, "theirs"))]
    ours, theirs = (load_file(place / "model.safetensors") for place in places)
    assert ours.keys() == theirs.keys() and all(ours[name].dtype == theirs[name].dtype for name in theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_base_that_bfloat16_would_round_stays_as_it_is(model_directories):
    assert linear_dtypes(make_learner(model_directories["llama"], lora=LORA, dtype="bfloat16").model) == {torch.float32}


# --- a base of four bits -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose matrices fill blocks of 64, with a head of its own."""
    torch.manual_seed(7)
    directory = tmp_path_factory.mktemp("wide")
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"hidden_size": 64, "intermediate_size": 128})).save_pretrained(directory)
    return directory


def test_a_quantised_base_takes_half_a_byte_and_comes_near(wide):
    plain, quantised = trained(wide, steps=0), trained(wide, steps=0, quantize="nf4")
    before, after = (dict(learner.model.named_parameters()) for learner in (plain, quantised))
    packed = [name for name in after if is_quantized(quantised.model, name)]
    assert len(packed) == 2 * 7 and all(after[name].nbytes * 2 == before[name].numel() for name in packed)
    for ours, theirs in zip(quantised.predict(packs()), plain.predict(packs()), strict=True):
        assert 1e-4 < np.abs(ours - theirs).max() < 0.2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_gradient_is_that_of_the_weights_that_it_stands_for(wide, dtype, tmp_path):
    """A model with these weights in its files learns the same, without quantisation."""
    quantised = make_learner(wide, dtype=dtype, lora=LORA.model_copy(update={"quantize": "nf4"}))
    state = AutoModelForCausalLM.from_pretrained(wide)
    for name, tensor in quantised.model.named_parameters():
        if is_quantized(quantised.model, name):
            state.get_parameter(lora.base_name(name)).data = bitsandbytes.functional.dequantize_4bit(
                tensor, tensor.quant_state
            )
    state.save_pretrained(tmp_path)
    plain = make_learner(tmp_path, dtype=dtype, lora=LORA)
    found = []
    for learner in (quantised, plain):
        learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-2), 9)
        found.append([learner.step(supervised_batch(examples(), 100))["loss"] for _ in range(5)])
    assert found[0] == pytest.approx(found[1], rel=1e-5 if dtype == "float32" else 1e-2)
    assert found[0][-1] < found[0][0] - 0.1


def test_its_checkpoint_has_the_weights_of_the_files(wide, tmp_path):
    """Engines have these, too: they are not quantised."""
    learner = trained(wide, quantize="nf4")
    place = saved(learner, tmp_path / "step")
    base = AutoModelForCausalLM.from_pretrained(wide)
    adapted = PeftModel.from_pretrained(base, place / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(place)
    for pack in packs():
        np.testing.assert_allclose(said_by(pack, loaded), said_by(pack, adapted), atol=2e-5)
    other = trained(wide, steps=0, quantize="nf4")
    other.restore(place)
    for ours, theirs in zip(learner.predict(packs()), other.predict(packs()), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rounded_base_stays_what_it_is(wide, dtype, tmp_path):
    """So that engines, which load the rounded files, sample from the model that is trained."""
    AutoModelForCausalLM.from_pretrained(wide).to(getattr(torch, dtype)).save_pretrained(tmp_path / "files")
    round_base_to_nf4(str(tmp_path / "files"), tmp_path / "rounded")
    files, rounded = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("files", "rounded")
    )
    apart = [not torch.equal(a, b) for a, b in zip(files.parameters(), rounded.parameters(), strict=True)]
    assert rounded.dtype == getattr(torch, dtype) and sum(apart) == 2 * 7
    learner = make_learner(tmp_path / "rounded", dtype=dtype, lora=LORA.model_copy(update={"quantize": "nf4"}))
    for name, weight in learner.model.named_parameters():
        if is_quantized(learner.model, name):
            held = bitsandbytes.functional.dequantize_4bit(weight, weight.quant_state)
            assert torch.equal(held.to(rounded.dtype), rounded.get_parameter(lora.base_name(name)))


def test_a_quantised_base_leaves_the_device_and_comes_back(wide):
    learner = trained(wide, quantize="nf4")
    before = learner.predict(packs())
    learner.offload()
    learner.reload()
    for ours, theirs in zip(learner.predict(packs()), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)

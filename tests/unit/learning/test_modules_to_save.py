"""Modules that are trained whole beside adapters, against peft."""

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.engines.native.weights import copy_weights
from antiphon.learning.config import OptimizerConfig
from antiphon.learning.data_samples import supervised_batch
from antiphon.learning.model import lora
from antiphon.weights.base import TransferContext
from antiphon.weights.shared_memory import SharedMemory
from tests.raising import raises_with

from .conftest import make_learner
from .test_learner import examples
from .test_lora import LORA, directories, packs, said_by, saved, trained

__all__ = ["directories"]

CASES = [
    ("llama", ("embed_tokens", "lm_head", "norm")),
    ("llama", ("layers.1.mlp", "input_layernorm")),
    ("tied llama", ("lm_head",)),
    ("mixture", ("embed_tokens", "q_norm")),
]


def as_peft_has_it(learner, directory) -> PeftModel:
    """peft's own model of these settings, with what the learner has trained."""
    trained_names = [name for name, parameter in learner.model.named_parameters() if parameter.requires_grad]
    beside = [name for name in trained_names if not lora.is_adapter(name)]
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(directory),
        PeftConfig(
            r=2,
            lora_alpha=8.0,
            target_modules=[
                name.removesuffix(".weight") for name in lora.adapter_pairs(learner.model.named_parameters())
            ],
            modules_to_save=sorted({name.rpartition(".")[0] for name in beside}),
            ensure_weight_tying="tied" in str(directory),
        ),
    )
    with torch.no_grad():
        for name in trained_names:
            model.get_parameter(in_peft(name)).copy_(learner.model.get_parameter(name))
    return model


def in_peft(name: str) -> str:
    """The name that peft has for a trained parameter: it copies modules that are to be saved."""
    module, _, own = name.rpartition(".")
    return (
        f"base_model.model.{name}"
        if lora.is_adapter(name)
        else f"base_model.model.{module}.modules_to_save.default.{own}"
    )


@pytest.mark.parametrize(("name", "modules"), CASES)
def test_engines_checkpoint_and_peft_have_what_was_trained(name, modules, directories, tmp_path):
    learner = trained(directories[name], modules_to_save=modules)
    engine = AutoModelForCausalLM.from_pretrained(directories[name])
    copy_weights(engine, SharedMemory.receive(learner.publish(1, TransferContext(tmp_path))))
    place = saved(learner, tmp_path / "step")
    base = AutoModelForCausalLM.from_pretrained(directories[name])
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), place / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(place)
    for pack, ours, before in zip(packs(), learner.predict(packs()), learner.predict_base(packs()), strict=True):
        for other in (engine, loaded, adapted):
            np.testing.assert_allclose(ours, said_by(pack, other), atol=2e-5)
        np.testing.assert_allclose(before, said_by(pack, base), atol=2e-5)
        assert np.abs(ours - before).max() > 1e-3


@pytest.mark.parametrize(("name", "modules"), CASES)
def test_the_gradient_is_that_of_peft(name, modules, directories):
    learner = trained(directories[name], steps=1, modules_to_save=modules)
    theirs = as_peft_has_it(learner, directories[name])
    ((pack,),) = [update.packs[0] for update in supervised_batch(examples(), 1000).updates]
    learner._backward(pack)
    for start, length in zip(np.cumsum(pack.lengths) - pack.lengths, pack.lengths, strict=True):
        here = slice(start, start + length)
        tokens = torch.from_numpy(pack.tokens[here]).long()
        logprobs = theirs(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        (torch.from_numpy(pack.coefficients[here][1:]) * -logprobs).sum().backward()
    ours = {name: parameter.grad for name, parameter in learner.model.named_parameters() if parameter.requires_grad}
    for parameter, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs.get_parameter(in_peft(parameter)).grad, rtol=1e-4, atol=1e-6)
    assert len(ours) == sum(parameter.requires_grad for parameter in theirs.parameters())


def test_nothing_but_these_modules_and_adapters_is_trained(model_directories):
    modules = ("embed_tokens", "layers.0.mlp")
    base = make_learner(model_directories["llama"])
    learner = trained(model_directories["llama"], modules_to_save=modules)
    before, moved = dict(base.model.named_parameters()), set()
    for name, parameter in learner.model.named_parameters():
        if not lora.is_adapter(name) and not torch.equal(parameter, before[lora.base_name(name)]):
            moved.add(name)
    mlp = {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert moved == {"model.embed_tokens.weight", *mlp}
    assert {parameter.dtype for parameter in learner.model.parameters()} == {torch.float32}
    adapted = {*lora.adapter_pairs(learner.model.named_parameters())}
    assert not adapted & mlp and "model.layers.1.mlp.up_proj.weight" in adapted


@pytest.mark.parametrize(
    ("module", "count"), [("norm", 1), ("model.norm", 1), ("input_layernorm", 2), ("layers.1", 9), ("1.mlp", 3)]
)
def test_a_module_is_named_by_the_end_of_its_name(model_directories, module, count):
    learner = make_learner(model_directories["llama"], lora=LORA.model_copy(update={"modules_to_save": (module,)}))
    names = [name for name, p in learner.model.named_parameters() if p.requires_grad and not lora.is_adapter(name)]
    assert len(names) == count


def test_the_base_is_asked_without_a_trace(model_directories):
    """The reference has the modules as they were loaded; after it, the policy is the same to the bit."""
    learner = trained(model_directories["llama"], modules_to_save=("lm_head", "norm"))
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    learner.predict_base(packs())
    for parameter, old in zip(learner.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    learner.step(supervised_batch(examples(), 100))


def test_a_restored_learner_goes_on_to_the_bit(model_directories, tmp_path):
    def given(steps):
        return trained(model_directories["tied llama"], steps=steps, modules_to_save=("embed_tokens", "norm"))

    learner, other = given(3), given(0)
    other.restore(saved(learner, tmp_path / "step"))
    assert (
        other.step(supervised_batch(examples(7), 100))["loss"]
        == learner.step(supervised_batch(examples(7), 100))["loss"]
    )
    for method in ("predict", "predict_base"):
        for ours, theirs in zip(getattr(learner, method)(packs()), getattr(other, method)(packs()), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_engines_get_a_tied_weight_under_each_name_in_files(model_directories, tmp_path):
    """Some published files hold the head of a tied model, too."""
    AutoModelForCausalLM.from_pretrained(model_directories["tied llama"]).save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    state = load_file(file)
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, file, metadata={"format": "pt"})
    learner = trained(tmp_path / "base", modules_to_save=("embed_tokens",))
    weights = dict(SharedMemory.receive(learner.publish(1, TransferContext(tmp_path))))
    own = learner.model.get_input_embeddings().weight
    assert torch.equal(weights["lm_head.weight"], own) and torch.equal(weights["model.embed_tokens.weight"], own)


def test_halves_are_trained_in_single_precision(model_directories, tmp_path):
    AutoModelForCausalLM.from_pretrained(model_directories["llama"]).bfloat16().save_pretrained(tmp_path)
    learner = make_learner(tmp_path, lora=LORA.model_copy(update={"modules_to_save": ("lm_head",)}), dtype="bfloat16")
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-5), 9)
    dtypes = {name: parameter.dtype for name, parameter in learner.model.named_parameters()}
    assert dtypes["lm_head.weight"] == torch.float32 and torch.bfloat16 in dtypes.values()
    before = learner.head.detach().clone()
    learner.step(supervised_batch(examples(), 100))
    assert 0 < (learner.head - before).abs().max() < 1e-4  # less than a half near 0.02 can tell
    assert learner.optimizer.state[learner.head]["exp_avg"].dtype == torch.float32


def test_modules_that_cannot_be_saved_are_refused(directories):
    with raises_with(ConfigError, key="learner.lora.modules_to_save.1", value="embed"):
        trained(directories["llama"], modules_to_save=("norm", "embed"))
    with raises_with(
        UnsupportedError, key="learner.lora.modules_to_save", value="model.layers.0.mlp.experts.gate_up_proj"
    ):
        trained(directories["mixture"], modules_to_save=("experts",))


def test_frozen_weights_get_no_adapter(model_directories):
    modules = LORA.model_copy(update={"modules_to_save": ("norm", "input_layernorm")})
    learner = make_learner(model_directories["llama"], lora=modules, freeze=("model.layers.0.*", "*.k_proj.*"))
    names = {name for name, parameter in learner.model.named_parameters() if parameter.requires_grad}
    assert {"model.norm.weight", "model.layers.1.input_layernorm.weight"} < names
    assert not any("layers.0." in name or "k_proj" in name for name in names)
    assert {lora.base_name(name) for name in names if "q_proj" in name} == {"model.layers.1.self_attn.q_proj.weight"}
    with pytest.raises(ConfigError) as refused:
        make_learner(model_directories["llama"], lora=LORA, freeze=("model.layers.*",))
    assert refused.value.key == "learner.lora.targets"

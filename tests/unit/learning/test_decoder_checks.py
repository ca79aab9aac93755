"""Models whose sequences cannot lie end to end are refused; those that can are loaded without dropout."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, OPTConfig, OPTForCausalLM

from antiphon.core.decoder_checks import require_separable_sequences
from antiphon.core.errors import UnsupportedError
from antiphon.learning.data_samples import supervised_batch
from antiphon.learning.model.loading import load_model

from .conftest import SHAPE, make_learner
from .test_learner import examples

TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = {"vocab_size": 31, "n_embd": 32, "n_layer": 2, "n_head": 4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
MAMBA = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 1}


def build(kind: str, **options):
    config = AutoConfig.for_model(kind, **options)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("bloom", {"vocab_size": 31, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "attention function"),
        ("mamba2", MAMBA, "linear_attention"),
        ("lfm2", {**SHAPE, "layer_types": ["conv", "full_attention"]}, "conv"),
        ("qwen3_next", SHAPE, "linear_attention"),
        ("qwen3_5_text", SHAPE, "linear_attention"),
        ("granitemoehybrid", {**SHAPE, "mamba_n_heads": 8, "mamba_d_head": 8}, "linear_attention"),
        ("falcon_h1", SHAPE, "hybrid"),
        ("phi3", {**SHAPE, "rope_parameters": LONGROPE}, "longrope"),
        ("llama", {**SHAPE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_models_whose_sequences_would_mix_are_refused(kind, options, reason):
    with pytest.raises(UnsupportedError, match=reason):
        require_separable_sequences(build(kind, **TOKENS, **options))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, SHAPE) for kind in ("llama", "mistral", "qwen2", "phi3", "olmo2", "starcoder2")),
        *((kind, {**SHAPE, "head_dim": 8}) for kind in ("qwen3", "gemma2", "gemma3_text", "seed_oss")),
        ("mixtral", {**SHAPE, "num_local_experts": 4}),
        ("qwen3_moe", {**SHAPE, "num_experts": 4}),
        ("gpt2", GPT2),
    ],
)
def test_models_with_plain_attention_are_not(kind, options):
    require_separable_sequences(build(kind, **TOKENS, **options))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_learners_and_critics_refuse_them(tmp_path, device, kind):
    config = AutoConfig.for_model("lfm2", **SHAPE, **TOKENS, layer_types=["conv", "full_attention"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError):
        load_model(str(tmp_path), attention="sdpa", device=torch.device(device), kind=kind)


def test_a_model_with_dropout_says_the_same_twice(tmp_path):
    """Of gpt2, whose configuration has dropout by default: also while its layers are checkpointed."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **GPT2)).save_pretrained(tmp_path)
    learner = make_learner(tmp_path, gradient_checkpointing=True)
    assert learner.model.training
    ((packs,),) = [update.packs for update in supervised_batch(examples(3), 22).updates]
    for first, second in zip(learner.predict(list(packs)), learner.predict(list(packs)), strict=True):
        assert first.any() and (first == second).all()


def test_every_rate_of_dropout_is_zero(tmp_path):
    given = {"dropout": 0.1, "attention_dropout": 0.2, "layerdrop": 0.3, "activation_dropout": 0}
    config = OPTConfig(
        vocab_size=31,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        **given,
    )
    OPTForCausalLM(config).save_pretrained(tmp_path)
    for device in ("cpu", "meta"):
        model = load_model(str(tmp_path), attention="sdpa", device=torch.device(device))
        assert {getattr(model.config, name) for name in given} == {0}
        assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} <= {0}

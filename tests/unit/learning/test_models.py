"""Models of which the files are read tensor by tensor: what a rank of several begins with is what one rank loads."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ViTConfig,
)

from antiphon.core.errors import DataError, UnsupportedError
from antiphon.learning.config import LoraConfig
from antiphon.learning.model import lora
from antiphon.learning.model.loading import Checkpoint, build_on_meta, decoder_layers, head_weight, load_model
from antiphon.learning.model.memory_efficient_layers import use_memory_efficient_layers
from tests.raising import raises_with

SHAPE = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
MOE = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "tied qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
    "qwen3 mixture": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **MOE)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)),
}
CRITIC = {"kind": AutoModelForSequenceClassification, "num_labels": 1}


def saved(place, make, pieces="20KB", dtype=torch.bfloat16):
    torch.manual_seed(3)
    make().to(dtype).save_pretrained(place, max_shard_size=pieces)
    return str(place)


def loaded(path, device, **options):
    """A model, adapted, whose layers are lean, as a learner would have it; and what is drawn next."""
    torch.manual_seed(5)
    model = load_model(path, attention="sdpa", device=torch.device(device), **options)
    kind, config = type(model), model.config
    lora.add_adapters(model, LoraConfig(rank=2, targets=("q_proj", "o_proj")))
    use_memory_efficient_layers(model)
    return model, kind, config, torch.rand(3)


@pytest.mark.parametrize(
    ("model", "options"),
    [*((name, {}) for name in MODELS), ("llama", CRITIC), ("tied qwen3", CRITIC)],
    ids=lambda value: value if isinstance(value, str) else "critic" if value else "policy",
)
def test_a_model_without_memory_is_filled_to_what_one_loads(tmp_path, model, options):
    path = saved(tmp_path, MODELS[model])
    alone, _, _, drawn = loaded(path, "cpu", **options)
    empty, kind, config, next_drawn = loaded(path, "meta", **options)
    files = Checkpoint(path, kind, config)
    torch.testing.assert_close(next_drawn, drawn, rtol=0, atol=0)
    theirs = dict(empty.named_parameters())
    assert list(theirs) == list(dict(alone.named_parameters()))
    assert {name for name, p in theirs.items() if not p.is_meta} == {
        name for name in theirs if "lora_" in name or name == "score.weight"
    }
    for name, expected in alone.named_parameters():
        found = files[lora.base_name(name)].float() if theirs[name].is_meta else theirs[name]
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0)
        assert theirs[name].requires_grad == expected.requires_grad
    for name, expected in alone.named_buffers():
        torch.testing.assert_close(empty.get_buffer(name), expected, rtol=0, atol=0)
    ours, others = ([n for n, module in of.named_modules() if "forward" in vars(module)] for of in (alone, empty))
    assert ours == others != []


def test_a_fused_tensor_becomes_several_parameters(tmp_path):
    def fused():  # its files have query, key, value and gate in one tensor
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("hrm_text", **SHAPE))

    path = saved(tmp_path, fused, dtype=torch.float32)
    empty = load_model(path, attention="sdpa", device=torch.device("meta"))
    files = Checkpoint(path, type(empty), empty.config)
    theirs = AutoModelForCausalLM.from_pretrained(path).named_parameters()
    assert not files.incompatibilities
    for name, expected in theirs:
        torch.testing.assert_close(files[name], expected.detach(), rtol=0, atol=0)


def test_what_is_tied_and_differs_in_the_files_is_two(tmp_path):
    untied = saved(tmp_path, lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False)))
    empty = load_model(untied, attention="sdpa", device=torch.device("meta"), tie_word_embeddings=True)
    alone = load_model(untied, attention="sdpa", device=torch.device("cpu"), tie_word_embeddings=True)
    for model in (empty, alone):
        assert model.lm_head.weight is not model.model.embed_tokens.weight
        assert "lm_head.weight" in dict(model.named_parameters())
    files = Checkpoint(untied, type(empty), empty.config)
    torch.testing.assert_close(files["lm_head.weight"].float(), alone.lm_head.weight.detach(), rtol=0, atol=0)


def test_what_cannot_be_read_is_said(tmp_path):
    path = saved(tmp_path / "whole", MODELS["llama"], pieces="1GB")
    config = LlamaConfig.from_pretrained(path)
    assert Checkpoint(path, LlamaForCausalLM, config).incompatibilities == []
    config.num_hidden_layers = 1
    smaller = Checkpoint(path, LlamaForCausalLM, config)
    assert smaller.incompatibilities[0] == "model.layers.1.input_layernorm.weight"
    assert {*smaller} == {*LlamaForCausalLM(config).state_dict()}, "what the model lacks is in no parameter"
    config.num_hidden_layers = 3
    assert Checkpoint(path, LlamaForCausalLM, config).incompatibilities[0] == "model.layers.2.input_layernorm.weight"
    config.intermediate_size = 40
    with raises_with(DataError, match=r"up_proj\.weight", path=path):
        Checkpoint(path, LlamaForCausalLM, config)["model.layers.0.mlp.up_proj.weight"]
    file = tmp_path / "whole" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with raises_with(DataError, path=path):
        load_model(path, attention="sdpa", device=torch.device("meta"))
    torch.save(AutoModelForCausalLM.from_config(config).state_dict(), file.with_name("pytorch_model.bin"))
    file.unlink()
    with raises_with(DataError, match="save_pretrained", path=path):
        load_model(path, attention="sdpa", device=torch.device("meta"))
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(path)
    with pytest.raises(UnsupportedError, match="quantized"):
        load_model(path, attention="sdpa", device=torch.device("meta"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_is_no_decoder_is_refused(tmp_path, device):
    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="cannot be a AutoModelForCausalLM"):
        load_model(str(tmp_path), attention="sdpa", device=torch.device(device))


def test_code_beside_a_model_is_not_run(tmp_path):
    """Not even if the model is of a kind that transformers has: others offer a checkpoint, and its code would run here."""
    place, ran = tmp_path / "model", tmp_path / "ran"
    path = saved(place, MODELS["llama"])
    (place / "evil.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\nraise OSError('no model')\n")
    config = json.loads((place / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (place / "config.json").write_text(json.dumps(config))
    trusting = (
        "from transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({path!r}, trust_remote_code=True)"
    )
    cache = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-c", trusting], env=cache, capture_output=True, check=False)
    ran.unlink()  # so it would
    for device in ("cpu", "meta"):
        load_model(path, attention="sdpa", device=torch.device(device))
    build_on_meta(place)
    assert not ran.exists()


def test_heads_that_do_more_than_a_product_are_refused():
    model = MODELS["llama"]()
    assert head_weight(model) is model.lm_head.weight
    model.config.logits_scaling = 1.0
    assert head_weight(model) is model.lm_head.weight
    model.config.logits_scaling = 2.0
    with pytest.raises(UnsupportedError, match="logits_scaling"):
        head_weight(model)
    model.config.logits_scaling = None
    model.lm_head = torch.nn.Linear(32, 131, bias=True)
    with pytest.raises(UnsupportedError, match="bias"):
        head_weight(model)


def test_layers_are_those_of_the_decoder():
    model = MODELS["llama"]()
    assert decoder_layers(model) is model.model.layers
    model.model.layers = None
    with pytest.raises(UnsupportedError, match="layers"):
        decoder_layers(model)

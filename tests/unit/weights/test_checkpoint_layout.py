"""What an update is to who reads files: of the model's own files, whatever else lies in its directory."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from antiphon.core.errors import WeightsError
from antiphon.weights.adapters import apply_adapters, flatten_adapters
from antiphon.weights.checkpoint_files import list_weight_files
from antiphon.weights.checkpoint_layout import CheckpointLayout
from antiphon.weights.manifest import Adapters
from tests.raising import raises_with

SHAPE = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
QUERIES = "model.layers.0.self_attn.q_proj.weight"


def saved(place, tied, **options):
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    model.save_pretrained(place, **options)
    return dict(model.named_parameters())


def adapted(place):
    pair = torch.ones(2, 32), torch.ones(32, 2)
    return dict(apply_adapters(flatten_adapters({QUERIES: pair}), Adapters(str(place), 1.0)))


@pytest.mark.parametrize("pieces", ["20KB", "1GB"])
def test_other_copies_of_the_weights_are_passed_over(tmp_path, pieces):
    """Some who publish a model put its weights beside it once more, as other programs name them."""
    weights = saved(tmp_path, tied=False, max_shard_size=pieces)
    save_file({"layers.0.attention.wq.weight": torch.zeros(32, 32)}, tmp_path / "consolidated.safetensors")
    assert (len(list_weight_files(tmp_path)) > 1) == (pieces == "20KB")
    CheckpointLayout(tmp_path, tied=False).validate(weights, 1)
    assert adapted(tmp_path).keys() == weights.keys()
    with raises_with(WeightsError, tensor="lm_head.weight", version=1):
        CheckpointLayout(tmp_path, tied=False).validate({n: w for n, w in weights.items() if n != "lm_head.weight"}, 1)


def test_tied_head_in_the_files_is_not_part_of_an_update(tmp_path):
    weights = saved(tmp_path, tied=True)
    assert "lm_head.weight" not in weights
    (file,) = list_weight_files(tmp_path)
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].detach().clone()}
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    layout, sent = CheckpointLayout(tmp_path, tied=True), adapted(tmp_path)
    assert "lm_head.weight" in sent
    for update in (weights, sent):
        layout.validate(update, 1)
        assert dict(layout.convert(update)).keys() == weights.keys()


def test_adapters_are_added_to_their_base_to_scale(tmp_path):
    weights = {name: weight.detach() for name, weight in saved(tmp_path, tied=False).items()}
    a, b = torch.randn(2, 32), torch.randn(32, 2)
    found = dict(apply_adapters(flatten_adapters({QUERIES: (a, b)}), Adapters(str(tmp_path), 0.5)))
    assert found.keys() == weights.keys()
    assert torch.allclose(found.pop(QUERIES), weights[QUERIES] + 0.5 * (b @ a), atol=1e-6)
    assert all(torch.equal(weight, weights[name]) for name, weight in found.items())
    with raises_with(WeightsError, tensor="another"):
        list(apply_adapters(flatten_adapters({"another": (a, b)}), Adapters(str(tmp_path), 0.5)))


def test_tensors_of_another_shape_or_name_are_no_update(tmp_path):
    weights = saved(tmp_path, tied=False)
    layout = CheckpointLayout(tmp_path, tied=False)
    for changed in ({QUERIES: torch.zeros(32, 31)}, {"another": torch.zeros(1)}):
        with raises_with(WeightsError, tensor=next(iter(changed)), version=1):
            layout.validate(weights | changed, 1)

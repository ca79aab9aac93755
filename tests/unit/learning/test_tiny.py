"""The tiny model is a whole Llama: what its sizes say is what is in the file, and what transformers makes of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from antiphon.learning.model.tiny import make_tokenizer, write_tiny_model

CHARACTERS = "0123456789+= "


def parameters_of(vocabulary, hidden, layers):
    """Of a Llama without biases: embedding and head; a layer's four square projections, three of the feed-forward and two
    norms; a norm at the end."""
    return 2 * vocabulary * hidden + layers * (4 * hidden**2 + 3 * hidden * 3 * hidden + 2 * hidden) + hidden


@pytest.mark.parametrize(("hidden", "layers", "length"), [(8, 1, 7), (32, 3, 200)])
def test_a_tiny_model_is_read_and_run_by_transformers(tmp_path, hidden, layers, length):
    write_tiny_model(tmp_path, 0, make_tokenizer(CHARACTERS), hidden_size=hidden, layers=layers, max_length=length)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert sum(each.numel() for each in model.parameters()) == parameters_of(len(CHARACTERS) + 2, hidden, layers)
    assert model.config.max_position_embeddings == length
    tokens = tokenizer("12+34=46", return_tensors="pt").input_ids
    assert tokenizer.decode(tokens[0]) == "12+34=46"
    with torch.no_grad():
        assert model(tokens).logits.shape == (1, 8, len(CHARACTERS) + 2)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)


def test_equal_seeds_give_equal_weights_and_others_do_not(tmp_path):
    state = torch.random.get_rng_state()
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        write_tiny_model(tmp_path / name, seed, make_tokenizer(CHARACTERS))
    assert torch.equal(state, torch.random.get_rng_state()), "the caller's random numbers go on as they were"
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "same", "other"))
    assert one == same != other
    # As long as the text of a small recipe, where nothing else is asked for.
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").config.max_position_embeddings >= 32

"""Tiny models with random weights: they train in minutes on a CPU, and nothing has to be downloaded."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def write_tiny_model(
    directory: Path | str,
    seed: int,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    hidden_size: int = 128,
    layers: int = 4,
    max_length: int = 64,
) -> None:
    """Write a Llama decoder with four heads, in float32, and its tokenizer; equal seeds give equal weights.

    Args:
        directory: Where the model is written, in the format of Hugging Face.
        seed: Of the weights.
        tokenizer: With a token that ends a response and one that pads.
        hidden_size: Divisible by 8; the feed-forward layers have three times as many columns.
        layers: Number of decoder layers.
        max_length: Most tokens of a sequence.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_tokenizer(tokens: Iterable[str], pattern: str = ".") -> "PreTrainedTokenizerFast":
    """Return a tokenizer of the given tokens, `<eos>` and `<pad>`.

    Args:
        tokens: All tokens that texts may have.
        pattern: Regular expression of one token; by default each character is one.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *tokens])}
    reader = Tokenizer(models.WordLevel(vocabulary))
    reader.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    reader.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=reader, eos_token="<eos>", pad_token="<pad>")

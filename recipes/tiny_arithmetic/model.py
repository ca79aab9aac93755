"""A language model of 850,000 parameters, fresh from a seed, that reads and writes single characters."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+=,:"


def build(
    directory: Path | str,
    seed: int = 0,
    *,
    characters: Iterable[str] = CHARACTERS,
    pattern: str = ".",
    hidden_size: int = 128,
    layers: int = 4,
) -> None:
    """Write the model, in float32, and its tokenizer to `directory`; equal seeds give equal weights."""
    write(directory, seed, make_tokenizer(characters, pattern), hidden_size=hidden_size, layers=layers)


def write(
    directory: Path | str, seed: int, tokenizer: Any, *, hidden_size: int = 128, layers: int = 4, longest: int = 64
) -> None:
    """The same for any tokenizer, and texts of up to `longest` tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=longest,
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


def make_tokenizer(characters: Iterable[str] = CHARACTERS, pattern: str = ".") -> Any:
    """One token a character, or whatever else `pattern` finds in a text; one that ends a response, one that pads."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *characters])}
    reader = Tokenizer(models.WordLevel(vocabulary))
    reader.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    reader.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=reader, eos_token="<eos>", pad_token="<pad>")

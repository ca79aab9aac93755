"""The model of tiny_arithmetic, for characters, the pieces of a tool call, and a chat template."""

import re
import string
from pathlib import Path
from typing import Any

from antiphon.learning.model.tiny import write_tiny_model

PIECES = ['<tool_call>\n{"name": "', "calculator", '", "arguments": {"expression": "', '"}}\n</tool_call>']
MARKS = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    '{% for call in message.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<eos>{% endfor %}'
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Of the tools it says nothing: there is one, and the warm start shows it."""


def build(directory: Path | str, seed: int = 0, *, template: str = TEMPLATE) -> None:
    """Write the model and its tokenizer to `directory`."""
    write_tiny_model(directory, seed, make_tokenizer(template), max_length=512)


def make_tokenizer(template: str = TEMPLATE) -> Any:
    """One token a character, a piece of a call, or a mark. What it reads as a piece can also be written in characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*MARKS, *PIECES, *string.printable])}
    reader = Tokenizer(models.WordLevel(vocabulary, "?"))
    pattern = "|".join([*map(re.escape, PIECES), r"[\s\S]"])
    reader.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    reader.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=reader, eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS[2:]})
    tokenizer.chat_template = template
    return tokenizer

"""The recipe's model with a chat template that writes history anew: a reply with a call is upper-cased and trimmed, and the
call gets other spaces, and its keys in another order."""

from pathlib import Path

from model import build as build_recipe  # the recipe's

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.tool_calls %}{{ message.content | upper | trim }}{% else %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson(indent=1, sort_keys=True) }}</tool_call>"
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build(directory: Path | str, seed: int = 0) -> None:
    """Write the model and its tokenizer to `directory`."""
    build_recipe(directory, seed, template=TEMPLATE)

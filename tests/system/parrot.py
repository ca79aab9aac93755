"""A model that says what it was built to say, and `antiphon serve` of it.

Its next token depends on the one before alone.
"""

import itertools
import signal
import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests import warm

CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "é"}}\n</tool_call>'
SAID = {"<|alphabet|>": [*string.ascii_lowercase], "<|tools|>": ["I will. ", CALL], "<|told|>": ["It is 42."]}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<eos>{% endfor %}"
    "{% if messages[-1].role == 'tool' %}<|told|>{% elif tools %}<|tools|>{% else %}<|alphabet|>{% endif %}"
)


def write_parrot(directory):
    """A model that begins with a mark and ends with <eos>, saying what is in `SAID`."""
    words = ["<eos>", *string.printable, *SAID, "I will. ", CALL, "It is 42."]
    characters = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "?"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*SAID]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    parrot = LlamaForCausalLM(config)
    with torch.no_grad():
        layer = parrot.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        parrot.model.embed_tokens.weight.copy_(torch.eye(128))
        parrot.lm_head.weight.zero_()
        for mark, said in SAID.items():
            path = [words.index(word) for word in (mark, *said, "<eos>")]
            for now, then in itertools.pairwise(path):
                parrot.lm_head.weight[then, now] = 5.0
    parrot.save_pretrained(directory)
    return directory


def serving(directory, folder):
    """Serve a model, with a token in a file of a folder; yields address and token."""
    token = folder / "token"
    token.write_text("open sesame".replace(" ", "-"))
    arguments = ["serve", str(directory), "port=0", "engine.slots=4", "engine.device=cpu", "--token-file", str(token)]
    process = warm.start("-m", "antiphon", *arguments)
    assert process.stdout is not None
    yield process.stdout.readline().strip(), "open-sesame"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stdout.close()
    process.stderr.close()

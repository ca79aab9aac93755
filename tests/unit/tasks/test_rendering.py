"""Rendering on a small tokenizer with a chat template, and against transformers' own on SmolLM2 where it is installed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from antiphon.core.errors import DataError
from antiphon.core.types import IntArray, Message
from antiphon.tasks.rendering import Renderer
from tests.raising import raises_with

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TALK = (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", " Yes? "))
MORE = Message("user", "No.")


def make(directory: Path, template: str | None, end: str | None = "<|end|>") -> Renderer:
    """A tokenizer of bytes, with marks as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=end)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return Renderer(directory)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return make(tmp_path_factory.mktemp("chat"), TEMPLATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return make(tmp_path_factory.mktemp("plain"), None)


def text(renderer: Renderer, tokens: IntArray) -> str:
    """With special tokens, unlike `decode`."""
    return str(renderer._tokenizer.decode(tokens.tolist()))


def test_a_prompt_ends_where_the_policy_begins(chat: Renderer) -> None:
    tokens = chat.encode_prompt(TALK[:2])
    assert tokens.dtype == np.int32
    assert text(chat, tokens) == "<|system|>Be brief.<|end|>\n<|user|>Hi<|end|>\n<|assistant|>"
    assert chat.decode(tokens) == "Be brief.\nHi\n"


def test_an_observation_is_what_the_template_adds(chat: Renderer) -> None:
    assert text(chat, chat.encode_observation(TALK, MORE)) == "\n<|user|>No.<|end|>\n<|assistant|>"
    unclosed = chat.encode_observation(TALK, MORE, closed=False)
    assert text(chat, unclosed) == "<|end|>\n<|user|>No.<|end|>\n<|assistant|>"


contents = st.text(st.sampled_from("ab \n.é"), max_size=6)


@given(st.lists(contents, min_size=3, max_size=7).filter(lambda said: len(said) % 2 == 1))
def test_prompt_turns_and_observations_equal_the_rendering(chat: Renderer, said: list[str]) -> None:
    """Appending equals rendering all at once, where the turns are what the template makes of them."""
    roles = ("user", "assistant")
    messages = [Message(roles[n % 2], content.strip()) for n, content in enumerate(said)]  # type: ignore[arg-type]
    tokens = [chat.encode_prompt(messages[:1])]
    for n in range(1, len(messages), 2):
        tokens.append(chat.encode_response(messages[n].content))
        tokens.append(chat.encode_observation(messages[: n + 1], messages[n + 1]))
    np.testing.assert_array_equal(np.concatenate(tokens), chat.encode_prompt(messages))


def test_what_was_said_does_not_change_what_follows(chat: Renderer) -> None:
    odd = Message("assistant", "<|end|>\n<|user|>  ANTIPHON")
    np.testing.assert_array_equal(chat.encode_observation([*TALK[:2], odd], MORE), chat.encode_observation(TALK, MORE))


def test_without_a_template_contents_are_laid_end_to_end(plain: Renderer) -> None:
    assert not plain.chat
    assert text(plain, plain.encode_prompt(TALK[:2])) == "Be brief.Hi"
    assert text(plain, plain.encode_observation(TALK, MORE)) == "No."


def test_a_written_response_ends_with_the_end_token(chat: Renderer) -> None:
    assert text(chat, chat.encode_response("82")) == "82<|end|>"


def test_a_response_needs_an_end_token(tmp_path: Path) -> None:
    endless = make(tmp_path, None, end=None)
    said = [Message("user", "1+1="), Message("assistant", "2")]
    for encode in (lambda: endless.encode_response("2"), lambda: endless.encode_prompt([*said, said[0]])):
        with raises_with(DataError, path=tmp_path, match="end-of-sequence"):
            encode()


def test_end_tokens_come_from_both_files(tmp_path: Path, chat: Renderer) -> None:
    (end,) = chat.eos_ids
    make(tmp_path, None)
    for listed, expected in (([3, 1], (1, 3, end)), (5, (5, end)), (None, (end,))):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {listed or "null"}}}')
        assert Renderer(tmp_path).eos_ids == expected


def test_a_template_that_forgets_is_refused(tmp_path: Path) -> None:
    forgetful = make(tmp_path, "{{ messages[-1].content }}")
    with raises_with(DataError, path=tmp_path):
        forgetful.encode_observation(TALK, MORE)
    with pytest.raises(ValueError, match="follows an assistant message"):
        forgetful.encode_observation(TALK[:2], MORE)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with raises_with(DataError, path=tmp_path / "tokenizer.json"):
        Renderer(tmp_path)


def test_rendering_imports_no_torch(chat: Renderer) -> None:
    program = f"""
import sys
from antiphon.tasks.rendering import Renderer
from antiphon.core.types import Message
renderer = Renderer({str(chat.directory)!r})
renderer.decode(renderer.encode_prompt([Message("user", "x")]))
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_text_outside_of_the_vocabulary_is_a_data_error(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, "<unknown>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path)
    narrow = Renderer(tmp_path)
    assert narrow.encode("a").tolist() == [0]
    for text in ("é", "\ud83d"):
        with pytest.raises(DataError):
            narrow.encode(text)

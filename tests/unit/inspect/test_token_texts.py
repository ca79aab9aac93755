"""Tokens as texts, one by one: the pieces are the whole text, and no character is broken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from antiphon.core.errors import RecordError
from antiphon.inspect.token_texts import TokenTexts


def byte_tokenizer():
    """A tokenizer of single bytes, as the fallback of byte-level vocabularies is."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({each: number for number, each in enumerate(alphabet)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return found


BYTES = byte_tokenizer()


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), max_size=40))
def test_pieces_are_the_whole_text(text):
    ids = BYTES.encode(text).ids
    pieces = TokenTexts(BYTES).split(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_last_token_of_a_character_has_it():
    assert TokenTexts(BYTES).split(BYTES.encode("aé€").ids) == ["a", "", "é", "", "", "€"]


@given(st.lists(st.integers(-5, 300), max_size=60))
def test_any_numbers_are_shown(ids):
    texts = TokenTexts(BYTES)
    assert len(texts.split(ids)) == len(ids)
    texts.decode(ids)


def test_run_without_tokenizer_is_named(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RecordError) as caught:
        TokenTexts.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(RecordError) as caught:
        TokenTexts.open(tmp_path)
    assert "tokenizer.json" in str(caught.value)

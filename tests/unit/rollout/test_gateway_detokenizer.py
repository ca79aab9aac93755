"""Text that is shown while it is made is never taken back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engines.deltas import Delta
from antiphon.rollout.gateway.incremental_detokenizer import IncrementalDetokenizer, cut_at_stop
from tests.unit.rollout.gateway_support import TEMPLATES, make

texts = st.text(st.sampled_from("abé€🙂 "), max_size=12)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chat"), TEMPLATES["plain"])


@given(
    texts, st.lists(st.text(st.sampled_from("abé"), min_size=1, max_size=3), max_size=2), st.lists(st.integers(1, 3))
)
def test_pieces_are_what_stands_in_the_end(renderer, text, stops, sizes):
    told = []
    unfolding = IncrementalDetokenizer(renderer, stops, told.append)
    tokens, at = renderer.encode(text), 0
    for size in [*sizes, len(tokens)]:
        unfolding(replace(Delta.empty("r"), tokens=tokens[at : at + size]))
        at += size
        assert cut_at_stop(text, stops)[0].startswith("".join(told))
    # Nothing is held back but what may be the beginning of a stop string.
    assert len(cut_at_stop(text, stops)[0]) - len("".join(told)) < max(map(len, stops), default=1)


def test_the_first_stop_string_ends_a_text():
    assert cut_at_stop("a END b STOP", ["STOP", "END"]) == ("a ", "END")
    assert cut_at_stop("a\n\nb", ["\n", "\n\n"]) == ("a", "\n\n")
    assert cut_at_stop("a", ["b"]) == ("a", None)

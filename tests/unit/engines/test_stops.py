"""Stops among several tokens that come at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.types import GenerateRequest, Sampling
from antiphon.engines.stops import StopRule, append_to_stop
from tests.unit.engines.test_native_engine import Letters

NO_TOKENS = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("stops", "before", "tokens", "appended"),
    [
        ({"stop_tokens": (3,)}, [1], [2, 3, 4, 3], (2, True)),
        ({"stop_tokens": (3,)}, [3], [1, 2], (2, False)),
        ({"stop": ("bcd",)}, [0, 1], [2, 3, 4, 5], (2, True)),
        ({"stop": ("bcd",)}, [0, 1, 2], [4, 3], (2, False)),
        ({"stop_tokens": (3,)}, [1], [], (0, False)),
        ({}, [1], [2, 3], (2, False)),
    ],
)
def test_tokens_after_a_stop_are_dropped(stops, before, tokens, appended):
    rule = StopRule.of(GenerateRequest(id="r", tokens=NO_TOKENS, sampling=Sampling(max_tokens=9, **stops)))
    sampled = list(before)
    assert append_to_stop(sampled, tokens, rule, Letters()) == appended
    assert sampled == before + tokens[: appended[0]]


@given(
    st.text("abc", min_size=1, max_size=4),
    st.lists(st.integers(0, 2), max_size=8),
    st.lists(st.integers(0, 2), max_size=8),
    st.integers(0, 8),
)
def test_a_stop_may_begin_in_what_another_engine_has_sampled(stop, prompt, tokens, moved):
    """Where a sequence ends does not depend on the engine that it moves to; text of the prompt begins no stop."""

    def ends(prompt, tokens, sampled):
        before = np.array([*prompt, *tokens[:sampled]], np.int32)
        request = GenerateRequest(id="r", tokens=before, sampling=Sampling(max_tokens=9, stop=(stop,)), sampled=sampled)
        return append_to_stop([], tokens[sampled:], StopRule.of(request), Letters())

    whole, stopped = ends(prompt, tokens, 0)
    moved = min(moved, whole - stopped)  # else it would have ended before
    assert ends(prompt, tokens, moved) == (whole - moved, stopped)

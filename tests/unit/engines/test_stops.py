"""Stops among several tokens that come at once."""

import pytest

from antiphon.core.types import GenerateRequest, Sampling
from antiphon.engines.stops import StopRule, append_to_stop
from tests.unit.engines.test_native_engine import Letters


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
    rule = StopRule.of(GenerateRequest(id="r", tokens=None, sampling=Sampling(max_tokens=9, **stops)))
    sampled = list(before)
    assert append_to_stop(sampled, tokens, rule, Letters()) == appended
    assert sampled == before + tokens[: appended[0]]

"""What a configuration of rollouts means for freshness, and which settings contradict one another."""

from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from antiphon.rollout.config import RolloutConfig

LEAST = {"groups_per_step": 4, "group_size": 2, "sampling": {"max_tokens": 8}}


@given(st.integers(1, 64), st.integers(0, 40), st.integers(0, 5))
def test_slots_and_ages_follow_from_the_ratio(groups, tenths, extra):
    config = RolloutConfig(**LEAST | {"groups_per_step": groups, "async_ratio": tenths / 10, "extra_groups": extra})
    ratio = Fraction(tenths, 10)
    assert config.capacity == ceil((1 + ratio) * groups) + extra
    assert config.max_age == ceil(ratio)
    part = ratio - floor(ratio)
    assert config.max_oldest == (ceil(part * groups) if part else groups)


TAIL = {"policy": "tail_batching", "async_ratio": 0.0, "extra_groups": 2, "order": "ready"}
ONE_STEP_OFF = {"policy": "one_step_off", "async_ratio": 1.0}
BATCH = {"policy": "batch", "async_ratio": 0.0}
POSSIBLE = (
    {},
    {"redundancy": 1, "order": "ready", "extra_groups": 2},
    {"history": 0, "samples": "turn"},
    {"history": 3, "samples": "joined"},
    {"sampler": "my:sampler", "order": "ready"},
    {"deterministic": True},
    {"deterministic": True, "extra_groups": 1},
    BATCH,
    ONE_STEP_OFF,
    TAIL,
    TAIL | {"redundancy": 1},
)


@pytest.mark.parametrize("changes", POSSIBLE)
def test_these_go_together(changes):
    config = RolloutConfig(**LEAST | changes)
    assert config.in_rounds == ("policy" in changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"history": 0}, "history"),
        ({"history": 2, "samples": "trajectory"}, "history"),
        ({"sampler": "my:sampler", "redundancy": 1}, "redundancy"),
        ({"deterministic": True, "order": "ready"}, "deterministic"),
        ({"deterministic": True, "redundancy": 1}, "deterministic"),
        *(({**policy, "redundancy": 1}, "redundancy") for policy in (BATCH, ONE_STEP_OFF)),
        *(({**policy, "async_ratio": 0.5}, "async_ratio") for policy in (BATCH, ONE_STEP_OFF, TAIL)),
        (BATCH | {"async_ratio": 1.0}, "async_ratio"),
        (ONE_STEP_OFF | {"async_ratio": 0.0}, "async_ratio"),
        (ONE_STEP_OFF | {"extra_groups": 1}, "extra_groups"),
        (TAIL | {"extra_groups": 0}, "policy"),
        (TAIL | {"order": "fifo"}, "policy"),
    ],
)
def test_these_contradict_one_another(changes, key):
    with pytest.raises(ValidationError) as refused:
        RolloutConfig(**LEAST | changes)
    assert [mistake.key for mistake in refused.value.errors()[0]["ctx"]["error"].mistakes] == [key]

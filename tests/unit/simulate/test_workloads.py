"""Distributions have the mean they are asked for, keep their bounds, and answer by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from antiphon.simulate.workloads import DistributionConfig

KINDS = {
    "constant": {},
    "uniform": {"spread": 5.0},
    "normal": {"spread": 2.0},
    "lognormal": {"spread": 1.0},
    "pareto": {"spread": 3.0},
    "trace": {"values": (1.0, 1.0, 4.0)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_mean(kind):
    distribution = DistributionConfig(kind=kind, mean=10.0, **KINDS[kind])
    shares = (np.arange(60_000) + 0.5) / 60_000
    numbers = [distribution.quantile(share) for share in shares.tolist()]
    assert numbers == sorted(numbers)
    assert np.mean(numbers) == pytest.approx(10.0, rel=5e-3)


@given(st.sampled_from(sorted(KINDS)), st.integers(0, 2**62), st.integers(), st.floats(0, 9), st.floats(10, 30))
def test_a_draw_depends_on_its_name_alone_and_keeps_the_bounds(kind, seed, name, minimum, maximum):
    distribution = DistributionConfig(kind=kind, mean=10.0, minimum=minimum, maximum=maximum, **KINDS[kind])
    assert distribution.draw(seed, name) == distribution.draw(seed, name)
    assert minimum <= distribution.draw(seed, name) <= maximum


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "trace"}, "a trace needs values"),
        ({"kind": "pareto", "spread": 1.0}, "above 1"),
        ({"minimum": 2.0, "maximum": 1.0}, "minimum 2 is above maximum 1"),
    ],
)
def test_what_is_no_distribution_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        DistributionConfig(**settings)

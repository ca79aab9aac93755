"""Named random streams."""

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core import rng as seeds

NAMES = st.lists(st.text(max_size=8) | st.integers(0, 99), min_size=1, max_size=4)
SEED = st.integers(0, 2**63 - 1)


@given(SEED, NAMES)
def test_a_stream_is_a_function_of_its_name(seed, names):
    assert seeds.derive(seed, *names) == seeds.derive(seed, *names)
    first, second = seeds.generator(seed, *names), seeds.generator(seed, *names)
    assert first.integers(0, 2**31, 5).tolist() == second.integers(0, 2**31, 5).tolist()


@given(SEED, NAMES)
def test_seeds_fit_what_takes_them(seed, names):
    assert 0 <= seeds.derive(seed, *names) < 2**63


def test_streams_do_not_meet():
    streams = {
        seeds.derive(seed, name, index) for seed in range(10) for name in ("prompt", "engine") for index in range(50)
    }
    assert len(streams) == 1000


def test_names_are_separate_parts():
    assert seeds.derive(0, "a", "b") != seeds.derive(0, "ab")
    assert seeds.derive(0, 1, 2) != seeds.derive(0, 12)


def test_values_never_change():
    # A run that is resumed on another machine, or after an upgrade, must draw the same.
    assert seeds.derive(0, "shuffle", 1) == 5_233_177_926_832_954_135
    assert seeds.generator(7, "x").integers(0, 1000, 3).tolist() == [450, 217, 649]

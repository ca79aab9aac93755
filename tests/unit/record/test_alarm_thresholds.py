"""Alarms for reward hacking."""

import pytest

from antiphon.record.alarm_thresholds import THRESHOLDS, exceeds_threshold


@pytest.mark.parametrize("measure", [*THRESHOLDS, "a_flag"])
def test_the_worst_of_a_measure_raises_an_alarm_and_the_best_none(measure):
    """Each is a share or a correlation."""
    assert exceeds_threshold(measure, 1.0) and not exceeds_threshold(measure, 0.0)

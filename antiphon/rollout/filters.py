"""Filters of complete groups: `rollout.filter: name`, or a function of your own that returns True to keep a group."""

from collections.abc import Callable
from statistics import fmean

from antiphon.core.registry import Registry
from antiphon.core.types import Group

GroupFilter = Callable[[Group], bool]

FILTERS = Registry("group filter", {"spread": "antiphon.rollout.filters:spread"}, callables=True)


def spread(group: Group) -> bool:
    """Keep a group whose scores differ; one whose siblings all scored the same has no advantage to learn from.

    Source: dynamic sampling of DAPO (Yu et al. 2025), section 3.2.
    """
    return len({trajectory.meta.score.value for trajectory in group.trajectories}) > 1


def is_mean_in_range(group: Group, low: float, high: float) -> bool:
    """Return True if the mean score of a group is from `low` to `high`.

    Source: online filtering by accuracy of PRIME (Cui et al. 2025).
    """
    mean = fmean(trajectory.meta.score.value or 0.0 for trajectory in group.trajectories)
    return low <= mean <= high

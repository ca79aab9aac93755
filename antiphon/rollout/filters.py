"""Filters of complete groups: `rollout.filter: name`, or a function of your own that returns True to keep a group."""

from antiphon.core.registry import Registry
from antiphon.core.types import Group

FILTERS = Registry("group filter", {"spread": "antiphon.rollout.filters:spread"})


def spread(group: Group) -> bool:
    """Keep a group whose scores differ; one whose siblings all scored the same has no advantage to learn from.

    Source: dynamic sampling of DAPO (Yu et al. 2025), section 3.2.
    """
    return len({trajectory.meta.score.value for trajectory in group.trajectories}) > 1

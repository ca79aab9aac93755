"""The user's functions that fill a group and choose among complete groups."""

from collections.abc import Callable
from dataclasses import dataclass

from antiphon.core.registry import import_path
from antiphon.core.types import Group
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.filters import FILTERS
from antiphon.rollout.sampling_loop import SamplingLoop

GroupFilter = Callable[[Group], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHooks:
    """Functions that the scheduler calls for each group, if they are configured.

    Attributes:
        sampler: Runs and rewards the attempts of a group, in place of the scheduler's own loop.
        keep: Returns True to keep a complete group.
    """

    sampler: SamplingLoop | None = None
    keep: GroupFilter | None = None


def load_group_hooks(config: RolloutConfig) -> GroupHooks:
    """Import `rollout.sampler` and `rollout.filter`."""
    return GroupHooks(
        sampler=import_path(config.sampler, "sampler") if config.sampler else None,
        keep=FILTERS.resolve(config.filter) if config.filter else None,
    )

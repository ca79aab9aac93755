"""Selects the groups that a training step may take, by their age. Pure functions.

Groups are given in the order of their admission, which is also the order of the versions they were admitted at. So groups
that may be too old are a prefix, and no function looks at all groups.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice, takewhile

from antiphon.core.errors import FreshnessError
from antiphon.core.types import PolicyVersion
from antiphon.rollout.config import Policy, RolloutConfig
from antiphon.rollout.live_group import GroupState, LiveGroup


def choose_groups(
    config: RolloutConfig,
    groups: Collection[LiveGroup],
    complete: Mapping[int, LiveGroup],
    version: PolicyVersion,
    running: int,
) -> list[LiveGroup] | None:
    """Return the B groups of a step that begins now, or None if they are not ready.

    Args:
        config: The schedule.
        groups: Live groups in the order of admission.
        complete: Those of them that a step may take, by number.
        version: The present version.
        running: Groups that are not complete.
    """
    size = config.groups_per_step
    if len(complete) < size or (config.policy is Policy.BATCH and running):
        return None
    if config.order == "fifo":
        chosen = list(islice(groups, size))
    else:
        chosen = sorted(complete.values(), key=lambda group: (group.oldest_start(), group.id))[:size]
        if config.on_expiry == "wait":
            due = list(islice(find_old_groups(groups, version, config.max_age), size))
            chosen = due + [group for group in chosen if group not in due][: size - len(due)]
            if not _leaves_time(config, groups, chosen, version):
                return None
    return chosen if all(group.state is GroupState.COMPLETE for group in chosen) else None


def _leaves_time(
    config: RolloutConfig, groups: Iterable[LiveGroup], chosen: Collection[LiveGroup], version: PolicyVersion
) -> bool:
    """Return True if later steps can take the groups that this one leaves, or if this one can take no more of them.

    Of the groups that must be taken within the next k steps, k - 1 steps take B at most, and the last one `max_oldest`.
    """
    usable = [group for group in groups if group.state in (GroupState.RUNNING, GroupState.COMPLETE)]
    remaining = {group.id: config.max_age - group.age(version) for group in usable}
    taken = {group.id for group in chosen}
    for steps in range(1, config.max_age):
        due = {group for group, left in remaining.items() if left <= steps}
        left = sum(remaining[group] > 0 for group in due - taken)
        if left > (steps - 1) * config.groups_per_step + config.max_oldest and not taken <= due:
            return False
    return True


def find_old_groups(groups: Iterable[LiveGroup], version: PolicyVersion, age: int) -> Iterator[LiveGroup]:
    """Yield the groups of at least this age, in the order of admission; the age of a taken group counts from its admission."""
    old_enough = takewhile(lambda group: group.admitted.age(version) >= age, groups)
    return (group for group in old_enough if group.state is GroupState.TAKEN or group.age(version) >= age)


def find_unusable_groups(config: RolloutConfig, groups: Iterable[LiveGroup], version: PolicyVersion) -> list[LiveGroup]:
    """Return the groups that no step can use, now that `version` was published."""
    oldest = list(find_old_groups(groups, version, config.max_age))
    usable = [group for group in oldest if group.age(version) == config.max_age]
    if config.max_oldest < config.groups_per_step:
        usable = usable[: config.max_oldest]
    kept = {group.id for group in usable}
    return [group for group in oldest if group.id not in kept]


def check_fresh(config: RolloutConfig, chosen: Iterable[LiveGroup], version: PolicyVersion) -> None:
    """Raise `FreshnessError` if a step would take groups that are too old, or too many of the greatest age."""
    ages = [group.age(version) for group in chosen]
    if max(ages) > config.max_age or ages.count(config.max_age) > config.max_oldest:
        raise FreshnessError(f"a step at version {version.n} was offered groups of ages {ages}: {config}")


def find_oldest_start(config: RolloutConfig, groups: Iterable[LiveGroup], version: PolicyVersion, taken: bool) -> int:
    """Return the number of the version at which a trajectory must have started to be of use to a group admitted now.

    Args:
        config: The schedule.
        groups: Live groups.
        version: The present version.
        taken: True if a step has taken its groups and its version is not published yet.
    """
    oldest = version.n + taken - config.max_age
    if config.max_oldest < config.groups_per_step:
        as_old = sum(group.oldest_start().n <= oldest for group in groups if group.state is not GroupState.TAKEN)
        oldest += as_old >= config.max_oldest
    return oldest

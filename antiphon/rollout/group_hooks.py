"""Functions that fill a group, choose among complete groups and take note of their scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from antiphon.core.registry import Registry
from antiphon.core.types import Group
from antiphon.core.user_errors import name_user_errors
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.evaluation import TaskPlan
from antiphon.rollout.filters import FILTERS, GroupFilter, is_mean_in_range
from antiphon.rollout.sampling_loop import SamplingLoop
from antiphon.tasks.config import TaskConfig
from antiphon.tasks.mixture import Mixture

SAMPLERS = Registry("group sampler", {}, callables=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHooks:
    """Functions that the scheduler calls for each group, if they are configured.

    Attributes:
        sampler: Runs and rewards the attempts of a group, in place of the scheduler's own loop.
        filter: Returns True to keep a complete group.
        observe: Receives each group once, when it is trained on or when the filter rejects it.
    """

    sampler: SamplingLoop | None = None
    filter: GroupFilter | None = None
    observe: Callable[[Group], None] | None = None


def load_group_hooks(
    config: RolloutConfig, tasks: Sequence[TaskConfig], plans: Mapping[str, TaskPlan], mixture: Mixture
) -> GroupHooks:
    """Import `rollout.sampler` and `rollout.filter`; combine them with ranges and curricula of tasks.

    Args:
        config: Its `sampler` and `filter`.
        tasks: All tasks of the run.
        plans: What a success is in each task.
        mixture: Draws the prompts, and is told how many attempts at each were a success.
    """
    sampler: SamplingLoop | None = None
    if config.sampler is not None:
        found = SAMPLERS.resolve(config.sampler, "rollout.sampler")
        sampler = name_user_errors(found, "rollout.sampler", config.sampler)
    return GroupHooks(
        sampler=sampler,
        filter=make_filter(config, tasks),
        observe=make_observer(tasks, plans, mixture),
    )


def make_filter(config: RolloutConfig, tasks: Sequence[TaskConfig]) -> GroupFilter | None:
    """Return the filter that keeps groups which `mean_range` of their task and `rollout.filter` keep; None if all are kept."""
    own: GroupFilter | None = None
    if config.filter is not None:
        own = name_user_errors(FILTERS.resolve(config.filter, "rollout.filter"), "rollout.filter", config.filter)
    ranges = {task.name: task.mean_range for task in tasks if task.mean_range is not None}
    if not ranges:
        return own

    def keep(group: Group) -> bool:
        bounds = ranges.get(group.prompt.task)
        return (bounds is None or is_mean_in_range(group, *bounds)) and (own is None or own(group))

    return keep


def make_observer(
    tasks: Sequence[TaskConfig], plans: Mapping[str, TaskPlan], mixture: Mixture
) -> Callable[[Group], None] | None:
    """Return a function that tells the mixture how many attempts of a group were a success; None without a curriculum."""
    if not any(task.curriculum for task in tasks):
        return None

    def observe(group: Group) -> None:
        plan, metas = plans[group.prompt.task], [trajectory.meta for trajectory in group.trajectories]
        mixture.record(group.prompt, sum(map(plan.is_success, metas)), len(metas))

    return observe

"""Metrics of a training step's groups, taken as the step begins."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from antiphon.core.types import Group, GroupOutcome, TrajectoryMeta
from antiphon.rollout.backend import RolloutBackend
from antiphon.rollout.scheduler import Scheduler
from antiphon.tasks.base import FLAG_PREFIX
from antiphon.tasks.rewards.remote_judge import RemoteJudges


def describe_step(groups: Sequence[Group], scheduler: Scheduler, rollouts: RolloutBackend) -> dict[str, float]:
    """Return ages, rewards and lengths of a step's groups, and counts of engines, attempts and dropped groups."""
    metas = [trajectory.meta for group in groups for trajectory in group.trajectories]
    ages = [meta.started.age(scheduler.admission.version) for meta in metas]
    return {
        **{f"age/{age}": ages.count(age) / len(ages) for age in range(scheduler.config.max_age + 1)},
        "reward/mean": float(np.mean([meta.score.value for meta in metas])),
        **_describe_tasks(metas),
        "age/mean": float(np.mean(ages)),
        "age/max": float(max(ages)),
        "length/mean": float(np.mean([meta.completion_tokens for meta in metas])),
        "length/max": float(max(meta.completion_tokens for meta in metas)),
        "length/truncated": float(np.mean([meta.truncated for meta in metas])),
        "engines/live": float(rollouts.engines),
        "tokens/requeued": float(rollouts.requeued_tokens),
        "attempts/dispatched": float(scheduler.admission.dispatched),
        "groups/live": float(scheduler.admission.live),
        "groups/filtered": float(scheduler.take_group_count(GroupOutcome.FILTERED)),
        "groups/failed": float(scheduler.take_group_count(GroupOutcome.FAILED)),
        "groups/stale": float(scheduler.take_group_count(GroupOutcome.STALE)),
        **scheduler.bias_meter.metrics(),
    }


def describe_judges(judges: RemoteJudges) -> dict[str, float]:
    """Return what the judges behind an address were asked since the run began, and what that cost; nothing without any."""
    return {f"judge/{name}": float(value) for name, value in asdict(judges.usage).items()} if judges.judges else {}


def _describe_tasks(metas: Sequence[TrajectoryMeta]) -> dict[str, float]:
    """Return mean score and share of each task, if there are several, and the mean of each part of its scores."""
    values: dict[str, list[float]] = {}
    for meta in metas:
        values.setdefault(f"reward/task/{meta.task}", []).append(meta.score.value or 0.0)
        for part, value in meta.score.parts.items():
            if not part.startswith(FLAG_PREFIX):
                values.setdefault(f"reward/part/{meta.task}/{part}", []).append(value)
    shares = Counter(meta.task for meta in metas)
    if len(shares) == 1:  # reward/mean says the same
        del values[f"reward/task/{metas[0].task}"]
        shares.clear()
    means = {name: float(np.mean(found)) for name, found in values.items()}
    return means | {f"share/{task}": count / len(metas) for task, count in shares.items()}

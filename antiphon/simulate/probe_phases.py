"""The phases of a probe: their configurations, and what they left in the run's files."""

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass

from antiphon.record.timeline import Timeline
from antiphon.rollout.config import Policy
from antiphon.run.config import RunConfig

MAX_STEPS = 60  # of a phase
BUSY_RATIO = 2.0  # an asynchronous ratio at which neither side waits much


@dataclass(slots=True)
class Phase:
    """The record of one phase."""

    timeline: Timeline
    trained_tokens: list[float]  # of each step


def make_phases(config: RunConfig) -> tuple[RunConfig, RunConfig, RunConfig]:
    """Return the phases: synchronous, asynchronous, synchronous with fewer groups; none drops or adds groups."""
    rollout = config.rollout
    plain = {
        "policy": Policy.QUEUE,
        "extra_groups": 0,
        "redundancy": 0,
        "order": "fifo",
        "filter": None,
        "sampler": None,
    }
    few = max(rollout.groups_per_step // 4, config.learner.minibatches)
    changes: list[dict[str, float]] = [
        {"async_ratio": 0.0},
        {"async_ratio": max(rollout.async_ratio, BUSY_RATIO)},
        {"async_ratio": 0.0, "groups_per_step": few},
    ]
    first, second, third = (
        config.model_copy(update={"steps": MAX_STEPS, "rollout": rollout.model_copy(update=plain | change)})
        for change in changes
    )
    return first, second, third


def read_phases(events: Iterable[str], metrics: Iterable[str]) -> list[Phase]:
    """Read the phases from a probe's files, without a warm start before the first."""
    parts: list[list[str]] = [[]]
    for line in events:
        if json.loads(line)["event"] == "phase":
            parts.append([])
        parts[-1].append(line)
    steps = (line["learner/tokens"] for line in map(json.loads, metrics) if "learner/tokens" in line)
    timelines = [Timeline.read(lines) for lines in parts[1:]]
    return [Phase(timeline, list(itertools.islice(steps, len(timeline.steps)))) for timeline in timelines]

"""Detects suspicious rewards from the responses they scored. An alarm is a measure above its threshold.

A `RewardMonitor` keeps the newest graded and trained responses of each task. It never ends a run or changes a score; each
alarm is shown to the user once.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from antiphon.core.types import (
    Group,
    IntArray,
    PayloadReference,
    Segment,
    TextStatistics,
    Trajectory,
    TrajectoryMeta,
)
from antiphon.record.alarm_thresholds import FLAG_THRESHOLD, THRESHOLDS, exceeds_threshold
from antiphon.record.metric_descriptions import METRICS
from antiphon.tasks.base import FLAG_PREFIX

WINDOW = 512  # newest responses of a task that are kept
MIN_RESPONSES = 64  # below which nothing is measured
MAX_PER_STEP = 128  # responses of a step that are analysed, so that large steps cost no more
MAX_TOKENS = 2048  # of a response that are analysed
GRAM = 4  # tokens of an n-gram
MIN_DUPLICATE_TOKENS = 16  # shorter responses may be equal by chance

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 1], np.uint64)


class Alarm(NamedTuple):
    """A measure of a task's rewards that a person should look at."""

    task: str
    name: str
    value: float
    threshold: float

    def __str__(self) -> str:
        measure = METRICS.get(f"watch/<task>/{self.name}", METRICS["watch/<task>/<flag>"]).rstrip(".")
        limit = f"{self.value:.2f}, beyond {self.threshold:g}"
        return f"task {self.task}, {self.name}: {measure[0].lower()}{measure[1:]} is {limit} (docs/integrity.md)"


class ResponseRecord(NamedTuple):
    """The facts about a trajectory that are kept."""

    group: int
    turns: int
    score: float
    length: int
    repetition: float
    digest: int | None  # of its analysed tokens; None if it is too short to compare
    flags: frozenset[str]


# --- measures ----------------------------------------------------------------------------------------------------------


def repetition(tokens: IntArray) -> float:
    """Return the share of the 4-grams of tokens [L] that occurred before."""
    if len(tokens) <= GRAM:
        return 0.0
    grams = (
        sliding_window_view(tokens.astype(np.uint64), GRAM) @ _MIX
    )  # modulo 2^64: equal for equal grams, hardly for others
    return 1 - len(np.unique(grams)) / len(grams)


def correlation(one: Sequence[float], other: Sequence[float], groups: Sequence[int]) -> float:
    """Return Pearson's correlation within groups [N]; 0 if either value does not vary within groups."""
    left, right = _subtract_group_means(one, groups), _subtract_group_means(other, groups)
    scale = math.sqrt(float(left @ left) * float(right @ right))
    return float(left @ right) / scale if scale > 1e-12 else 0.0


def _subtract_group_means(values: Sequence[float], groups: Sequence[int]) -> NDArray[np.float64]:
    found = np.asarray(values, np.float64)
    _, group = np.unique(np.asarray(groups), return_inverse=True)
    return found - (np.bincount(group, found) / np.bincount(group))[group]


def _group_by_turns(responses: Sequence[ResponseRecord]) -> list[int]:
    """Number the responses, equal for siblings with equally many turns.

    A response that has called a tool is longer and knows more; a reward for what it knows is none for length.
    """
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault((response.group, response.turns), len(numbers)) for response in responses]


def constant(responses: Sequence[ResponseRecord]) -> float:
    """Return the share of groups, of those with two or more responses, whose scores are all equal."""
    scores: dict[int, list[float]] = {}
    for response in responses:
        scores.setdefault(response.group, []).append(response.score)
    several = [len(set(values)) == 1 for values in scores.values() if len(values) > 1]
    return sum(several) / len(several) if several else 0.0


def duplicates(responses: Sequence[ResponseRecord]) -> float:
    """Return the share of responses, of those long enough to compare, that equal an earlier sibling."""
    telling = [(response.group, response.digest) for response in responses if response.digest is not None]
    return 1 - len(set(telling)) / len(telling) if len(telling) >= MIN_RESPONSES else 0.0


def flag_shares(responses: Sequence[ResponseRecord]) -> dict[str, float]:
    """Return the share of responses with each flag: of those that score at least average, `out_of_range` of all."""
    mean = math.fsum(response.score for response in responses) / len(responses)
    paid = [response for response in responses if response.score >= mean]
    found = Counter(mark for response in paid for mark in response.flags)
    every = sum("out_of_range" in response.flags for response in responses)
    return {mark: count / max(len(paid), 1) for mark, count in found.items()} | {"out_of_range": every / len(responses)}


def measures(responses: Sequence[ResponseRecord]) -> dict[str, float]:
    """Return all measures of the responses of one task."""
    groups, scores = [response.group for response in responses], [response.score for response in responses]
    return {
        "constant": constant(responses),
        "length": correlation(scores, [response.length for response in responses], _group_by_turns(responses)),
        "repetition": correlation(scores, [response.repetition for response in responses], groups),
        "duplicates": duplicates(responses),
        **flag_shares(responses),
    }


def find_alarms(task: str, found: Mapping[str, float]) -> Iterator[Alarm]:
    """Yield an alarm for each measure above its threshold."""
    for name, value in found.items():
        if exceeds_threshold(name, value):
            yield Alarm(task, name, value, THRESHOLDS.get(name, FLAG_THRESHOLD))


# --- over a run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Task:
    responses: deque[ResponseRecord] = field(default_factory=lambda: deque(maxlen=WINDOW))
    graded: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))  # True if there was a verdict

    def measures(self) -> dict[str, float]:
        found = {"ungraded": 1 - sum(self.graded) / len(self.graded)} if len(self.graded) >= MIN_RESPONSES else {}
        return found | (measures(self.responses) if len(self.responses) >= MIN_RESPONSES else {})


class RewardMonitor:
    """Keeps responses that were graded and trained on, and measures them."""

    def __init__(self) -> None:
        self._tasks: dict[str, _Task] = {}

    def record_finish(self, meta: TrajectoryMeta) -> None:
        """Note an attempt that came to its end; if nothing failed before, it was graded."""
        if meta.failure is None or meta.failure.source == "reward":
            self._task(meta.task).graded.append(meta.score.status.is_verdict)

    def record_training(self, groups: Sequence[Group]) -> None:
        """Note the groups that a step takes."""
        analysed = 0
        for group in groups:
            if analysed >= MAX_PER_STEP:
                break
            self._task(group.prompt.task).responses.extend(filter(None, map(_record_of, group.trajectories)))
            analysed += len(group.trajectories)

    def check(self) -> tuple[dict[str, float], list[Alarm]]:
        """Return the measures as metrics, and the present alarms."""
        metrics: dict[str, float] = {}
        alarms: list[Alarm] = []
        for name, task in self._tasks.items():
            found = task.measures()
            metrics |= {f"watch/{name}/{measure}": value for measure, value in found.items()}
            alarms += find_alarms(name, found)
        graded = [scored for task in self._tasks.values() for scored in task.graded]
        ungraded = 1 - sum(graded) / len(graded) if graded else 0.0
        return {**metrics, "reward/ungraded": ungraded, "reward/alarms": float(len(alarms))}, alarms

    def _task(self, name: str) -> _Task:
        return self._tasks.setdefault(name, _Task())


def text_statistics(segments: Sequence[Segment]) -> TextStatistics:
    """Return the statistics of a response's tokens that are kept without its text."""
    sampled = [segment.tokens[segment.loss_mask] for segment in segments]
    tokens = np.concatenate(sampled)[:MAX_TOKENS] if sampled else np.empty(0, np.int32)
    return TextStatistics(repetition(tokens), crc32(tokens.tobytes()) if len(tokens) >= MIN_DUPLICATE_TOKENS else None)


def _record_of(trajectory: Trajectory) -> ResponseRecord | None:
    meta, statistics = trajectory.meta, trajectory.meta.wording
    if statistics is None:
        if isinstance(trajectory.payload, PayloadReference):  # of a life of the run that did not keep statistics
            return None
        statistics = text_statistics(trajectory.payload)
    return ResponseRecord(
        group=meta.id.group,
        turns=meta.turns,
        score=meta.score.value or 0.0,
        length=meta.completion_tokens,
        repetition=statistics.repetition,
        digest=statistics.digest,
        flags=frozenset(part.removeprefix(FLAG_PREFIX) for part in meta.score.parts if part.startswith(FLAG_PREFIX)),
    )

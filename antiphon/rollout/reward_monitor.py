"""Detect suspicious rewards from the responses they scored. An alarm is a name, a number and its threshold.

A `RewardMonitor` keeps the newest graded and trained responses of each task. Nothing here ends a run or changes a score: each
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
    ScoreStatus,
    Segment,
    TextStatistics,
    Trajectory,
    TrajectoryMeta,
)
from antiphon.tasks.base import FLAG_PREFIX

WINDOW = 512  # answers of a task that are kept, the newest
FEWEST = 64  # answers that it takes to say something
EACH_STEP = 128  # answers of a step that are looked at, so that looking costs no more when steps are large
LONGEST = 2048  # tokens of an answer that are looked at
GRAM = 4  # tokens whose coming again is a repetition
TELLING = 16  # tokens from which on it says something that two answers are equal

# What is measured, and from where on it is an alarm.
THRESHOLDS: Mapping[str, float] = {
    "ungraded": 0.1,  # share of what was to be graded
    "constant": 0.95,  # share of groups whose scores are all equal
    "length": 0.7,  # correlation of score and length among siblings with as many turns, with either sign
    "repetition": 0.5,  # correlation of score and repetition among siblings
    "duplicates": 0.5,  # share of answers that a sibling has given before
    "out_of_range": 0.0,  # share of scores outside the task's `reward_range`
}
MARKED = 0.1  # share of answers scored above average that bear a mark of `tasks.reward_checks.reward_hacking_signals`

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 1], np.uint64)


class Alarm(NamedTuple):
    """Something about the rewards of a task that a person should look at."""

    task: str
    name: str
    value: float
    threshold: float

    def __str__(self) -> str:
        return f"task {self.task}: {self.name} is {self.value:.2f}, more than {self.threshold:g} (docs/integrity.md)"


class Answer(NamedTuple):
    """What is kept of a trajectory."""

    group: int
    turns: int
    score: float
    length: int
    repetition: float
    digest: int | None  # of what is looked at; None: too short to tell
    marks: frozenset[str]


# --- measures ----------------------------------------------------------------------------------------------------------


def repetition(tokens: IntArray) -> float:
    """Share of the 4-grams of tokens [L] that have come before."""
    if len(tokens) <= GRAM:
        return 0.0
    grams = (
        sliding_window_view(tokens.astype(np.uint64), GRAM) @ _MIX
    )  # modulo 2^64: equal for equal grams, hardly for others
    return 1 - len(np.unique(grams)) / len(grams)


def correlation(one: Sequence[float], other: Sequence[float], groups: Sequence[int]) -> float:
    """Pearson's, of what each is beyond the mean of its group [N]; 0 if either does not vary within groups."""
    left, right = _beyond(one, groups), _beyond(other, groups)
    scale = math.sqrt(float(left @ left) * float(right @ right))
    return float(left @ right) / scale if scale > 1e-12 else 0.0


def _beyond(values: Sequence[float], groups: Sequence[int]) -> NDArray[np.float64]:
    found = np.asarray(values, np.float64)
    _, group = np.unique(np.asarray(groups), return_inverse=True)
    return found - (np.bincount(group, found) / np.bincount(group))[group]


def _by_turns(answers: Sequence[Answer]) -> list[int]:
    """A number for each answer, the same for siblings with as many turns: one that has called a tool is longer and knows more,
    and a reward that pays for what it knows pays nothing for length."""
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault((answer.group, answer.turns), len(numbers)) for answer in answers]


def constant(answers: Sequence[Answer]) -> float:
    """Share of groups of two or more whose scores are all equal."""
    scores: dict[int, list[float]] = {}
    for answer in answers:
        scores.setdefault(answer.group, []).append(answer.score)
    several = [len(set(values)) == 1 for values in scores.values() if len(values) > 1]
    return sum(several) / len(several) if several else 0.0


def duplicates(answers: Sequence[Answer]) -> float:
    """Share of answers, of those long enough to tell, that a sibling has given before."""
    telling = [(answer.group, answer.digest) for answer in answers if answer.digest is not None]
    return 1 - len(set(telling)) / len(telling) if len(telling) >= FEWEST else 0.0


def marked(answers: Sequence[Answer]) -> dict[str, float]:
    """For each mark the share that bears it of the answers that score above average, or as all do; `out_of_range` of all."""
    mean = math.fsum(answer.score for answer in answers) / len(answers)
    paid = [answer for answer in answers if answer.score >= mean]
    found = Counter(mark for answer in paid for mark in answer.marks)
    every = sum("out_of_range" in answer.marks for answer in answers)
    return {mark: count / max(len(paid), 1) for mark, count in found.items()} | {"out_of_range": every / len(answers)}


def measures(answers: Sequence[Answer]) -> dict[str, float]:
    """All that is measured of the answers of one task."""
    groups, scores = [answer.group for answer in answers], [answer.score for answer in answers]
    return {
        "constant": constant(answers),
        "length": correlation(scores, [answer.length for answer in answers], _by_turns(answers)),
        "repetition": correlation(scores, [answer.repetition for answer in answers], groups),
        "duplicates": duplicates(answers),
        **marked(answers),
    }


def find_alarms(task: str, found: Mapping[str, float]) -> Iterator[Alarm]:
    """The alarms that measures amount to."""
    for name, value in found.items():
        size, threshold = abs(value) if name == "length" else value, THRESHOLDS.get(name, MARKED)
        if size > threshold:
            yield Alarm(task, name, value, threshold)


# --- over a run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Task:
    answers: deque[Answer] = field(default_factory=lambda: deque(maxlen=WINDOW))
    graded: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))  # whether there was a verdict

    def measures(self) -> dict[str, float]:
        found = {"ungraded": 1 - sum(self.graded) / len(self.graded)} if len(self.graded) >= FEWEST else {}
        return found | (measures(self.answers) if len(self.answers) >= FEWEST else {})


class RewardMonitor:
    """Looks at what is graded and trained."""

    def __init__(self) -> None:
        self._tasks: dict[str, _Task] = {}

    def record_finish(self, meta: TrajectoryMeta) -> None:
        """An attempt ran to its end; if nothing failed before, it was given to a grader."""
        if meta.failure is None or meta.failure.source == "reward":
            self._task(meta.task).graded.append(meta.score.status is ScoreStatus.SCORED)

    def record_training(self, groups: Sequence[Group]) -> None:
        """A step takes these groups."""
        looked = 0
        for group in groups:
            if looked >= EACH_STEP:
                break
            self._task(group.prompt.task).answers.extend(filter(None, map(_answer, group.trajectories)))
            looked += len(group.trajectories)

    def check(self) -> tuple[dict[str, float], list[Alarm]]:
        """The measures as metrics, and the alarms that stand now."""
        metrics: dict[str, float] = {}
        alarms: list[Alarm] = []
        for name, task in self._tasks.items():
            found = task.measures()
            metrics |= {f"watch/{name}/{measure}": value for measure, value in found.items()}
            alarms += find_alarms(name, found)
        graded = [verdict for task in self._tasks.values() for verdict in task.graded]
        ungraded = 1 - sum(graded) / len(graded) if graded else 0.0
        return {**metrics, "reward/ungraded": ungraded, "reward/alarms": float(len(alarms))}, alarms

    def _task(self, name: str) -> _Task:
        return self._tasks.setdefault(name, _Task())


def text_statistics(segments: Sequence[Segment]) -> TextStatistics:
    """All that is looked at of tokens."""
    sampled = [segment.tokens[segment.loss_mask] for segment in segments]
    tokens = np.concatenate(sampled)[:LONGEST] if sampled else np.empty(0, np.int32)
    return TextStatistics(repetition(tokens), crc32(tokens.tobytes()) if len(tokens) >= TELLING else None)


def _answer(trajectory: Trajectory) -> Answer | None:
    meta, said = trajectory.meta, trajectory.meta.wording
    if said is None:
        if isinstance(trajectory.payload, PayloadReference):  # of a life that had its payload at hand
            return None
        said = text_statistics(trajectory.payload)
    return Answer(
        group=meta.id.group,
        turns=meta.turns,
        score=meta.score.value or 0.0,
        length=meta.completion_tokens,
        repetition=said.repetition,
        digest=said.digest,
        marks=frozenset(part.removeprefix(FLAG_PREFIX) for part in meta.score.parts if part.startswith(FLAG_PREFIX)),
    )

"""Evaluation of prompts with the current weights: accuracy, pass@k and confidence intervals, of each task and of all."""

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, TypeGuard

import numpy as np

from antiphon.core.errors import ConfigError
from antiphon.core.types import AttemptId, Prompt, Sampling, ScoreStatus, Trajectory, TrajectoryMeta
from antiphon.tasks.base import FLAG_PREFIX

RunOne = Callable[[Prompt, AttemptId, Sampling], Coroutine[Any, Any, Trajectory]]

RESAMPLES = 2000  # of the bootstrap
HARD, EASY = 1 / 3, 2 / 3  # shares of successes before training, below and above which a prompt is hard or easy


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """Evaluation of this task (`TaskEvaluationConfig`)."""

    samples: int
    sampling: Sampling
    success_at: float = 1.0
    success_part: str = ""

    def is_success(self, meta: TrajectoryMeta) -> bool:
        """Return True if a sample has a score, and it is high enough."""
        value = meta.score.parts.get(self.success_part) if self.success_part else meta.score.value
        return meta.score.value is not None and value is not None and value >= self.success_at

    def check_part(self, task: str, metas: Iterable[TrajectoryMeta]) -> None:
        """Raise `ConfigError` if there are scores and none has the part that a success is judged by."""
        found = [meta.score.parts for meta in metas if meta.score.value is not None]
        if self.success_part and found and not any(self.success_part in parts for parts in found):
            known = sorted(name for parts in found for name in parts if not name.startswith(FLAG_PREFIX))
            names = ", ".join(dict.fromkeys(known)) or "none"
            message = f"task {task!r}: no score has a part {self.success_part!r}; parts are {names}"
            raise ConfigError(message, key="evaluation.success_part", value=self.success_part, valid=known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Samples of P prompts, of each as many as its task says. One without a score is no success, and counts in `ungraded`."""

    prompt_ids: tuple[str, ...]  # [P]
    tasks: tuple[str, ...]  # [P]
    correct: Sequence[np.ndarray]  # [P] arrays [n] of bool: a success
    ungraded: int
    truncated: float  # share of samples that a limit cut off, see `TrajectoryMeta.truncated`
    measures: Mapping[str, float] = field(default_factory=dict)
    """Means over the scored samples of a task by `task/name`: of the `score` and of each part of it, such as `turns`."""
    versions: tuple[int, int] = (0, 0)
    """Oldest and newest policy version that may have sampled a token: that at the first start, and the newest of a token."""

    @property
    def accuracies(self) -> np.ndarray:
        """Share of successes of each prompt [P]."""
        return np.array([row.mean() for row in self.correct])

    @property
    def accuracy(self) -> float:
        """Share of successes, averaged over prompts."""
        return float(self.accuracies.mean())

    @property
    def samples(self) -> int:
        """Least number of samples of a prompt."""
        return min(len(row) for row in self.correct)

    def pass_at(self, k: int) -> float:
        """Return the probability that one of k samples of a prompt is correct, averaged over prompts; unbiased for k <= n.

        Source: Chen et al. 2021, "Evaluating large language models trained on code", eq. 1.
        """
        return float(
            np.mean([1 - math.comb(len(row) - int(row.sum()), k) / math.comb(len(row), k) for row in self.correct])
        )

    def interval(self, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
        """Return a bootstrap interval of the accuracy, resampled over prompts."""
        return bootstrap_interval(self.accuracies, seed, level)

    def without(self, tasks: Collection[str]) -> "Evaluation":
        """Return the evaluation of the prompts of other tasks; of all if there are no others."""
        kept = [index for index, task in enumerate(self.tasks) if task not in tasks]
        return self._subset(kept) if kept else self

    def by_task(self) -> "dict[str, Evaluation]":
        """Return the evaluation of each task; counts of ungraded and truncated samples are those of all."""
        places: dict[str, list[int]] = {}
        for index, task in enumerate(self.tasks):
            places.setdefault(task, []).append(index)
        return {task: self._subset(indices) for task, indices in places.items()}

    def curves(self, before: Sequence[float] | None = None) -> dict[str, float]:
        """Return the accuracy of each task and the ends of its interval, and the accuracy by difficulty, as metrics.

        Args:
            before: Accuracy on each prompt before training, [P]; of another number of prompts, or None, it is not known.
        """
        found: dict[str, float] = {}
        for task, own in self.by_task().items():
            low, high = own.interval()
            found |= {f"accuracy/{task}": own.accuracy, f"accuracy/{task}/low": low, f"accuracy/{task}/high": high}
        return found | self._by_difficulty(before)

    def matches(self, before: Sequence[float] | None) -> TypeGuard[Sequence[float]]:
        """Return True if accuracies before training are known, and are of as many prompts."""
        return before is not None and len(before) == len(self.prompt_ids)

    def _by_difficulty(self, before: Sequence[float] | None) -> dict[str, float]:
        """Return the accuracy on prompts of each difficulty: the share of their samples that was a success before training."""
        levels: dict[str, list[float]] = {}
        for solved, accuracy in zip(before, self.accuracies, strict=True) if self.matches(before) else ():
            level = "hard" if solved < HARD else "easy" if solved > EASY else "medium"
            levels.setdefault(level, []).append(float(accuracy))
        return {f"difficulty/{level}": fmean(found) for level, found in levels.items()}

    def _subset(self, indices: Sequence[int]) -> "Evaluation":
        return replace(
            self,
            prompt_ids=tuple(self.prompt_ids[index] for index in indices),
            tasks=tuple(self.tasks[index] for index in indices),
            correct=[self.correct[index] for index in indices],
        )


def bootstrap_interval(per_prompt: np.ndarray, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of the mean of `per_prompt` [P]. For a paired comparison, pass the differences."""
    generator = np.random.default_rng(seed)
    means = per_prompt[generator.integers(0, len(per_prompt), (RESAMPLES, len(per_prompt)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


async def evaluate(prompts: Sequence[Prompt], plans: Mapping[str, TaskPlan], run: RunOne) -> Evaluation:
    """Run the attempts at all prompts concurrently, as the plans of their tasks say.

    The engine pool limits how many run at once.

    Raises:
        ConfigError: A plan judges success by a part that no score of its task has.
    """
    async with asyncio.TaskGroup() as owner:

        def start(prompt: Prompt, index: int, sample: int) -> asyncio.Task[Trajectory]:
            return owner.create_task(run(prompt, AttemptId(-1 - index, sample, 0), plans[prompt.task].sampling))

        attempts = [
            [start(prompt, index, sample) for sample in range(plans[prompt.task].samples)]
            for index, prompt in enumerate(prompts)
        ]
    metas = [[attempt.result().meta for attempt in row] for row in attempts]
    every = [meta for row in metas for meta in row]
    for task, plan in plans.items():
        plan.check_part(task, (meta for meta in every if meta.task == task))
    return Evaluation(
        prompt_ids=tuple(prompt.id for prompt in prompts),
        tasks=tuple(prompt.task for prompt in prompts),
        correct=[np.array([plans[meta.task].is_success(meta) for meta in row]) for row in metas],
        ungraded=sum(meta.score.status is not ScoreStatus.SCORED for meta in every),
        truncated=fmean(meta.truncated for meta in every),
        measures=_means(every),
        versions=(min(meta.started.n for meta in every), max(meta.newest.n for meta in every)),
    )


def _means(metas: Iterable[TrajectoryMeta]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for meta in metas:
        if meta.score.value is not None:
            for name, value in {**meta.score.parts, "score": meta.score.value}.items():
                if not name.startswith(FLAG_PREFIX):
                    found.setdefault(f"{meta.task}/{name}", []).append(value)
    return {name: fmean(values) for name, values in found.items()}

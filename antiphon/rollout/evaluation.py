"""Evaluation of a set of prompts with the current weights: accuracy, pass@k and confidence intervals."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from antiphon.core.types import AttemptId, Prompt, ScoreStatus, Trajectory, TrajectoryMeta
from antiphon.tasks.base import FLAG_PREFIX

RunOne = Callable[[Prompt, AttemptId], Coroutine[Any, Any, Trajectory]]

RESAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of n samples for each of P prompts. A sample without a score counts as wrong, and in `ungraded`."""

    prompt_ids: tuple[str, ...]  # [P]
    correct: np.ndarray  # [P, n] bool: scored 1
    scores: np.ndarray  # [P, n] 0 for a sample without a score
    ungraded: int
    truncated: float  # share of samples that a limit cut off, see `TrajectoryMeta.truncated`
    measures: Mapping[str, float] = field(default_factory=dict)
    """Means over the scored samples of a task by `task/name`: of the `score` and of each part of it, such as `turns`."""

    @property
    def accuracy(self) -> float:
        """Share of correct samples."""
        return float(self.correct.mean())

    def pass_at(self, k: int) -> float:
        """Return the probability that one of k samples of a prompt is correct, averaged over prompts; unbiased for k <= n.

        Source: Chen et al. 2021, "Evaluating large language models trained on code", eq. 1.
        """
        n = self.correct.shape[1]
        wrong = n - self.correct.sum(axis=1)
        return float(np.mean([1 - math.comb(int(w), k) / math.comb(n, k) for w in wrong]))

    def interval(self, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
        """Return a bootstrap interval of the accuracy, resampled over prompts."""
        return bootstrap_interval(self.correct.mean(axis=1), seed, level)


def bootstrap_interval(per_prompt: np.ndarray, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of the mean of `per_prompt` [P]. For a paired comparison, pass the differences."""
    generator = np.random.default_rng(seed)
    means = per_prompt[generator.integers(0, len(per_prompt), (RESAMPLES, len(per_prompt)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


async def evaluate(prompts: Sequence[Prompt], samples: int, run: RunOne) -> Evaluation:
    """Run `samples` attempts at every prompt concurrently; the engine pool limits how many run at once."""
    async with asyncio.TaskGroup() as owner:
        tasks = [
            [owner.create_task(run(prompt, AttemptId(-1 - index, sample, 0))) for sample in range(samples)]
            for index, prompt in enumerate(prompts)
        ]
    metas = [[task.result().meta for task in row] for row in tasks]
    scores = np.array([[meta.score.value or 0.0 for meta in row] for row in metas])
    return Evaluation(
        prompt_ids=tuple(prompt.id for prompt in prompts),
        correct=scores >= 1.0,
        scores=scores,
        ungraded=sum(meta.score.status is not ScoreStatus.SCORED for row in metas for meta in row),
        truncated=float(np.mean([[meta.truncated for meta in row] for row in metas])),
        measures=_means(meta for row in metas for meta in row),
    )


def _means(metas: Iterable[TrajectoryMeta]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for meta in metas:
        if meta.score.value is not None:
            for name, value in {**meta.score.parts, "score": meta.score.value}.items():
                if not name.startswith(FLAG_PREFIX):
                    found.setdefault(f"{meta.task}/{name}", []).append(value)
    return {name: fmean(values) for name, values in found.items()}

"""In which order the prompts of all tasks are drawn: exact proportions, every prompt once an epoch, resumable.

Each task's own order is a fresh permutation an epoch. Between tasks, tasks of equal weight take turns, and what they have
together is one share among others. The n-th draw goes to a share that has fallen behind by 1/(2k-2) or more, k shares in
all, and among those to the one that must be drawn soonest if none is ever to fall behind by more than 1 - 1/(2k-2). This is
Tijdeman's method ("The chairman assignment problem", 1980), whose bound no method betters. So after any number of draws a
task is less than one draw from its part; and in any stretch of draws less than one if there are one or two different
weights, at most 2 - 1/(k-1) if there are more. Less than one in every stretch cannot be had in general: no order does it for
the weights 1, 2 and 3 (the tests look through all).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.core.errors import DataError
from antiphon.core.rng import derive, generator
from antiphon.core.types import Prompt
from antiphon.tasks.config import TaskConfig
from antiphon.tasks.prompts import load_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureTask:
    """One task's prompts and its share, relative to the other tasks."""

    name: str
    prompts: Sequence[Prompt]
    weight: float = 1.0
    shuffle: bool = True


class Mixture:
    """Draws prompts without end. What it will draw next depends on the seed and on how often each task was drawn."""

    def __init__(self, tasks: Sequence[MixtureTask], seed: int) -> None:
        self._seed = seed
        self._tasks = {task.name: task for task in tasks}
        if len(self._tasks) != len(tasks) or not tasks or not all(task.prompts for task in tasks):
            raise ValueError(f"a mixture needs tasks of different names, with prompts: {[task.name for task in tasks]}")
        total = sum(Fraction(task.weight) for task in tasks)  # exact, so that no rounding piles up
        self._shares: list[tuple[Fraction, list[str]]] = []  # of all draws, and the tasks of one weight that have it
        for weight in dict.fromkeys(task.weight for task in tasks):
            alike = [task.name for task in tasks if task.weight == weight]
            self._shares.append((len(alike) * Fraction(weight) / total, alike))
        self._counts = dict.fromkeys(self._tasks, 0)
        self._orders: dict[str, tuple[int, NDArray[np.int64]]] = {}

    @classmethod
    def load(cls, tasks: Sequence[TaskConfig], seed: int) -> "Mixture":
        """The mixture of the training prompts of `tasks`; errors as in `load_prompts`."""
        loaded = [
            MixtureTask(
                name=task.name,
                prompts=load_prompts(task, task.prompts, seed),
                weight=task.weight,
                shuffle=task.prompts.shuffle,
            )
            for task in tasks
        ]
        return cls(loaded, seed)

    def next(self) -> Prompt:
        """The next prompt; its `epoch` counts from 0, and its seed differs from epoch to epoch."""
        name = self._due()
        task = self._tasks[name]
        epoch, position = divmod(self._counts[name], len(task.prompts))
        self._counts[name] += 1
        return _drawn(task.prompts[int(self._order(task, epoch)[position])], epoch)

    def sample(self, task: str, count: int) -> list[Prompt]:
        """So many prompts of a task, from all over its source; drawing goes on as if they had not been looked at."""
        prompts = self._tasks[task].prompts
        return [_drawn(prompt, 0) for prompt in prompts[:: max(len(prompts) // max(count, 1), 1)][:count]]

    def find(self, task: str, name: str, epoch: int) -> Prompt:
        """The prompt of a task with this id, as it was drawn in an epoch; `DataError` if there is none."""
        prompt = next((p for p in self._tasks[task].prompts if p.id == name), None) if task in self._tasks else None
        if prompt is None:
            raise DataError(f"task {task!r} has no prompt {name!r}, which the checkpoint was about to use")
        return _drawn(prompt, epoch)

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON takes it."""
        return {"counts": dict(self._counts), "prompts": {name: self._fingerprint(name) for name in self._tasks}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. `DataError` if a task's prompts are not the ones they were then."""
        for name in self._tasks:
            if state["prompts"].get(name) != self._fingerprint(name):
                raise DataError(f"task {name!r}: its prompts are not those of the checkpoint's cursor")
        self._counts = {name: int(state["counts"][name]) for name in self._tasks}

    def _due(self) -> str:
        draws, spare = sum(self._counts.values()) + 1, Fraction(1, max(2 * len(self._shares) - 2, 1))
        behind = [
            (share, share * draws - sum(self._counts[name] for name in alike), alike) for share, alike in self._shares
        ]
        urgent = (due for due in behind if due[1] >= spare)
        _, _, alike = min(urgent, key=lambda due: (1 - spare - due[1]) / due[0])
        return min(alike, key=self._counts.__getitem__)

    def _order(self, task: MixtureTask, epoch: int) -> NDArray[np.int64]:
        """Indices into the task's prompts; only the current epoch's are kept."""
        kept = self._orders.get(task.name)
        if kept is None or kept[0] != epoch:
            count = len(task.prompts)
            stream = generator(self._seed, "mixture", task.name, epoch)
            kept = (epoch, stream.permutation(count) if task.shuffle else np.arange(count))
            self._orders[task.name] = kept
        return kept[1]

    def _fingerprint(self, name: str) -> str:
        ids = "\n".join(prompt.id for prompt in self._tasks[name].prompts)
        return hashlib.blake2b(ids.encode(), digest_size=8).hexdigest()


def _drawn(prompt: Prompt, epoch: int) -> Prompt:
    return replace(prompt, epoch=epoch, seed=derive(prompt.seed, "epoch", epoch))

"""The order in which the prompts of all tasks are drawn: exact proportions, every prompt once an epoch, resumable.

The order within a task is a new permutation each epoch. Tasks of equal weight take turns and form one share. With k shares, the
n-th draw goes to a share that is behind by 1/(2k-2) or more; among these, to the one that must be drawn soonest so that none
falls behind by more than 1 - 1/(2k-2). This is Tijdeman's method ("The chairman assignment problem", 1980), whose bound is
optimal. After any number of draws a task is less than one draw from its part. In any interval of draws the difference is less
than one for one or two different weights, and at most 2 - 1/(k-1) for more. Less than one in every interval is impossible in
general: the tests show by exhaustion that no order achieves it for the weights 1, 2 and 3.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.core.errors import DataError
from antiphon.core.rng import derive, generator
from antiphon.core.types import Prompt
from antiphon.tasks.config import CurriculumConfig, TaskConfig
from antiphon.tasks.curriculum import Curriculum
from antiphon.tasks.prompts import load_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureTask:
    """The prompts of a task and its weight relative to other tasks.

    The prompts of a task with a `route` belong to the tasks that its rows name.
    """

    name: str
    prompts: Sequence[Prompt]
    weight: float = 1.0
    shuffle: bool = True
    curriculum: CurriculumConfig | None = None


class Mixture:
    """An endless stream of prompts, determined by the seed, the number of draws of each task, and what curricula recorded."""

    def __init__(self, tasks: Sequence[MixtureTask], seed: int) -> None:
        self._seed = seed
        self._tasks = {task.name: task for task in tasks}
        if len(self._tasks) != len(tasks) or not tasks or not all(task.prompts for task in tasks):
            raise ValueError(f"a mixture needs tasks of different names, with prompts: {[task.name for task in tasks]}")
        total = sum(Fraction(task.weight) for task in tasks)  # exact, so that no rounding errors add up
        self._shares: list[
            tuple[Fraction, list[str]]
        ] = []  # share of all draws, and the tasks of one weight that have it
        for weight in dict.fromkeys(task.weight for task in tasks):
            alike = [task.name for task in tasks if task.weight == weight]
            self._shares.append((len(alike) * Fraction(weight) / total, alike))
        self._counts = dict.fromkeys(self._tasks, 0)
        self._orders: dict[str, tuple[int, NDArray[np.int64]]] = {}
        self._curricula = {
            task.name: Curriculum(task.curriculum, [prompt.id for prompt in task.prompts], seed, task.name)
            for task in tasks
            if task.curriculum is not None
        }

    @classmethod
    def load(cls, tasks: Sequence[TaskConfig], seed: int) -> "Mixture":
        """Load the training prompts of those `tasks` that have some and a weight; raises what `load_prompts` raises."""
        trained = [task for task in tasks if task.weight]
        loaded = [
            MixtureTask(
                name=task.name,
                prompts=load_prompts(task, task.prompts, seed, trained),
                weight=task.weight,
                shuffle=task.prompts.shuffle,
                curriculum=task.curriculum,
            )
            for task in trained
            if task.prompts is not None
        ]
        return cls(loaded, seed)

    def next(self) -> Prompt:
        """Draw the next prompt; its `epoch` counts from 0, and its seed differs between epochs.

        With a curriculum, `epoch` is the number of earlier draws of the prompt.
        """
        name = self._next_task()
        task, number = self._tasks[name], self._counts[name]
        self._counts[name] += 1
        place, epoch = self._choose(task, number)
        return _in_epoch(task.prompts[place], epoch)

    def record(self, prompt: Prompt, successes: int, attempts: int) -> None:
        """Tell the curriculum of a prompt's task, if there is one, how many attempts at the prompt were a success."""
        if (curriculum := self._curricula.get(prompt.task)) is not None:
            curriculum.record(prompt.id, successes, attempts)

    def sample(self, task: str, count: int) -> list[Prompt]:
        """Return `count` prompts spread over those of a task; the order of draws does not change."""
        prompts = list(self._prompts_of(task))
        return [_in_epoch(prompt, 0) for prompt in prompts[:: max(len(prompts) // max(count, 1), 1)][:count]]

    def find(self, task: str, name: str, epoch: int) -> Prompt:
        """Return the prompt of a task with this id as drawn in an epoch; `DataError` if there is none."""
        prompt = next((prompt for prompt in self._prompts_of(task) if prompt.id == name), None)
        if prompt is None:
            raise DataError(f"task {task!r} has no prompt {name!r}, which the checkpoint was about to use")
        return _in_epoch(prompt, epoch)

    @property
    def prompts(self) -> Iterator[Prompt]:
        """All prompts."""
        return (prompt for each in self._tasks.values() for prompt in each.prompts)

    def _prompts_of(self, task: str) -> Iterator[Prompt]:
        """Yield the prompts of a task: its own, and rows of others that name it."""
        return (prompt for prompt in self.prompts if prompt.task == task)

    def state(self) -> dict[str, Any]:
        """Return the cursor as plain JSON values."""
        curricula = {name: curriculum.state() for name, curriculum in self._curricula.items()}
        return {
            "counts": dict(self._counts),
            "prompts": {name: self._fingerprint(name) for name in self._tasks},
            **({"curricula": curricula} if curricula else {}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor; `DataError` if a task's prompts have changed since."""
        for name in self._tasks:
            if state["prompts"].get(name) != self._fingerprint(name):
                raise DataError(f"task {name!r}: its prompts are not those of the checkpoint's cursor")
        self._counts = {name: int(state["counts"][name]) for name in self._tasks}
        for name, curriculum in self._curricula.items():
            curriculum.restore(state["curricula"][name])

    def _next_task(self) -> str:
        draws, spare = sum(self._counts.values()) + 1, Fraction(1, max(2 * len(self._shares) - 2, 1))
        behind = [
            (share, share * draws - sum(self._counts[name] for name in alike), alike) for share, alike in self._shares
        ]
        urgent = (due for due in behind if due[1] >= spare)
        _, _, alike = min(urgent, key=lambda due: (1 - spare - due[1]) / due[0])
        return min(alike, key=self._counts.__getitem__)

    def _choose(self, task: MixtureTask, number: int) -> tuple[int, int]:
        """Return the place and the epoch of the prompt of a draw, numbered from 0."""
        if (curriculum := self._curricula.get(task.name)) is not None:
            return curriculum.draw(number, partial(self._in_order, task))
        return self._in_order(task, number), number // len(task.prompts)

    def _in_order(self, task: MixtureTask, number: int) -> int:
        """Return the place of the prompt that the epochs' orders have at a number, from 0."""
        epoch, position = divmod(number, len(task.prompts))
        return int(self._order(task, epoch)[position])

    def _order(self, task: MixtureTask, epoch: int) -> NDArray[np.int64]:
        """Return the order of a task's prompts in an epoch; only the current one is cached."""
        cached = self._orders.get(task.name)
        if cached is None or cached[0] != epoch:
            count = len(task.prompts)
            stream = generator(self._seed, "mixture", task.name, epoch)
            cached = (epoch, stream.permutation(count) if task.shuffle else np.arange(count))
            self._orders[task.name] = cached
        return cached[1]

    def _fingerprint(self, name: str) -> str:
        ids = "\n".join(prompt.id for prompt in self._tasks[name].prompts)
        return hashlib.blake2b(ids.encode(), digest_size=8).hexdigest()


def _in_epoch(prompt: Prompt, epoch: int) -> Prompt:
    return replace(prompt, epoch=epoch, seed=derive(prompt.seed, "epoch", epoch))

"""A curriculum: prompts of a task are drawn more often while the policy solves them sometimes, but not always.

Of n attempts at a prompt s were a success; with every new group, earlier attempts count `decay` times as much, because the
policy has changed. The estimate of the solve rate is p = (s + 1) / (n + 2), 1/2 for a prompt that was never tried. A prompt is
drawn with a probability in proportion to p (1 - p), the variance of its success: a prompt that is always or never solved
teaches nothing.

Every `sweep`-th draw takes the next prompt of the usual order instead, so each of N prompts is drawn at least once in the first
`sweep` N draws, and again in each later epoch of this order. Draws follow from the seed and the results so far.

Sources: Rutherford et al. 2024, "No regrets: investigating and improving regret approximations for curriculum discovery"
(p (1 - p) as learnability); Foster et al. 2025, "Learning to reason at the frontier of learnability" (for language models).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.core.rng import generator
from antiphon.tasks.config import CurriculumConfig


class Curriculum:
    """Solve rates of the prompts of a task, and draws by them. It keeps three numbers a prompt."""

    def __init__(self, config: CurriculumConfig, ids: Sequence[str], seed: int, task: str) -> None:
        """Create a curriculum over the prompts with these ids, none of which was tried."""
        self._config = config
        self._places = {name: place for place, name in enumerate(ids)}
        self._stream = (seed, "curriculum", task)
        self._drawn = np.zeros(len(ids), np.int64)
        self._successes = np.zeros(len(ids))
        self._attempts = np.zeros(len(ids))
        self._cumulative: NDArray[np.float64] | None = None  # sums of p (1 - p), until the next result

    @property
    def solve_rates(self) -> NDArray[np.float64]:
        """Estimated solve rate of each prompt [N]."""
        return (self._successes + 1) / (self._attempts + 2)

    def draw(self, number: int, in_order: Callable[[int], int]) -> tuple[int, int]:
        """Return the place of the prompt of a draw, and how often it was drawn before.

        Args:
            number: Number of the draw, from 0.
            in_order: Returns the place of a prompt by its number in the usual order.
        """
        sweep, left = divmod(number, self._config.sweep)
        place = in_order(sweep) if left == 0 else self._draw_by_rate(number)
        before = int(self._drawn[place])
        self._drawn[place] += 1
        return place, before

    def record(self, prompt_id: str, successes: int, attempts: int) -> None:
        """Count the attempts of a group; those at prompts of other tasks are ignored."""
        place = self._places.get(prompt_id)
        if place is not None:
            self._successes[place] = self._config.decay * self._successes[place] + successes
            self._attempts[place] = self._config.decay * self._attempts[place] + attempts
            self._cumulative = None

    def state(self) -> list[list[float]]:
        """Return a row [place, draws, successes, attempts] for each prompt that was drawn, as JSON takes it."""
        columns = (self._drawn, self._successes, self._attempts)
        return [
            [place, *(column[place].item() for column in columns)] for place in map(int, np.flatnonzero(self._drawn))
        ]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Continue from what `state` returned."""
        for column in (self._drawn, self._successes, self._attempts):
            column.fill(0)
        for place, drawn, successes, attempts in state:
            self._drawn[place], self._successes[place], self._attempts[place] = drawn, successes, attempts
        self._cumulative = None

    def _draw_by_rate(self, number: int) -> int:
        if self._cumulative is None:
            rates = self.solve_rates
            self._cumulative = np.cumsum(rates * (1 - rates))
        point = generator(*self._stream, number).random() * self._cumulative[-1]
        return min(int(np.searchsorted(self._cumulative, point, side="right")), len(self._cumulative) - 1)

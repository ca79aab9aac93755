"""Countdown in steps: combine numbers, two at a time, until one of them is the target."""

import operator
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

from pydantic import Field, model_validator

from antiphon.core.rng import generator
from antiphon.tasks.environments.actions import extract_answer
from antiphon.tasks.environments.base import OptionError, require
from antiphon.tasks.environments.turns import TurnBasedGame

_OPERATION = re.compile(r"(\d{1,9})\s*([-+*/])\s*(\d{1,9})")
_RESULTS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
MOST_DRAWS = 1_000  # games that are drawn before the options are refused

Numbers = tuple[int, ...]  # sorted


class Countdown(TurnBasedGame):
    """Reach the target, which earns 1.

    Each step replaces two numbers by the result of + - * or /, which must be a whole number from 1 to `largest`; no step can
    be undone. The game is lost when no step is left.
    """

    class Config(TurnBasedGame.Config):
        """Options of `countdown`."""

        numbers: int = Field(4, ge=2, le=5)
        """Numbers at the start."""
        highest: int = Field(10, ge=2, le=1000)
        """Upper bound of the numbers at the start."""
        largest: int = Field(100, le=1_000_000)
        """Upper bound of results and of the target."""
        turns: int = Field(6, ge=1)

        @model_validator(mode="after")
        def _check(self) -> Self:
            require(self.largest >= self.highest, "largest", self.largest, f"a whole number from {self.highest}")
            least = self.numbers - 1
            require(self.turns >= least, "turns", self.turns, f"a whole number from {least}")
            return self

    config: Config
    name: ClassVar[str] = "countdown"

    def actions(self) -> Sequence[str]:
        """Return all allowed steps."""
        return tuple(step for step, _ in self._steps(self._have))

    def _start(self, seed: int) -> None:
        random = generator(seed, self.name)
        count, highest = self.config.numbers, self.config.highest
        for _ in range(MOST_DRAWS):
            have = drawn = tuple(sorted(random.integers(1, highest, count, endpoint=True).tolist()))
            target = 0
            for _ in range(int(random.integers(max(1, count - 2), count))):
                steps = list(self._steps(have))
                step, have = steps[int(random.integers(len(steps)))] if steps else ("0", have)
                target = self._result(step)
            if target and target not in drawn:
                self._have, self._target, self._plan = drawn, target, dict[Numbers, str]()
                return
        raise OptionError(
            f"environment {self.name!r}: none of {MOST_DRAWS} drawn games has a target: raise largest or numbers",
            environment=self.name,
            key="largest",
            value=self.config.largest,
        )

    def _steps(self, have: Numbers) -> Iterator[tuple[str, Numbers]]:
        """Yield each allowed step and the numbers after it."""
        for pair in sorted({(a, b) for i, a in enumerate(have) for j, b in enumerate(have) if i != j}):
            for sign in _RESULTS:
                step = f"{pair[0]} {sign} {pair[1]}"
                after = self._after(have, step)
                if after is not None:
                    yield step, after

    def _result(self, step: str) -> int:
        """Return the result of a step; 0 if it cannot be read or is not allowed."""
        found = _OPERATION.fullmatch(step)
        if found is None:
            return 0
        a, b = int(found[1]), int(found[3])
        if found[2] == "/" and (not b or a % b):
            return 0
        result = int(_RESULTS[found[2]](a, b))
        return result if 0 < result <= self.config.largest else 0

    def _after(self, have: Numbers, step: str) -> Numbers | None:
        """Return the numbers after a step; None if it is not possible."""
        result, left = self._result(step), list(have)
        if not result:
            return None
        for used in map(int, re.findall(r"\d+", step)):
            if used not in left:
                return None
            left.remove(used)
        return tuple(sorted([*left, result]))

    def _rules(self) -> str:
        return (
            f"Make the number behind the arrow from those before it. Each step takes two of them and puts the result of +, "
            f"-, * or / in their place, which must be a whole number from 1 to {self.config.largest}."
        )

    def _describe_actions(self) -> str:
        return f"Say one step, like {self._have[0]} + {self._have[-1]}."

    def _apply(self, action: str) -> float | None:
        after = self._after(self._have, extract_answer(action))
        if after is None:
            return None
        self._have = after
        return float(self._is_won())

    def _render(self) -> str:
        return f"{' '.join(map(str, self._have))} -> {self._target}"

    def _state_key(self) -> str:
        return self._render()

    def _is_won(self) -> bool:
        return self._target in self._have

    def _is_lost(self) -> bool:
        return not self._is_won() and next(self._steps(self._have), None) is None

    def _expert_action(self) -> str:
        if self._have not in self._plan:
            self._plan.update(self._solve())
        return self._plan.get(self._have) or self.actions()[0]

    def _solve(self) -> dict[Numbers, str]:
        """Find a shortest solution by breadth-first search: numbers -> step; empty if there is none."""
        parents: dict[Numbers, tuple[Numbers, str]] = {}
        edge = [self._have]
        while edge:
            found = []
            for have in edge:
                for step, after in self._steps(have):
                    if after not in parents:
                        parents[after] = have, step
                        found.append(after)
            done = next((have for have in found if self._target in have), None)
            if done is not None:
                plan = {}
                while done != self._have:
                    done, step = parents[done]
                    plan[done] = step
                return plan
            edge = found
        return {}

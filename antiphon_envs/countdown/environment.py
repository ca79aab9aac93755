"""Countdown in steps: combine numbers, two at a time, until one of them is the target. No step can be taken back."""

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from antiphon.core.errors import ConfigError
from antiphon.core.rng import generator
from antiphon.tasks.environments.actions import extract_answer
from antiphon.tasks.environments.options import require_whole
from antiphon.tasks.environments.turns import TurnBasedGame

_OPERATION = re.compile(r"(\d{1,9})\s*([-+*/])\s*(\d{1,9})")
_RESULTS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_DRAWS = 1_000

Numbers = tuple[int, ...]  # sorted


@dataclass(kw_only=True, eq=False)
class Countdown(TurnBasedGame):
    """Reach the target from `numbers` numbers, worth 1; each step replaces two of them by the result of + - * or /, which
    must be a whole number from 1 to `largest`. The game is lost when one number is left that is not the target."""

    numbers: int = 4
    highest: int = 10
    """Of the numbers in the beginning."""
    largest: int = 100
    """Of all results, and the target."""
    turns: int = 6

    NAME: ClassVar[str] = "countdown"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole(self.NAME, "numbers", self.numbers, 2, 5)
        require_whole(self.NAME, "highest", self.highest, 2, 1000)
        require_whole(self.NAME, "largest", self.largest, self.highest, 1_000_000)
        require_whole(self.NAME, "turns", self.turns, self.numbers - 1)

    def actions(self) -> Sequence[str]:
        """All steps that are allowed."""
        return tuple(step for step, _ in self._steps(self._have))

    def _begin(self, seed: int) -> None:
        random = generator(seed, self.NAME)
        for _ in range(_DRAWS):
            have = drawn = tuple(sorted(random.integers(1, self.highest, self.numbers, endpoint=True).tolist()))
            target = 0
            for _ in range(int(random.integers(max(1, self.numbers - 2), self.numbers))):
                steps = list(self._steps(have))
                step, have = steps[int(random.integers(len(steps)))] if steps else ("0", have)
                target = self._result(step)
            if target and target not in drawn:
                self._have, self._target, self._plan = drawn, target, dict[Numbers, str]()
                return
        raise ConfigError(
            f"environment {self.NAME!r}: no game of {_DRAWS} drawn will do: raise largest, or have more numbers"
        )

    def _steps(self, have: Numbers) -> Iterator[tuple[str, Numbers]]:
        """What can be done with some numbers, and what is there after that."""
        for pair in sorted({(a, b) for i, a in enumerate(have) for j, b in enumerate(have) if i != j}):
            for sign in _RESULTS:
                step = f"{pair[0]} {sign} {pair[1]}"
                after = self._after(have, step)
                if after is not None:
                    yield step, after

    def _result(self, step: str) -> int:
        """Of a step; 0 if it is none, or is not allowed."""
        found = _OPERATION.fullmatch(step)
        if found is None:
            return 0
        a, b = int(found[1]), int(found[3])
        if found[2] == "/" and (not b or a % b):
            return 0
        result = int(_RESULTS[found[2]](a, b))
        return result if 0 < result <= self.largest else 0

    def _after(self, have: Numbers, step: str) -> Numbers | None:
        """The numbers after a step; None if it cannot be done with these."""
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
            f"-, * or / in their place, which must be a whole number from 1 to {self.largest}."
        )

    def _choice(self) -> str:
        return f"Say one step, like {self._have[0]} + {self._have[-1]}."

    def _act(self, action: str) -> float | None:
        after = self._after(self._have, extract_answer(action))
        if after is None:
            return None
        self._have = after
        return float(self._won())

    def _text(self) -> str:
        return f"{' '.join(map(str, self._have))} -> {self._target}"

    def _key(self) -> str:
        return self._text()

    def _won(self) -> bool:
        return self._target in self._have

    def _lost(self) -> bool:
        return not self._won() and next(self._steps(self._have), None) is None

    def _best(self) -> str:
        if self._have not in self._plan:
            self._plan.update(self._planned())
        return self._plan.get(self._have) or self.actions()[0]

    def _planned(self) -> dict[Numbers, str]:
        """The steps of a shortest way to the target, by where they are taken; none if there is no way (breadth first)."""
        came: dict[Numbers, tuple[Numbers, str]] = {}
        edge = [self._have]
        while edge:
            found = []
            for have in edge:
                for step, after in self._steps(have):
                    if after not in came:
                        came[after] = have, step
                        found.append(after)
            done = next((have for have in found if self._target in have), None)
            if done is not None:
                plan = {}
                while done != self._have:
                    done, step = came[done]
                    plan[done] = step
                return plan
            edge = found
        return {}

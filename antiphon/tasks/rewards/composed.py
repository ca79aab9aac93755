"""Several rewards as one: a weighted sum, in which some parts count only as far as others allow."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from antiphon.core.config import Config
from antiphon.core.errors import ConfigError
from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.tasks.base import FLAG_PREFIX, Transcript, as_score
from antiphon.tasks.rewards import build_reward


class Part(Config):
    """One of the rewards."""

    reward: str
    """Any reward's name, or package.module:attribute."""
    options: dict[str, Any] = {}
    weight: float = 1.0
    """0 for one that is only a gate, or only reported."""
    gates: list[str] = []
    """Parts whose values this one is multiplied by."""


class Composition:
    """The sum over the parts of weight × value × the values of its gates.

    A gate is a part like any other: one of 0 or 1 lets another through or not. Every part is judged, whatever its gates say,
    and reported under its name, its own parts as `name/part`; marks, which are of the response, keep theirs. If one part has
    no verdict, the whole has none. What parts pay for turns is summed as their values are.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        """`parts` maps each name to `reward`, `options`, `weight` and `gates`. `ConfigError` for what these cannot be."""
        self.parts = {name: _part(name, given) for name, given in parts.items()}
        if not any(part.weight for part in self.parts.values()):
            raise ConfigError("composed: no part has a weight")
        for name, part in self.parts.items():
            if unknown := set(part.gates) - self.parts.keys() | {name} & set(part.gates):
                raise ConfigError(f"composed: part {name!r} has a gate {unknown.pop()!r}, which is no other part")

    def score(self, scores: Mapping[str, Score]) -> Score:
        """The verdict, of those on the parts."""
        for status in (ScoreStatus.INFRASTRUCTURE, ScoreStatus.UNGRADED):
            for name, score in scores.items():
                if score.status is status:
                    return Score(status=status, detail=f"{name}: {score.detail}")
        counts = {name: len(score.turns) for name, score in scores.items() if score.turns}
        if len(set(counts.values())) > 1:
            return Score.ungraded(f"parts have paid different numbers of turns: {counts}")
        values = {name: score.value or 0.0 for name, score in scores.items()}
        factors = {
            name: part.weight * math.prod(values[gate] for gate in part.gates) for name, part in self.parts.items()
        }
        total = sum(factor * values[name] for name, factor in factors.items())
        paid = [[factors[name] * reward for reward in scores[name].turns] for name in counts]
        inner = {
            part if part.startswith(FLAG_PREFIX) else f"{name}/{part}": value
            for name, score in scores.items()
            for part, value in score.parts.items()
        }
        detail = "; ".join(f"{name}: {score.detail}" for name, score in scores.items() if score.detail)
        turns = tuple(map(sum, zip(*paid, strict=True)))
        return Score(status=ScoreStatus.SCORED, value=total, parts=values | inner, turns=turns, detail=detail)


class Composed:
    """A `Composition` whose parts are judged here, one after the other. One with a part that is `async def` is judged by
    `tasks.grading.router`, each part where it belongs."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        """See `Composition`."""
        self._composition = Composition(parts)
        self._rewards = {
            name: build_reward(each.reward, each.options) for name, each in self._composition.parts.items()
        }

    def __call__(self, prompt: Prompt, transcript: Transcript) -> Score:
        """The verdict. A reward that raises leaves the whole ungraded, as it would by itself."""
        return self._composition.score(
            {name: as_score(reward(prompt, transcript)) for name, reward in self._rewards.items()}
        )


def _part(name: str, given: Any) -> Part:
    try:
        return Part.model_validate(given, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, (name, *first["loc"])))
        raise ConfigError(f"composed: {at}: {first['msg']}; a part has {', '.join(Part.model_fields)}") from None

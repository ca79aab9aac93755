"""A weighted sum of rewards, in which some parts gate others."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from antiphon.core.config import Config
from antiphon.core.errors import ConfigError
from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.core.user_errors import describe_error
from antiphon.tasks.base import FLAG_PREFIX, Transcript, as_score
from antiphon.tasks.rewards import build_reward


class PartError(Exception):
    """A part of a composed reward failed; the message names it, and the place in the user's code."""


class Part(Config):
    """A part of a composed reward."""

    reward: str
    """Name of a reward, or package.module:attribute."""
    options: dict[str, Any] = {}
    weight: float = 1.0
    """Weight of the part; 0 for one that is only a gate or only reported."""
    gates: list[str] = []
    """Parts whose values multiply this one."""


class Composition:
    """The sum over the parts of weight × value × the values of its gates.

    A gate is a part like any other, usually of 0 or 1; below 0 it counts as 0, so that no penalty becomes a reward. Every part
    is scored, whatever its gates, and reported under its name, its own parts as `name/part`; flags of the response keep their
    names. If one part has no score, the whole has none. Rewards of turns are summed like the values.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        """Read `parts`: name -> mapping with the fields of `Part`; `ConfigError` if one is invalid."""
        self.parts = {name: _part(name, given) for name, given in parts.items()}
        if not any(part.weight for part in self.parts.values()):
            raise ConfigError("composed: no part has a weight")
        for name, part in self.parts.items():
            if unknown := set(part.gates) - self.parts.keys() | {name} & set(part.gates):
                raise ConfigError(f"composed: part {name!r} has a gate {unknown.pop()!r}, which is no other part")

    def score(self, scores: Mapping[str, Score]) -> Score:
        """Combine the scores of the parts, and name all their graders."""
        graders = ", ".join(dict.fromkeys(score.grader for score in scores.values() if score.grader))
        return replace(self._combine(scores), grader=graders)

    def _combine(self, scores: Mapping[str, Score]) -> Score:
        for status in (ScoreStatus.INFRASTRUCTURE, ScoreStatus.UNGRADED):
            for name, score in scores.items():
                if score.status is status:
                    return Score(status=status, detail=f"{name}: {score.detail}", raised=score.raised)
        counts = {name: len(score.turns) for name, score in scores.items() if score.turns}
        if len(set(counts.values())) > 1:
            return Score.ungraded(f"parts have paid different numbers of turns: {counts}")
        values = {name: score.value or 0.0 for name, score in scores.items()}
        gates = {name: max(value, 0.0) for name, value in values.items()}
        factors = {
            name: part.weight * math.prod(gates[gate] for gate in part.gates) for name, part in self.parts.items()
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
    """A `Composition` whose parts are scored here, one after the other.

    `tasks.grading.router` scores compositions with a part that is `async def`.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        """Build the rewards of `parts`, which are those of `Composition`."""
        self._composition = Composition(parts)
        self._rewards = {
            name: build_reward(each.reward, each.options) for name, each in self._composition.parts.items()
        }

    def __call__(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Score a trajectory; a part that raises leaves the whole ungraded.

        Raises:
            PartError: A part raises, or returns what is no score.
        """
        scores: dict[str, Score] = {}
        for name, reward in self._rewards.items():
            try:
                scores[name] = as_score(reward(prompt, transcript))
            except Exception as error:  # named boundary: user code
                raise PartError(f"{name}: {describe_error(error, reward)}") from error
        return self._composition.score(scores)


def _part(name: str, given: Any) -> Part:
    try:
        return Part.model_validate(given, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, (name, *first["loc"])))
        raise ConfigError(f"composed: {at}: {first['msg']}; a part has {', '.join(Part.model_fields)}") from None

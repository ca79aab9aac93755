"""Adapter to the procedural problems of reasoning-gym, with several tries."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from antiphon.core.optional_packages import import_optional
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import extract_answer
from antiphon.tasks.environments.adapters.base import make_or_explain
from antiphon.tasks.environments.adapters.global_random import SEEDS
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig


class ReasoningGym(BaseEnvironment):
    """A problem of a reasoning-gym dataset, with several tries to answer it.

    The policy is told whether each answer but the last is right; the score of the last, from 0 to 1, is the reward.
    """

    class Config(EnvironmentConfig):
        """Options of `reasoning_gym`."""

        name: str
        """Name of the dataset."""
        options: Mapping[str, Any] = {}
        """Passed to the dataset."""
        tries: int = Field(2, ge=1)

    config: Config
    name: ClassVar[str] = "reasoning_gym"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._gym = import_optional("reasoning_gym", f"environment {self.name!r}", "reasoning-gym")
        from antiphon.tasks.rewards.reasoning_gym import score_answer  # imports the optional package

        self._grade = score_answer
        self._dataset = self._make_dataset(0)
        self._entry: dict[str, Any] = {}
        self._answers: list[str] = []

    def reset(self, seed: int) -> Reset:
        """Begin an episode; the problem depends on `seed` only."""
        self._dataset = self._make_dataset(seed % SEEDS)
        self._entry = self._dataset[0]
        self._turns_left = self.config.tries
        return self._entry["question"], {"state_key": self._state_key(), "valid": True, "effective": False}

    def step(self, action: str) -> Step:
        """Score an answer."""
        self._check_running()
        answer = extract_answer(action)
        settings = {"name": self.config.name, **self.config.options}
        score = self._grade(answer, {**self._entry, "dataset": settings}, self._dataset).value or 0.0
        self._answers.append(answer)
        self._turns_left -= 1
        correct = score >= 1.0
        info = {"state_key": self._state_key(), "valid": True, "effective": True}
        if not correct and self._turns_left:
            return "That is not right. Try again.", 0.0, False, False, info
        self._turns_left = 0
        return "right" if correct else "wrong", score, True, False, {**info, "success": correct}

    def expert(self) -> str:
        """Return the stored answer; `RuntimeError` for the few datasets that store none."""
        self._check_running()
        answer = self._entry["answer"]
        if answer is None:
            raise RuntimeError(f"the reasoning-gym dataset {self.config.name!r} stores no answers")
        return str(answer)

    def _make_dataset(self, seed: int) -> Any:
        config = self.config

        def make() -> Any:
            return self._gym.create_dataset(config.name, seed=seed, size=1, **config.options)

        return make_or_explain(self.name, config.name, config.options, make, key="name")

    def _state_key(self) -> str:
        return json.dumps([self._entry["question"], *self._answers])

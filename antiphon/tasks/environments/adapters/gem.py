"""Adapter to GEM (package gem-llm)."""

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.adapters.base import Adapter, LibraryConfig, make_or_explain
from antiphon.tasks.environments.adapters.global_random import SEEDS, GlobalRandom


class Gem(Adapter):
    r"""An environment that `gem.make(id, **options)` makes. It parses actions its own way, mostly from `\boxed{}`."""

    class Config(LibraryConfig):
        """Options of `gem`."""

    config: Config
    name: ClassVar[str] = "gem"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._import("gem", "gem-llm")
        importlib.import_module("gem.envs")  # registers them
        gem, config = importlib.import_module("gem"), self.config
        self._random = GlobalRandom(0)
        with self._random():
            self._inner = make_or_explain(
                self.name, config.id, config.options, lambda: gem.make(config.id, **config.options)
            )

    def reset(self, seed: int) -> Reset:
        """Begin an episode."""
        self._random = GlobalRandom(seed)
        with self._random():
            observation, info = self._inner.reset(seed=seed % SEEDS)
        text = _join(observation, info)
        return text, self._reset_info(text)

    def step(self, action: str) -> Step:
        """Pass an action to the library."""
        with self._random():
            observation, reward, terminated, truncated, info = self._inner.step(action)
        text, over = _join(observation, info), bool(terminated or truncated)
        return (
            text,
            float(reward),
            bool(terminated),
            bool(truncated),
            self._step_info(action, text, float(reward), over),
        )

    def close(self) -> None:
        """Close the library's environment, if it can be closed."""
        getattr(self._inner, "close", bool)()


def _join(observation: Any, info: Mapping[str, Any]) -> str:
    return "\n".join(str(part) for part in (observation, info.get("suffix")) if part)

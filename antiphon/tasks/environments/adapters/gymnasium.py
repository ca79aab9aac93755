"""Adapter to Gymnasium."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import extract_answer, match_action
from antiphon.tasks.environments.adapters.base import Adapter, LibraryConfig, make_or_explain
from antiphon.tasks.environments.base import OptionError

_HIGHLIGHTED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)


class Gymnasium(Adapter):
    """An environment of Gymnasium with a `Discrete` or a `Text` action space.

    The policy sees its rendering as text (`render_mode` ansi), or else its observation in digits. The state is the observation.
    An action that cannot be read changes nothing and costs `format_penalty`.
    """

    class Config(LibraryConfig):
        """Options of `gymnasium`."""

        words: Sequence[str] | None = None
        """Words for the actions, in the order of their numbers."""
        instructions: str = ""
        """Beginning of the first observation, instead of a list of the words."""
        format_penalty: float = Field(0.0, ge=0)
        """Cost of an action that cannot be read."""
        state: Literal["observation"] = "observation"

    config: Config
    name: ClassVar[str] = "gymnasium"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        gymnasium, config = self._import("gymnasium", "gymnasium"), self.config

        def make(**more: Any) -> Any:
            arguments = {"disable_env_checker": True, **config.options, **more}
            return make_or_explain(self.name, config.id, config.options, lambda: gymnasium.make(config.id, **arguments))

        self._inner = make()
        if "render_mode" not in config.options and "ansi" in (self._inner.metadata.get("render_modes") or ()):
            self._inner.close()
            self._inner = make(render_mode="ansi")
        self._first, self._words = self._read_action_space()
        self._mask: Any = None
        self._shown, self._observation = "", ""

    def reset(self, seed: int) -> Reset:
        """Begin an episode; the first observation lists the words, or begins with the `instructions`."""
        observation, info = self._inner.reset(seed=seed)
        self._observe(observation, info)
        choice = f"Say one of {', '.join(self._words)}." if self._words else ""
        text = "\n\n".join(filter(None, (self.config.instructions or choice, self._shown)))
        return text, self._reset_info(self._observation)

    def step(self, action: str) -> Step:
        """Pass an action to the library."""
        parsed = self._parse(extract_answer(action))
        if parsed is None:
            reward = 0.0 - self.config.format_penalty
            info = self._step_info(action, self._observation, reward, False, valid=False, effective=False)
            return self._shown, reward, False, False, info
        before = self._observation
        observation, reward, terminated, truncated, info = self._inner.step(parsed)
        self._observe(observation, info)
        over, effective = bool(terminated or truncated), self._observation != before
        info = self._step_info(action, self._observation, float(reward), over, valid=True, effective=effective)
        return self._shown, float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the library's environment."""
        self._inner.close()

    def actions(self) -> Sequence[str]:
        """Return the words that `info["action_mask"]` allows now, all without a mask; none if actions are free text."""
        words = self._words or ()
        mask = self._mask if self._mask is not None else [True] * len(words)
        return tuple(word for word, allowed in zip(words, mask, strict=True) if allowed)

    def _read_action_space(self) -> tuple[int, tuple[str, ...] | None]:
        """Return the number of the first action and the words of all; no words for free text."""
        space = self._inner.action_space
        kind = type(space).__name__
        if kind == "Text":
            return 0, None
        if kind != "Discrete":
            raise self._option_error("id", self.config.id, f"one whose actions are Discrete or Text, not {kind}")
        first, count = int(space.start), int(space.n)
        words = tuple(self.config.words or (str(first + number) for number in range(count)))
        if not len(words) == len(set(words)) == count:
            raise self._option_error("words", self.config.words, f"{count} different words")
        return first, words

    def _option_error(self, key: str, value: Any, valid: str) -> OptionError:
        message = f"environment {self.name!r}: {key} is {value!r}, but must be {valid}"
        return OptionError(message, environment=self.name, key=key, value=value, valid=[valid])

    def _parse(self, action: str) -> Any:
        """Return the action as the library takes it; None if it cannot be read."""
        if self._words is None:
            return action if self._inner.action_space.contains(action) else None
        word = match_action(action, self.actions())
        return None if word is None else self._first + self._words.index(word)

    def _observe(self, observation: Any, info: Mapping[str, Any]) -> None:
        self._mask = info.get("action_mask")
        is_array = isinstance(observation, np.ndarray)
        self._observation = np.array2string(observation, threshold=sys.maxsize) if is_array else str(observation)
        rendered = self._inner.render() if self._inner.render_mode == "ansi" else self._observation
        # Brackets stand for colours, which alone may say where the player is.
        self._shown = _HIGHLIGHTED.sub(r"[\1]", str(rendered)).strip("\n")

"""Adapter to TextWorld: games of TextWorld and ALFWorld on their own engines. Needs the package textworld, or alfworld."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from antiphon.core.errors import ConfigError
from antiphon.core.rng import generator
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import extract_answer
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig, OptionError

_ALFWORLD, _TEXTWORLD = ".tw-pddl", ".z8"
_VISITED_FACT = "checked"  # a note of ALFWorld about the past, on which nothing depends


class TextWorld(BaseEnvironment):
    """A game of TextWorld (`*.z8`) or ALFWorld (`*.tw-pddl`).

    The reward is the growth of the score as a share of the highest score; the episode ends with the game or after `turns`.
    The engines take 30 ms and more a step and a second to load a game, so they belong behind a service.
    """

    class Config(EnvironmentConfig):
        """Options of `textworld`."""

        path: str
        """A game, or a folder: the seed picks one of the games in it and below."""
        turns: int = Field(50, ge=1)
        """Turns after which the episode is truncated."""
        list_commands: bool = False
        """List the admissible commands in observations."""
        format_penalty: float = Field(0.0, ge=0)
        """Cost of an action that is not admissible."""
        expert: bool = False
        """Plan the expert's command at each step, which takes far longer."""

    config: Config
    name: ClassVar[str] = "textworld"

    def __init__(self, **options: Any) -> None:
        """Find the games; `OptionError` if there is none."""
        super().__init__(**options)
        path = Path(self.config.path)
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        self._games = [file for file in files if file.suffix in (_ALFWORLD, _TEXTWORLD) and file.is_file()]
        if not self._games:
            raise OptionError(
                f"environment {self.name!r}: there is no game in path {self.config.path!r}: expected *.tw-pddl or *.z8, or "
                "a folder of these",
                environment=self.name,
                key="path",
                value=self.config.path,
            )
        self._game: Any = None

    def reset(self, seed: int) -> Reset:
        """Begin the game that `seed` picks; `ConfigError` if the package that plays it is not installed."""
        file = self._games[int(generator(seed, "textworld").integers(len(self._games)))]
        self._game = _load_game(file, self.config.expert)
        self._file = file.name
        self._state = self._game.reset()
        self._score, self._turns_left = 0.0, self.config.turns
        return self._observation(), self._info()

    def step(self, action: str) -> Step:
        """Pass a command to the game."""
        self._check_running()
        self._turns_left -= 1
        admissible, before = self._admissible(), self._state_key()
        command = " ".join(extract_answer(action).split())
        self._state, _, done = self._game.step(command)
        score = (self._state.get("score") or 0) / (self._state.get("max_score") or 1)
        gained, self._score = score - self._score, score
        valid = command in admissible
        info = self._info() | {"valid": valid, "effective": self._state_key() != before}
        if done or not self._turns_left:
            info["success"] = bool(self._state.get("won"))
            self._turns_left = 0
        reward = gained - (0.0 if valid else self.config.format_penalty)
        return self._observation(), reward, bool(done), not done and not self._turns_left, info

    def actions(self) -> Sequence[str]:
        """Return the admissible commands."""
        self._check_running()
        return self._admissible()

    def expert(self) -> str:
        """Return the next command of a winning plan; `RuntimeError` without the option `expert`, or if there is no plan."""
        self._check_running()
        plan = self._state.get("policy_commands")
        if not plan:
            raise RuntimeError(f"there is no plan for {self._file}: set the option expert to true")
        return str(plan[0])

    def close(self) -> None:
        """End the game."""
        if self._game is not None:
            self._game.close()

    def _admissible(self) -> list[str]:
        return list(self._state.get("admissible_commands") or ())

    def _observation(self) -> str:
        listed = self.config.list_commands and self._turns_left
        lines = ["", "You can:", *self._admissible()] if listed else []
        return "\n".join([str(self._state.get("feedback")).strip(), *lines])

    def _state_key(self) -> str:
        """Digest the facts that the engine knows; without facts, its texts."""
        state = self._state
        facts = sorted(str(fact) for fact in state.get("facts") or () if fact.name != _VISITED_FACT)
        known = facts or [state.get("description"), state.get("inventory"), state.get("feedback")]
        return hashlib.blake2b(f"{self._file}{known}".encode(), digest_size=8).hexdigest()

    def _info(self) -> dict[str, Any]:
        return {"state_key": self._state_key(), "admissible": self._admissible()}


def _load_game(file: Path, expert: bool) -> Any:
    """Start the engine with a game."""
    package = "alfworld" if file.suffix == _ALFWORLD else "textworld"
    try:
        import textworld

        wrappers = []
        if file.suffix == _ALFWORLD:
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

            wrappers.append(AlfredDemangler)
    except ImportError as error:
        message = f"{file.name} needs the package {package}: pip install {package} ({error})"
        raise ConfigError(message, value=package) from None
    wanted = ("feedback", "description", "inventory", "facts", "admissible_commands", "score", "max_score", "won")
    infos = textworld.EnvInfos(policy_commands=expert, **dict.fromkeys(wanted, True))
    return textworld.start(str(file), infos, wrappers=wrappers)

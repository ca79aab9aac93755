"""Games of TextWorld and of ALFWorld, played by the engines they were made for. Needs the package textworld, or alfworld."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.rng import generator
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import extract_answer

_ALFWORLD, _TEXTWORLD = ".tw-pddl", ".z8"
_MEMORY = "checked"  # what ALFWorld notes of the past, on which nothing depends


class TextWorld:
    """A game in `path`, or of those in it and below if it is a folder: a seed picks one.

    `*.tw-pddl` are games of ALFWorld, `*.z8` of TextWorld. Observations are what the game says; with
    `list_commands` and all that may be done now. The reward is the growth of the score, as a share of the highest; the episode
    ends with the game, or after `turns`. From an action that the game does not take `format_penalty` is taken off.

    These engines take 30 ms and more a step, and a second to load a game: play them behind a service. With `expert` each step
    also plans what to do, which takes far longer.
    """

    def __init__(
        self,
        *,
        path: str,
        turns: int = 50,
        list_commands: bool = False,
        format_penalty: float = 0.0,
        expert: bool = False,
    ) -> None:
        """`ConfigError` if there is no game in `path`, or if the package that plays it is not installed."""
        given = Path(path)
        files = sorted(given.rglob("*")) if given.is_dir() else [given]
        self._games = [file for file in files if file.suffix in (_ALFWORLD, _TEXTWORLD) and file.is_file()]
        if not self._games:
            raise ConfigError(f"there is no game in {path!r}: it is to be, or to hold, *.tw-pddl or *.z8")
        self._turns = turns
        self._list_commands = list_commands
        self._penalty = format_penalty
        self._expert = expert
        self._game: Any = None
        self._left = 0

    def reset(self, seed: int) -> Reset:
        """Begin the game that `seed` picks."""
        file = self._games[int(generator(seed, "textworld").integers(len(self._games)))]
        self._game = _started(file, self._expert)
        self._name = file.name
        self._state = self._game.reset()
        self._score, self._left = 0.0, self._turns
        return self._told(), self._info()

    def step(self, action: str) -> Step:
        """Tell the game to do what `action` says."""
        self._running()
        self._left -= 1
        possible, before = self._admissible(), self._key()
        command = " ".join(extract_answer(action).split())
        self._state, _, done = self._game.step(command)
        score = (self._state.get("score") or 0) / (self._state.get("max_score") or 1)
        gained, self._score = score - self._score, score
        valid = command in possible
        info = self._info() | {"valid": valid, "effective": self._key() != before}
        if done or not self._left:
            info["success"] = bool(self._state.get("won"))
            self._left = 0
        truncated = not done and not self._left
        return self._told(), gained - (0.0 if valid else self._penalty), bool(done), truncated, info

    def actions(self) -> Sequence[str]:
        """All commands that the game says may be given now."""
        self._running()
        return self._admissible()

    def expert(self) -> str:
        """The next command of a plan that wins; `RuntimeError` without the option `expert`, or if there is none."""
        self._running()
        plan = self._state.get("policy_commands")
        if not plan:
            raise RuntimeError(f"there is no plan for {self._name}: are games played with expert=True?")
        return str(plan[0])

    def close(self) -> None:
        """End the game."""
        if self._game is not None:
            self._game.close()

    def _running(self) -> None:
        if not self._left:
            raise RuntimeError("the game is over, or was never begun: call reset first")

    def _admissible(self) -> list[str]:
        return list(self._state.get("admissible_commands") or ())

    def _told(self) -> str:
        lines = ["", "You can:", *self._admissible()] if self._list_commands and self._left else []
        return "\n".join([str(self._state.get("feedback")).strip(), *lines])

    def _key(self) -> str:
        """Of all facts that the engine knows; of what it says if it knows none."""
        state = self._state
        facts = sorted(str(fact) for fact in state.get("facts") or () if fact.name != _MEMORY)
        known = facts or [state.get("description"), state.get("inventory"), state.get("feedback")]
        return hashlib.blake2b(f"{self._name}{known}".encode(), digest_size=8).hexdigest()

    def _info(self) -> dict[str, Any]:
        return {"state_key": self._key(), "admissible": self._admissible()}


def _started(file: Path, expert: bool) -> Any:
    """The engine with a game in it."""
    needed = "alfworld" if file.suffix == _ALFWORLD else "textworld"
    try:
        import textworld

        wrappers = []
        if file.suffix == _ALFWORLD:
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

            wrappers.append(AlfredDemangler)
    except ImportError as error:
        raise ConfigError(f"{file.name} is played by the package {needed}: pip install {needed} ({error})") from None
    infos = textworld.EnvInfos(
        feedback=True,
        description=True,
        inventory=True,
        facts=True,
        admissible_commands=True,
        score=True,
        max_score=True,
        won=True,
        policy_commands=expert,
    )
    return textworld.start(str(file), infos, wrappers=wrappers)

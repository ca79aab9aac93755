"""The households of ALFWorld in plain Python: find things, treat them, and put them where they belong."""

import hashlib
import re
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from antiphon.core.rng import generator
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import extract_answer
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig, require
from antiphon_envs.alfworld.expert import next_command
from antiphon_envs.alfworld.households import MIN_RECEPTACLES, TASK_TYPES, Household, draw_household
from antiphon_envs.alfworld.state import HELP, NOTHING, HouseholdState

_NAME = r"[a-z]+ \d+"
_COMMAND = re.compile(
    rf"look|inventory|help|(?:go to|open|close|use|examine) {_NAME}|take {_NAME} from {_NAME}|move {_NAME} to {_NAME}"
    rf"|(?:clean|heat|cool|slice) {_NAME} with {_NAME}"
)
_PUT = re.compile(rf"put ({_NAME}) (?:in/on|in|on) ({_NAME})")  # the older form of `move`


class AlfWorld(BaseEnvironment):
    """A task of ALFRED in a room of text, with the commands and answers of ALFWorld (Shridhar et al. 2021).

    The done task earns 1 and ends the episode; running out of turns earns 0. `info["admissible"]` lists the commands that do
    something now. README.md describes the commands and what differs from ALFWorld.
    """

    class Config(EnvironmentConfig):
        """Options of `alfworld`."""

        task_types: Sequence[str] = tuple(TASK_TYPES)
        """Task types that a seed draws from."""
        receptacles: int = Field(12, ge=MIN_RECEPTACLES)
        """Most receptacles in a room."""
        objects: int = Field(12, ge=2)
        """Most things in a room, one or two of which the task is about."""
        turns: int = Field(50, ge=1)
        """Turns after which the episode is truncated."""
        commands: Literal["unlisted", "listed", "lettered"] = "unlisted"
        """List the admissible commands in observations; `lettered` puts a letter before each, which is an action too."""
        format_penalty: float = Field(0.0, ge=0)
        """Cost of an action that cannot be parsed as a command."""

        @model_validator(mode="after")
        def _check(self) -> Self:
            known = bool(self.task_types) and set(self.task_types) <= set(TASK_TYPES)
            require(known, "task_types", list(self.task_types), f"a list of {', '.join(TASK_TYPES)}")
            return self

    config: Config
    name: ClassVar[str] = "alfworld"
    inline: ClassVar[bool] = True

    def __init__(self, *, household: Household | None = None, **options: Any) -> None:
        """With a `household`, every seed plays in it."""
        super().__init__(**options)
        self._household = household

    def reset(self, seed: int) -> Reset:
        """Begin a task; room and task depend on `seed` only."""
        config = self.config
        household = self._household or draw_household(
            generator(seed, "alfworld"), tuple(config.task_types), config.receptacles, config.objects
        )
        self._state = HouseholdState(household)
        self._room = repr(household)
        self._turns_left = config.turns
        self._commands = self._state.commands()
        self._key = self._state.key()
        return self._observation(f"{self._state.around()}\n\nYour task is to: {household.text}."), self._info()

    def step(self, action: str) -> Step:
        """Run a command, if it is admissible."""
        self._check_running()
        self._turns_left -= 1
        command = self._parse(action)
        run = self._commands.get(command)
        readable = run is not None or _COMMAND.fullmatch(command) is not None
        valid = run is not None or command == "help"
        answer = run() if run else HELP if valid else NOTHING
        before, self._key = self._key, self._state.key()
        self._commands = self._state.commands()
        done = self._key != before and self._state.is_done()
        over = done or not self._turns_left
        info = self._info() | {"valid": valid, "effective": self._key != before}
        if over:
            info["success"] = done
            self._turns_left = 0
        reward = float(done) - (0.0 if readable else self.config.format_penalty)
        return answer if over else self._observation(answer), reward, done, over and not done, info

    def actions(self) -> Sequence[str]:
        """Return the admissible commands, or their letters if commands are `lettered`."""
        self._check_running()
        return self._letters() if self.config.commands == "lettered" else self._admissible()

    def expert(self) -> str:
        """Return the command of a script that needs at most `2 * receptacles + 12` turns and knows what was seen only."""
        self._check_running()
        command = next_command(self._state)
        lettered = self.config.commands == "lettered"
        return self._letters()[self._admissible().index(command)] if lettered else command

    def _parse(self, action: str) -> str:
        """Return the command in its usual form; any other text as it is."""
        text = " ".join(extract_answer(action).casefold().rstrip(".").split())
        if self.config.commands == "lettered" and text in (letters := self._letters()):
            return self._admissible()[letters.index(text)]
        return _PUT.sub(r"move \1 to \2", text)

    def _admissible(self) -> list[str]:
        return sorted(self._commands)

    def _letters(self) -> list[str]:
        return [_letter(number) for number in range(len(self._commands))]

    def _observation(self, answer: str) -> str:
        """Return an answer, with the admissible commands if the options ask for them."""
        if self.config.commands == "unlisted":
            return answer
        listed = self._admissible()
        if self.config.commands == "lettered":
            listed = [f"{letter}: {command}" for letter, command in zip(self._letters(), listed, strict=True)]
        return "\n".join([answer, "", "You can:", *listed])

    def _info(self) -> dict[str, Any]:
        key = hashlib.blake2b(f"{self._room}{self._key}".encode(), digest_size=8).hexdigest()
        return {"state_key": key, "admissible": self._admissible()}


def _letter(number: int) -> str:
    """Return the label of a number: a, ..., z, aa, ab, ..."""
    rest, last = divmod(number, len(ascii_lowercase))
    return (_letter(rest - 1) if rest else "") + ascii_lowercase[last]

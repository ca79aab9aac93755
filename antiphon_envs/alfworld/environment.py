"""The household of ALFWorld, in plain Python: find things, treat them, put them where they belong."""

import hashlib
import re
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any, Literal, get_args

from antiphon.core.rng import generator
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import extract_answer
from antiphon_envs.alfworld.expert import next_command
from antiphon_envs.alfworld.rooms import NEEDED, TASK_TYPES, Household, draw_household
from antiphon_envs.alfworld.world import HELP, NOTHING, HouseholdState

Commands = Literal["unlisted", "listed", "lettered"]

_NAME = r"[a-z]+ \d+"
_FORMS = re.compile(
    rf"look|inventory|help|(?:go to|open|close|use|examine) {_NAME}|take {_NAME} from {_NAME}|move {_NAME} to {_NAME}"
    rf"|(?:clean|heat|cool|slice) {_NAME} with {_NAME}"
)
_OLDER = re.compile(rf"put ({_NAME}) (?:in/on|in|on) ({_NAME})")


class AlfWorld:
    """A task of ALFRED in a room of text, with the commands and the answers of ALFWorld (Shridhar et al. 2021).

    `task_types` are those that a seed draws from: `pick_and_place`, `look_in_light`, `clean_and_place`, `heat_and_place`,
    `cool_and_place`, `pick_two_and_place`; all by default. A room has at most `receptacles` places, of which some must be
    opened, and at most `objects` things, one or two of them those that the task is about. Rooms are drawn from tables of ours:
    success rates do not compare to those published for ALFWorld's games, which `textworld` plays where they are at hand. What
    may be done and what it does is as there (`benchmarks/alfworld_transcripts.py` compares).

    Actions are `go to X`, `take O from X`, `move O to X` (or the older `put O in/on X`), `open X`, `close X`, `use O`,
    `clean O with X`, `heat O with X`, `cool O with X`, `slice O with O`, `examine X`, `look`, `inventory`, `help`. With
    `commands: listed` an observation names all that may be done, with `lettered` a letter before each, which is an action too:
    for models that cannot spell. What cannot be done is answered `Nothing happens.`

    Chance, that is who draws from what may be done, does 1 in 100 of the default tasks, and 1 in 3 of `look_in_light` with 4
    receptacles and 3 things. A step takes some 50 microseconds.

    The done task is worth 1 and ends the episode, as does the last of `turns`. From what cannot be read as a command
    `format_penalty` is taken off. `info` also has `admissible`, the commands that do something now.
    """

    inline = True

    def __init__(
        self,
        *,
        task_types: Sequence[str] = tuple(TASK_TYPES),
        receptacles: int = 12,
        objects: int = 12,
        turns: int = 50,
        commands: Commands = "unlisted",
        format_penalty: float = 0.0,
        household: Household | None = None,
    ) -> None:
        """`household` is one to play in whatever the seed. `ValueError` if an option is not what it must be."""
        unknown = [name for name in task_types if name not in TASK_TYPES]
        if unknown or not task_types or isinstance(task_types, str):
            raise ValueError(f"task_types is a list of {', '.join(TASK_TYPES)}, not {task_types!r}")
        if receptacles < NEEDED or objects < 2 or turns < 1:
            raise ValueError(
                f"a household needs receptacles >= {NEEDED}, objects >= 2 and turns >= 1, "
                f"not receptacles={receptacles}, objects={objects}, turns={turns}"
            )
        if commands not in get_args(Commands):
            raise ValueError(f"commands is one of {', '.join(get_args(Commands))}, not {commands!r}")
        self._draw = tuple(task_types), receptacles, objects
        self._turns = turns
        self._commands = commands
        self._penalty = format_penalty
        self._household = household
        self._world: HouseholdState | None = None
        self._left = turns

    def reset(self, seed: int) -> Reset:
        """Begin; the room and the task depend on `seed` only."""
        household = self._household or draw_household(generator(seed, "alfworld"), *self._draw)
        self._world = HouseholdState(household)
        self._room = repr(household)
        self._left = self._turns
        self._possible = self._world.commands()
        self._key = self._world.key()
        return self._told(f"{self._world.around()}\n\nYour task is to: {household.text}."), self._info()

    def step(self, action: str) -> Step:
        """Do what `action` says, if it can be done."""
        world = self._running()
        self._left -= 1
        command = self._read(action)
        act = self._possible.get(command)
        readable = act is not None or _FORMS.fullmatch(command) is not None
        valid = act is not None or command == "help"
        answer = act() if act else HELP if valid else NOTHING
        before, self._key = self._key, world.key()
        self._possible = world.commands()
        won = self._key != before and world.won()
        over = won or not self._left
        info = self._info() | {"valid": valid, "effective": self._key != before}
        if over:
            info["success"] = won
            self._left = 0
        reward = float(won) - (0.0 if readable else self._penalty)
        return answer if over else self._told(answer), reward, won, over and not won, info

    def actions(self) -> Sequence[str]:
        """All commands that do something now, or their letters if commands are `lettered`."""
        self._running()
        return self._labels() if self._commands == "lettered" else self._admissible()

    def expert(self) -> str:
        """What to do now to have the task done within `2 * receptacles + 12` turns, knowing only what was told so far."""
        command = next_command(self._running())
        return self._labels()[self._admissible().index(command)] if self._commands == "lettered" else command

    def close(self) -> None:
        """Nothing is held."""

    def _running(self) -> HouseholdState:
        if self._world is None or not self._left:
            raise RuntimeError("the task is over, or was never begun: call reset first")
        return self._world

    def _read(self, action: str) -> str:
        """The command that was said, in one form; whatever was said if it is none."""
        text = " ".join(extract_answer(action).casefold().rstrip(".").split())
        if self._commands == "lettered" and text in (labels := self._labels()):
            return self._admissible()[labels.index(text)]
        return _OLDER.sub(r"move \1 to \2", text)

    def _admissible(self) -> list[str]:
        return sorted(self._possible)

    def _labels(self) -> list[str]:
        return [_label(i) for i in range(len(self._possible))]

    def _told(self, answer: str) -> str:
        """An answer, and what may be done next if that is wanted."""
        if self._commands == "unlisted":
            return answer
        listed = self._admissible()
        if self._commands == "lettered":
            listed = [f"{label}: {command}" for label, command in zip(self._labels(), listed, strict=True)]
        return "\n".join([answer, "", "You can:", *listed])

    def _info(self) -> dict[str, Any]:
        key = hashlib.blake2b(f"{self._room}{self._key}".encode(), digest_size=8).hexdigest()
        return {"state_key": key, "admissible": self._admissible()}


def _label(number: int) -> str:
    """A letter, or more of them: a, ..., z, aa, ab, ..."""
    rest, last = divmod(number, len(ascii_lowercase))
    return (_label(rest - 1) if rest else "") + ascii_lowercase[last]

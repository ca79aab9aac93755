"""The rules of ALFWorld: admissible commands, their effects and their answers.

Preconditions and effects are those of ALFWorld's planning domain (`alfred.pddl`). Some are surprising: the agent cannot go to
where it is, a thing can be examined only in the hand, looking around from the middle of the room shows nothing, a heated thing
is no longer cool, and a microwave heats with its door open or shut.
"""

from bisect import insort
from collections.abc import Callable, Mapping
from functools import partial

from antiphon_envs.alfworld.households import Household
from antiphon_envs.alfworld.kinds import (
    APPLIANCES,
    HOLDS,
    KNIVES,
    LAMP,
    OPENABLE,
    SLICEABLE,
    TREATED,
    VESSELS,
    kind_of,
)

NOTHING = "Nothing happens."
HELP = (
    "You can: go to, open, close, examine a place; take a thing from it, move a thing to it; examine a thing, use it, \
clean, heat or cool it with a place, slice it with a thing; look; inventory."
)
_WORDS = {"heat": "hot", "cool": "cool", "clean": "clean"}
_OPPOSITE = {"heat": "cool", "cool": "heat"}


class HouseholdState:
    """A household and the agent in it."""

    def __init__(self, household: Household) -> None:
        self.household = household
        self.at: str | None = None
        """The receptacle in front of the agent; None in the middle of the room."""
        self.held: str | None = None
        """The thing in the agent's hand."""
        self.opened: set[str] = set()
        self.treated: dict[str, set[str]] = {name: set() for name in household.objects}
        """Treatments of each thing: clean, heat, cool, slice, use."""
        self.seen: set[str] = set()
        """The receptacles whose contents the agent has seen."""
        self._rank = {name: i for i, name in enumerate(display_order(household.objects))}
        self._places = display_order(household.receptacles)
        self.contents: dict[str, list[str]] = {place: [] for place in self._places}
        for name in self._rank:
            self.contents[household.objects[name]].append(name)
        self._go = {f"go to {place}": partial(self._go_to, place) for place in self._places}

    def key(self) -> tuple[object, ...]:
        """Return the whole state but for what the agent has seen."""
        treated = tuple(tuple(sorted(each)) for each in self.treated.values())
        return self.at, self.held, tuple(sorted(self.opened)), tuple(map(tuple, self.contents.values())), treated

    def is_done(self) -> bool:
        """Return True if the task is done."""
        household = self.household
        if household.task.light:
            lit = any(
                kind_of(name) == LAMP and "use" in self.treated[name] for name in self.contents.get(self.at or "", ())
            )
            return lit and self.held is not None and kind_of(self.held) == household.object
        return any(
            sum(map(self.is_ready, self.contents[place])) >= household.task.count
            for place in self._places
            if kind_of(place) == household.receptacle
        )

    def is_ready(self, name: str) -> bool:
        """Return True if a thing is of the task's kind and was treated as the task says."""
        treatment = self.household.task.treatment
        return kind_of(name) == self.household.object and (not treatment or treatment in self.treated[name])

    def is_open(self, place: str) -> bool:
        """Return True if the agent can see and reach into a receptacle."""
        return place in self.opened or kind_of(place) not in OPENABLE

    def commands(self) -> dict[str, Callable[[], str]]:
        """Return the admissible commands; each is a function that changes the state and returns the answer."""
        found: dict[str, Callable[[], str]] = {"inventory": self._inventory, "look": self._look}
        found.update(self._go)
        if self.held is not None:
            found[f"examine {self.held}"] = partial(self._examine, self.held)
        if self.at is None:
            return found
        del found[f"go to {self.at}"]
        found[f"examine {self.at}"] = partial(self._describe, self.at)
        if kind_of(self.at) in OPENABLE:
            verb, act = ("close", self._close) if self.at in self.opened else ("open", self._open)
            found[f"{verb} {self.at}"] = partial(act, self.at)
        self._add_contents(found, self.at)
        if self.held is not None:
            self._add_held(found, self.at, self.held)
        return found

    def _add_contents(self, found: dict[str, Callable[[], str]], place: str) -> None:
        """Add the commands for things in a receptacle."""
        for name in self.contents[place]:
            if kind_of(name) == LAMP:
                found[f"use {name}"] = partial(self._use, name)
            elif self.held is None and self.is_open(place):
                found[f"take {name} from {place}"] = partial(self._take, name, place)

    def _add_held(self, found: dict[str, Callable[[], str]], place: str, held: str) -> None:
        """Add the commands for the thing in the hand."""
        kind = kind_of(held)
        if self.is_open(place) and kind in HOLDS[kind_of(place)]:
            found[f"move {held} to {place}"] = partial(self._move, held, place)
        for treatment, appliance in APPLIANCES.items():
            if kind_of(place) == appliance and kind in TREATED[treatment]:
                found[f"{treatment} {held} with {place}"] = partial(self._treat, treatment, held, place)
        if kind in KNIVES:
            for name in self.contents[place]:  # also through a closed door, as in the domain
                if kind_of(name) in SLICEABLE:
                    found[f"slice {name} with {held}"] = partial(self._slice, name, held)

    def around(self) -> str:
        """Describe the room to an agent that enters it."""
        return self._in_the_middle(describe_items(self._places))

    def _in_the_middle(self, seen: str) -> str:
        return f"You are in the middle of a room. Looking quickly around you, you see {seen}."

    def _look(self) -> str:
        if self.at is None:
            return self._in_the_middle("nothing")  # within reach; ALFWorld uses the same words
        return f"You are facing the {self.at}. Next to it, you see nothing."

    def _inventory(self) -> str:
        return "You are not carrying anything." if self.held is None else f"You are carrying: a {self.held}."

    def _go_to(self, place: str) -> str:
        self.at = place
        return f"You arrive at {place}. {self._describe(place)}"

    def _describe(self, place: str) -> str:
        if not self.is_open(place):
            return f"The {place} is closed."
        self.seen.add(place)
        inside = describe_items(self.contents[place])
        if place in self.opened:
            return f"The {place} is open. In it, you see {inside}."
        return f"On the {place}, you see {inside}."

    def _open(self, place: str) -> str:
        self.opened.add(place)
        return f"You open the {place}. {self._describe(place)}"

    def _close(self, place: str) -> str:
        self.opened.remove(place)
        return f"You close the {place}."

    def _take(self, name: str, place: str) -> str:
        self.contents[place].remove(name)
        self.held = name
        return f"You pick up the {name} from the {place}."

    def _move(self, name: str, place: str) -> str:
        insort(self.contents[place], name, key=self._rank.__getitem__)
        self.held = None
        return f"You move the {name} to the {place}."

    def _treat(self, treatment: str, name: str, place: str) -> str:
        self.treated[name].add(treatment)
        self.treated[name].discard(_OPPOSITE.get(treatment, ""))
        return f"You {treatment} the {name} using the {place}."

    def _slice(self, name: str, knife: str) -> str:
        self.treated[name].add("slice")
        return f"You sliced the {name} with the {knife}."

    def _use(self, name: str) -> str:
        self.treated[name].add("use")  # it stays on: a second time has the same answer and counts too
        return f"You turn on the {name}."

    def _examine(self, name: str) -> str:
        kind, treated = kind_of(name), self.treated[name]
        if kind in VESSELS:
            return f"This is a normal {name}. In it, you see nothing."
        words = " and ".join(word for treatment, word in _WORDS.items() if treatment in treated)
        if "slice" in treated:
            return f"This is a {words} sliced {name}." if words else f"This is a sliced {name}."
        if words == "cool":
            words = "cold"
        return f"This is a {words} {name}." if words else f"There's nothing special about {name}."


def display_order(names: Mapping[str, str] | tuple[str, ...]) -> tuple[str, ...]:
    """Sort names as ALFWorld lists them: by kind, the highest number first."""
    return tuple(sorted(names, key=lambda name: (kind_of(name), -int(name.partition(" ")[2]))))


def describe_items(names: list[str] | tuple[str, ...]) -> str:
    """List things in words.

    >>> describe_items(["mug 2", "mug 1"])
    'a mug 2, and a mug 1'
    """
    if len(names) < 2:
        return f"a {names[0]}" if names else "nothing"
    return f"{', '.join(f'a {name}' for name in names[:-1])}, and a {names[-1]}"

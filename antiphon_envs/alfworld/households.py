"""Draw the households of ALFWorld: a room, the things in it, and a task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from antiphon_envs.alfworld.kinds import (
    APPLIANCES,
    HOLDS,
    LAMP,
    LAMP_PLACES,
    MOST_OF_A_KIND,
    ROOMS,
    TREATED,
    RoomPlan,
    kind_of,
)

MIN_RECEPTACLES = 3  # that the largest task needs: where the thing is, where it is treated, where it goes


@dataclass(frozen=True, slots=True)
class TaskType:
    """A task type of ALFRED."""

    text: str
    """The task in words, with `{object}` and `{receptacle}`."""
    rooms: tuple[str, ...] = tuple(ROOMS)
    count: int = 1
    """Things to be put there."""
    treatment: str = ""
    """Treatment that the thing needs: clean, heat, cool, or none."""
    light: bool = False
    """The thing must be held beside a lamp that is on, instead of being put anywhere."""


TASK_TYPES: Mapping[str, TaskType] = {
    "pick_and_place": TaskType("put a {object} in {receptacle}"),
    "look_in_light": TaskType("look at {object} under the desklamp", ("living room", "bedroom"), light=True),
    "clean_and_place": TaskType("put a clean {object} in {receptacle}", ("kitchen", "bathroom"), treatment="clean"),
    "heat_and_place": TaskType("put a hot {object} in {receptacle}", ("kitchen",), treatment="heat"),
    "cool_and_place": TaskType("put a cool {object} in {receptacle}", ("kitchen",), treatment="cool"),
    "pick_two_and_place": TaskType("put two {object} in {receptacle}", count=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Household:
    """A room at the start and the task in it. Names are a kind and a number: `mug 2`."""

    task_type: str
    object: str
    """Kind of thing that the task is about."""
    receptacle: str
    """Kind of receptacle that it must be put into; empty if the task is to look at it."""
    receptacles: tuple[str, ...]
    objects: Mapping[str, str]
    """Name of each thing, and the receptacle that holds it."""

    @property
    def task(self) -> TaskType:
        """The type of the task."""
        return TASK_TYPES[self.task_type]

    @property
    def text(self) -> str:
        """The task in words."""
        return self.task.text.format(object=self.object, receptacle=self.receptacle)


def draw_household(rng: np.random.Generator, task_types: Sequence[str], receptacles: int, objects: int) -> Household:
    """Draw a room with at most so many receptacles and things, in which a task of one of the types can be done."""
    task_type = _pick(rng, task_types)
    task = TASK_TYPES[task_type]
    plan = ROOMS[_pick(rng, task.rooms)]
    thing, start, target = _pick(rng, _possible_goals(task, plan))
    needed = {start, target or _pick(rng, sorted(LAMP_PLACES & set(plan.receptacles)))}
    if task.treatment:
        needed.add(APPLIANCES[task.treatment])
    places = _number(_draw_receptacles(rng, needed, plan, receptacles))
    placed: list[tuple[str, str]] = []  # kind, receptacle

    def put(kind: str, wanted: frozenset[str]) -> None:
        fitting = [place for place in places if kind_of(place) in wanted]
        if fitting:
            placed.append((kind, _pick(rng, fitting)))

    for _ in range(task.count):
        put(thing, _receptacles_for(thing) - {target})
    if task.light:
        put(LAMP, LAMP_PLACES)
    drawn = [kind for kind in plan.objects for _ in range(MOST_OF_A_KIND - task.count * (kind == thing))]
    rng.shuffle(drawn)
    for kind in drawn[: max(objects - len(placed), 0)]:
        put(kind, _receptacles_for(kind) - ({target} if kind == thing else set()))
    names = _number([kind for kind, _ in placed])
    where = {name: place for name, (_, place) in zip(names, placed, strict=True)}
    return Household(task_type=task_type, object=thing, receptacle=target, receptacles=tuple(places), objects=where)


def _pick(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _receptacles_for(kind: str) -> frozenset[str]:
    return frozenset(place for place, held in HOLDS.items() if kind in held)


def _possible_goals(task: TaskType, plan: RoomPlan) -> list[tuple[str, str, str]]:
    """Return all goals of a task type in a room: kinds of the thing, of its receptacle at the start and of its target."""
    things = [kind for kind in plan.objects if not task.treatment or kind in TREATED[task.treatment]]
    found = []
    for thing in things:
        places = [place for place in plan.receptacles if thing in HOLDS[place]]
        targets = [""] if task.light else [place for place in places if place != APPLIANCES.get(task.treatment)]
        found += [(thing, start, target) for target in targets for start in places if start != target]
    return found


def _draw_receptacles(rng: np.random.Generator, needed: set[str], plan: RoomPlan, most: int) -> list[str]:
    """Draw kinds of receptacles: those that are `needed`, and others of the room, at most `most` in all."""
    others = [kind for kind, number in plan.receptacles.items() for _ in range(number - (kind in needed))]
    rng.shuffle(others)
    return sorted([*needed, *others[: most - len(needed)]])


def _number(kinds: list[str]) -> list[str]:
    counts: dict[str, int] = {}
    names = []
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
        names.append(f"{kind} {counts[kind]}")
    return names

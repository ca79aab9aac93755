"""What the households of `alfworld` are made of: which things there are, where they belong, and how one is drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_GROUPS = {  # kinds of things that are kept in the same places
    "bottles": "glassbottle winebottle",
    "cookware": "kettle pan pot",
    "cutlery": "butterknife fork knife ladle spatula spoon",
    "devices": "alarmclock laptop",
    "dishes": "bowl cup mug plate",
    "food": "apple bread egg lettuce potato tomato",
    "ornaments": "candle statue vase",
    "paper": "tissuebox toiletpaper",
    "reading": "book newspaper",
    "seasoning": "peppershaker saltshaker",
    "sports": "baseballbat basketball tennisracket",
    "trinkets": "cd cellphone creditcard keychain pen pencil remotecontrol watch",
    "washing": "cloth dishsponge handtowel soapbar soapbottle spraybottle",
}


def _kinds(words: str) -> frozenset[str]:
    """Kinds of things, from their names and the names of groups."""
    return frozenset(kind for word in words.split() for kind in _GROUPS.get(word, word).split())


HOLDS: Mapping[str, frozenset[str]] = {  # kind of receptacle -> the kinds of things that may be put there
    "armchair": _kinds("reading pillow laptop cellphone remotecontrol keychain"),
    "bathtubbasin": _kinds("cloth dishsponge handtowel soapbar"),
    "bed": _kinds("reading sports pillow laptop cellphone"),
    "cabinet": _kinds("bottles cookware dishes ornaments paper seasoning washing"),
    "cart": _kinds("ornaments paper washing"),
    "coffeemachine": _kinds("mug"),
    "coffeetable": _kinds("devices dishes ornaments reading trinkets tissuebox"),
    "countertop": _kinds("bottles cookware cutlery dishes food ornaments paper seasoning washing cellphone keychain"),
    "desk": _kinds("devices ornaments reading sports trinkets mug cup tissuebox"),
    "diningtable": _kinds("bottles cookware cutlery devices dishes food ornaments reading seasoning trinkets"),
    "drawer": _kinds("cutlery paper reading seasoning trinkets cloth dishsponge handtowel soapbar"),
    "dresser": _kinds("devices ornaments paper reading sports trinkets"),
    "fridge": _kinds("bottles dishes food pan pot"),
    "garbagecan": _kinds(
        "food paper newspaper cd pen pencil winebottle cloth dishsponge soapbar soapbottle spraybottle"
    ),
    "handtowelholder": _kinds("handtowel"),
    "laundryhamper": _kinds("cloth"),
    "microwave": _kinds("dishes apple bread egg potato tomato"),
    "safe": _kinds("cd cellphone creditcard keychain watch statue"),
    "shelf": _kinds(
        "bottles dishes ornaments paper reading seasoning trinkets soapbar soapbottle spraybottle alarmclock"
    ),
    "sidetable": _kinds("devices ornaments paper reading trinkets mug cup plate"),
    "sinkbasin": _kinds("cookware cutlery dishes apple egg lettuce potato tomato cloth dishsponge handtowel soapbar"),
    "sofa": _kinds("reading pillow laptop cellphone creditcard keychain remotecontrol"),
    "stoveburner": _kinds("cookware"),
    "toilet": _kinds("paper washing candle newspaper"),
    "toiletpaperhanger": _kinds("toiletpaper"),
    "tvstand": _kinds("remotecontrol tissuebox cd"),
}
OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})
CLEANABLE = _kinds("cookware cutlery dishes apple egg lettuce potato tomato cloth dishsponge soapbar")
HEATABLE = _kinds("apple bread egg potato tomato cup mug plate")
COOLABLE = _kinds("food dishes pan pot winebottle")
SLICEABLE = _kinds("food")
KNIVES = _kinds("butterknife knife")
VESSELS = _kinds("dishes pan pot")  # things that things could be put into, though no command does
LAMP = "desklamp"
_LAMP_PLACES = frozenset({"desk", "dresser", "shelf", "sidetable"})
_SAME_KIND = 3  # of things in a room, at most


@dataclass(frozen=True, slots=True)
class _Plan:
    """A sort of room."""

    receptacles: Mapping[str, int]  # kind -> most of them
    objects: tuple[str, ...]


def _plan(objects: str, **receptacles: int) -> _Plan:
    return _Plan(receptacles, tuple(sorted(_kinds(objects))))


_ROOMS = {
    "kitchen": _plan(
        "bottles cookware cutlery dishes food seasoning dishsponge soapbottle vase",
        cabinet=8,
        coffeemachine=1,
        countertop=3,
        diningtable=1,
        drawer=6,
        fridge=1,
        garbagecan=1,
        microwave=1,
        shelf=3,
        sinkbasin=1,
        stoveburner=4,
    ),
    "living room": _plan(
        "devices ornaments reading trinkets tissuebox pillow",
        armchair=2,
        coffeetable=2,
        desk=1,
        diningtable=1,
        drawer=6,
        dresser=1,
        garbagecan=1,
        shelf=4,
        sidetable=2,
        sofa=1,
        tvstand=1,
    ),
    "bedroom": _plan(
        "devices ornaments reading sports trinkets mug pillow",
        armchair=1,
        bed=1,
        desk=2,
        drawer=8,
        dresser=1,
        garbagecan=1,
        laundryhamper=1,
        safe=1,
        shelf=6,
        sidetable=2,
    ),
    "bathroom": _plan(
        "paper washing candle",
        bathtubbasin=1,
        cabinet=6,
        cart=1,
        countertop=2,
        drawer=4,
        garbagecan=1,
        handtowelholder=2,
        shelf=2,
        sinkbasin=2,
        toilet=1,
        toiletpaperhanger=1,
    ),
}


@dataclass(frozen=True, slots=True)
class TaskType:
    """One of the sorts of tasks of ALFRED."""

    text: str
    """What is told of it, with `object` and `receptacle`."""
    rooms: tuple[str, ...] = tuple(_ROOMS)
    count: int = 1
    """How many things are to be put there."""
    treatment: str = ""
    """What must have been done to the thing: clean, heat, cool, or nothing."""
    light: bool = False
    """The thing is to be held where a lamp was turned on, not to be put anywhere."""


TASK_TYPES: Mapping[str, TaskType] = {
    "pick_and_place": TaskType("put a {object} in {receptacle}"),
    "look_in_light": TaskType("look at {object} under the desklamp", ("living room", "bedroom"), light=True),
    "clean_and_place": TaskType("put a clean {object} in {receptacle}", ("kitchen", "bathroom"), treatment="clean"),
    "heat_and_place": TaskType("put a hot {object} in {receptacle}", ("kitchen",), treatment="heat"),
    "cool_and_place": TaskType("put a cool {object} in {receptacle}", ("kitchen",), treatment="cool"),
    "pick_two_and_place": TaskType("put two {object} in {receptacle}", count=2),
}
APPLIANCES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}  # treatment -> what it is done with
TREATED = {"clean": CLEANABLE, "heat": HEATABLE, "cool": COOLABLE}
NEEDED = 3  # receptacles that the largest task needs: where the thing is, where it is treated, where it goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Household:
    """A room as it is found, and what is to be done in it. Names are a kind and a number: `mug 2`."""

    task_type: str
    object: str
    """The kind of thing that the task is about."""
    receptacle: str
    """The kind of place that it belongs; empty if it is only to be looked at."""
    receptacles: tuple[str, ...]
    objects: Mapping[str, str]
    """Each thing's name, and that of the receptacle that it is in."""

    @property
    def task(self) -> TaskType:
        """What sort of task it is."""
        return TASK_TYPES[self.task_type]

    @property
    def text(self) -> str:
        """The task in words."""
        return self.task.text.format(object=self.object, receptacle=self.receptacle)


def kind_of(name: str) -> str:
    """The kind of a thing or a receptacle.

    >>> kind_of("mug 2")
    'mug'
    """
    return name.partition(" ")[0]


def draw_household(rng: np.random.Generator, task_types: Sequence[str], receptacles: int, objects: int) -> Household:
    """A room with at most so many receptacles and things, in which a task of one of `task_types` can be done."""
    task_type = _pick(rng, task_types)
    task = TASK_TYPES[task_type]
    plan = _ROOMS[_pick(rng, task.rooms)]
    thing, start, target = _pick(rng, _goals(task, plan))
    needed = {start, target or _pick(rng, sorted(_LAMP_PLACES & set(plan.receptacles)))}
    if task.treatment:
        needed.add(APPLIANCES[task.treatment])
    places = _numbered(_fill(rng, needed, plan, receptacles))
    found: list[tuple[str, str]] = []  # kind, receptacle

    def put(kind: str, wanted: frozenset[str]) -> None:
        fitting = [place for place in places if kind_of(place) in wanted]
        if fitting:
            found.append((kind, _pick(rng, fitting)))

    for _ in range(task.count):
        put(thing, _places_of(thing) - {target})
    if task.light:
        put(LAMP, _LAMP_PLACES)
    drawn = [kind for kind in plan.objects for _ in range(_SAME_KIND - task.count * (kind == thing))]
    rng.shuffle(drawn)
    for kind in drawn[: max(objects - len(found), 0)]:
        put(kind, _places_of(kind) - ({target} if kind == thing else set()))
    names = _numbered([kind for kind, _ in found])
    where = {name: place for name, (_, place) in zip(names, found, strict=True)}
    return Household(task_type=task_type, object=thing, receptacle=target, receptacles=tuple(places), objects=where)


def _pick(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _places_of(kind: str) -> frozenset[str]:
    return frozenset(place for place, held in HOLDS.items() if kind in held)


def _goals(task: TaskType, plan: _Plan) -> list[tuple[str, str, str]]:
    """All that a task may be about in a room: kind of thing, of where it may be at first, and of where it goes."""
    things = [kind for kind in plan.objects if not task.treatment or kind in TREATED[task.treatment]]
    found = []
    for thing in things:
        places = [place for place in plan.receptacles if thing in HOLDS[place]]
        targets = [""] if task.light else [place for place in places if place != APPLIANCES.get(task.treatment)]
        found += [(thing, start, target) for target in targets for start in places if start != target]
    return found


def _fill(rng: np.random.Generator, needed: set[str], plan: _Plan, most: int) -> list[str]:
    """Kinds of receptacles: those that are `needed`, and others of the room, at most `most` in all."""
    others = [kind for kind, number in plan.receptacles.items() for _ in range(number - (kind in needed))]
    rng.shuffle(others)
    return sorted([*needed, *others[: most - len(needed)]])


def _numbered(kinds: list[str]) -> list[str]:
    counts: dict[str, int] = {}
    names = []
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
        names.append(f"{kind} {counts[kind]}")
    return names

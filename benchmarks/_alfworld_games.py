"""Households as games for the engine of ALFWorld itself, to compare ours with it. Needs the package alfworld."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.rng import generator
from antiphon.tasks.environments.adapters.textworld import TextWorld
from antiphon_envs.alfworld.environment import AlfWorld
from antiphon_envs.alfworld.households import Household
from antiphon_envs.alfworld.kinds import (
    CLEANABLE,
    COOLABLE,
    HEATABLE,
    HOLDS,
    LAMP,
    OPENABLE,
    SLICEABLE,
    VESSELS,
    kind_of,
)

_TRAITS = {"cleanable": CLEANABLE, "heatable": HEATABLE, "coolable": COOLABLE, "sliceable": SLICEABLE}
_START = "loc_0"
_BANNER = "-= Welcome to TextWorld, ALFRED! =-"
_SAYINGS = (
    "{0}",
    "go to {0}",
    "open {0}",
    "close {0}",
    "examine {0}",
    "use {0}",
    "take {0} from {1}",
    "move {0} to {1}",
    "clean {0} with {1}",
    "heat {0} with {1}",
    "cool {0} with {1}",
    "slice {0} with {1}",
    "look at {0}",
    "dance",
)


def write_game(household: Household, path: Path) -> None:
    """Write a game of ALFWorld (`*.tw-pddl`) that allows the same commands as `HouseholdState(household)`.

    Raises:
        ConfigError: The package alfworld, whose domain and grammar the game holds, is not installed.
    """
    found = find_spec("alfworld")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("games of ALFWorld need its domain and its grammar: pip install alfworld")
    data = Path(found.submodule_search_locations[0]) / "data"
    grammar = (data / "alfred.twl2").read_text().replace("UNKNOWN GOAL", household.text)
    game = {
        "pddl_domain": (data / "alfred.pddl").read_text(),
        "grammar": grammar,
        "pddl_problem": to_pddl(household),
        "solvable": True,
    }
    path.write_text(json.dumps(game))


def to_pddl(household: Household) -> str:
    """A household in PDDL, for the domain of ALFWorld."""
    ids = _ids((*household.receptacles, *household.objects))
    places = {place: f"loc_{i}" for i, place in enumerate(household.receptacles, 1)}
    facts = "\n".join(f"({fact})" for fact in _facts(household, ids, places))
    kinds = {kind_of(name) for name in household.objects} | {household.object} | frozenset().union(*HOLDS.values())
    declared = {
        "agent": ["agent1"],
        "location": [_START, *places.values()],
        "receptacle": [ids[name] for name in household.receptacles],
        "object": [ids[name] for name in household.objects],
        "rtype": sorted(f"{kind}Type" for kind in HOLDS),
        "otype": sorted(f"{kind}Type" for kind in kinds | {"knife", "butterknife"}),
    }
    objects = "\n".join(f"{' '.join(names)} - {sort}" for sort, names in declared.items())
    return f"""(define (problem household) (:domain alfred)
(:objects
{objects})
(:init
{facts}
(= (total-cost) 0))
(:goal {_goal(household)})
(:metric minimize (total-cost)))"""


def _ids(names: tuple[str, ...]) -> dict[str, str]:
    """Names as ALFWorld mangles them. It numbers what is of one kind backwards, so that the last is the first."""
    ids = {}
    for name in names:
        kind, number = name.split()
        stem, basin = kind.removesuffix("basin"), "_bar_basin" if kind.endswith("basin") else ""
        ids[name] = f"{stem}_bar_{999 - int(number)}{basin}"
    return ids


def _facts(household: Household, ids: dict[str, str], places: dict[str, str]) -> Iterator[str]:
    yield f"atLocation agent1 {_START}"
    for place, held in HOLDS.items():
        yield from (f"canContain {place}Type {kind}Type" for kind in sorted(held))
    for place in household.receptacles:
        yield f"receptacleAtLocation {ids[place]} {places[place]}"
        yield f"receptacleType {ids[place]} {kind_of(place)}Type"
        if kind_of(place) in OPENABLE:
            yield f"openable {ids[place]}"
    for name, place in household.objects.items():
        yield f"objectType {ids[name]} {kind_of(name)}Type"
        yield f"inReceptacle {ids[name]} {ids[place]}"
        yield f"objectAtLocation {ids[name]} {places[place]}"
        yield f"{'toggleable' if kind_of(name) == LAMP else 'pickupable'} {ids[name]}"
        yield from (f"{trait} {ids[name]}" for trait, kinds in _TRAITS.items() if kind_of(name) in kinds)
        if kind_of(name) in VESSELS:
            yield f"isReceptacleObject {ids[name]}"


_TREATED = {"": "", "clean": "(isClean {0})", "heat": "(isHot {0})", "cool": "(isCool {0})"}


def _goal(household: Household) -> str:
    """What must hold in the end, as ALFWorld's goals say it."""
    task, kind = household.task, f"{household.object}Type"
    if task.light:
        return f"""(and
 (exists (?o - object ?a - agent) (and (objectType ?o {kind}) (holds ?a ?o)))
 (exists (?t - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?t {LAMP}Type) (toggleable ?t)
  (isToggled ?t) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?t ?r))))"""
    things = [f"?o{i}" for i in range(task.count)]
    done = " ".join(
        f"(objectType {thing} {kind}) (inReceptacle {thing} ?r) {_TREATED[task.treatment].format(thing)}"
        for thing in things
    )
    differ = "(not (= ?o0 ?o1))" if task.count > 1 else ""
    quantified = f"(exists ({' '.join(things)} - object) (and {differ} {done}))"
    return f"(exists (?r - receptacle) (and (receptacleType ?r {household.receptacle}Type) {quantified}))"


@dataclass(frozen=True, slots=True)
class EngineReply:
    """What one engine answers to a command."""

    observation: str
    reward: float
    won: bool
    admissible: frozenset[str]


def digest_commands(admissible: Iterable[str]) -> str:
    """Of a set of commands."""
    return hashlib.blake2b("\n".join(sorted(admissible)).encode(), digest_size=6).hexdigest()


def verb_of(command: str) -> str:
    """What kind of command it is.

    >>> verb_of("slice egg 1 with knife 1")
    'slice'
    """
    return command.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """A command, and what our engine and ALFWorld's own answer. The first has no command."""

    command: str
    ours: EngineReply
    theirs: EngineReply


def compare_engines(household: Household, choose: Callable[[AlfWorld], str], turns: int = 40) -> Iterator[ComparedStep]:
    """Play a household in both engines at once, as `choose` says.

    Two things differ on purpose and are left out: the banner that ALFWorld begins with, and the command `help`."""
    with TemporaryDirectory() as scratch:
        write_game(household, Path(scratch) / "game.tw-pddl")
        theirs = TextWorld(path=scratch, turns=turns)
        ours = AlfWorld(household=household, turns=turns)
        first, info = theirs.reset(0)
        observation, own = ours.reset(0)
        begun = EngineReply(first.removeprefix(_BANNER).strip(), 0.0, False, _commands(info))
        yield ComparedStep("", EngineReply(observation, 0.0, False, _commands(own)), begun)
        over = False
        while not over:
            command = choose(ours)
            told, over = _answer(ours, command)
            yield ComparedStep(command, told, _answer(theirs, command)[0])
        theirs.close()


def _answer(world: Any, command: str) -> tuple[EngineReply, bool]:
    """What a world answers, and whether that was all."""
    observation, reward, terminated, truncated, info = world.step(command)
    return EngineReply(observation, reward, terminated, _commands(info)), terminated or truncated


def _commands(info: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(info["admissible"]) - {"help"}


def mixed_policy(household: Household, seed: int, expert: float = 0.5) -> Callable[[AlfWorld], str]:
    """A policy to compare engines with: a share of commands is the `expert`'s, 0.15 are things that could be said, the others
    are drawn from those that are admissible, every verb as often."""
    rng = generator(seed, "alfworld_mixed")
    names = [*household.receptacles, *household.objects, "", "moon 1", "mug 77"]

    def choose(world: AlfWorld) -> str:
        draw = rng.random()
        if draw < expert:
            return world.expert()
        if draw < 0.85:
            verb = rng.choice(sorted({verb_of(command) for command in world.actions()}))
            return str(rng.choice([command for command in world.actions() if verb_of(command) == verb]))
        form = str(rng.choice(_SAYINGS))
        return form.format(*(str(name) for name in rng.choice(names, size=2))).strip()

    return choose

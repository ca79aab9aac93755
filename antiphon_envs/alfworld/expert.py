"""Who does the tasks of `alfworld` by script, knowing only what was told so far."""

from collections.abc import Iterator

from antiphon_envs.alfworld.rooms import APPLIANCES, HOLDS, LAMP, OPENABLE, kind_of
from antiphon_envs.alfworld.world import HouseholdState


def next_command(world: HouseholdState) -> str:
    """What brings the task nearer to its end, from whatever state: look for the thing, treat it, put it where it belongs."""
    if world.household.task.light:
        return _light(world)
    target = _target(world)
    if world.held is None:
        return _fetch(world, without=target)
    if kind_of(world.held) != world.household.object:
        return _put_away(world, world.held)
    treatment = world.household.task.treatment
    if not world.is_ready(world.held):
        appliance = _first(world, APPLIANCES[treatment])
        return _at(world, appliance) or f"{treatment} {world.held} with {appliance}"
    return _reach(world, target) or f"move {world.held} to {target}"


def _light(world: HouseholdState) -> str:
    if world.held is None:
        return _fetch(world)
    if kind_of(world.held) != world.household.object:
        return _put_away(world, world.held)
    for place in _known(world, LAMP):
        return _at(world, place) or f"use {next(name for name in world.contents[place] if kind_of(name) == LAMP)}"
    return _explore(world, LAMP)


def _target(world: HouseholdState) -> str:
    """Where to put things: the place that has most of them already."""
    places = [place for place in world.contents if kind_of(place) == world.household.receptacle]
    return max(places, key=lambda place: sum(map(world.is_ready, world.contents[place])) if place in world.seen else 0)


def _fetch(world: HouseholdState, without: str = "") -> str:
    """Take a thing of the kind that the task is about, if it is not done `without` moving it."""
    for place in _known(world, world.household.object):
        for name in world.contents[place]:
            if kind_of(name) == world.household.object and not (place == without and world.is_ready(name)):
                return _reach(world, place) or f"take {name} from {place}"
    return _explore(world, world.household.object)


def _put_away(world: HouseholdState, name: str) -> str:
    """Where it may be put: here, if it can be."""
    places = [place for place in world.contents if kind_of(name) in HOLDS[kind_of(place)]]
    place = world.at if world.at in places else places[0]
    return _reach(world, str(place)) or f"move {name} to {place}"


def _known(world: HouseholdState, kind: str) -> Iterator[str]:
    """The places where the agent was told that something of a kind is."""
    return (place for place in world.contents if place in world.seen and kind in map(kind_of, world.contents[place]))


def _explore(world: HouseholdState, kind: str) -> str:
    """Go and see a place that nobody looked into: where things of this kind belong first, and what need not be opened."""
    unseen = [place for place in world.contents if place not in world.seen]
    place = min(
        unseen, key=lambda place: (place != world.at, kind not in HOLDS[kind_of(place)], kind_of(place) in OPENABLE)
    )
    return _reach(world, place)  # an open one that is at hand was told


def _first(world: HouseholdState, kind: str) -> str:
    return next(place for place in world.contents if kind_of(place) == kind)


def _at(world: HouseholdState, place: str) -> str:
    return "" if world.at == place else f"go to {place}"


def _reach(world: HouseholdState, place: str) -> str:
    """What is to be done before one can reach into a place; empty if one can."""
    return _at(world, place) or ("" if world.is_open(place) else f"open {place}")

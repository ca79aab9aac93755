"""The expert of ALFWorld: a script that knows only what the agent has seen."""

from collections.abc import Iterator

from antiphon_envs.alfworld.kinds import APPLIANCES, HOLDS, LAMP, OPENABLE, kind_of
from antiphon_envs.alfworld.state import HouseholdState


def next_command(state: HouseholdState) -> str:
    """Return the next command: find the thing, treat it, put it where it belongs."""
    if state.household.task.light:
        return _look_in_light(state)
    target = _target(state)
    if state.held is None:
        return _fetch(state, without=target)
    if kind_of(state.held) != state.household.object:
        return _put_away(state, state.held)
    treatment = state.household.task.treatment
    if not state.is_ready(state.held):
        appliance = _first_of_kind(state, APPLIANCES[treatment])
        return _go_to(state, appliance) or f"{treatment} {state.held} with {appliance}"
    return _reach(state, target) or f"move {state.held} to {target}"


def _look_in_light(state: HouseholdState) -> str:
    if state.held is None:
        return _fetch(state)
    if kind_of(state.held) != state.household.object:
        return _put_away(state, state.held)
    for place in _seen_with(state, LAMP):
        return _go_to(state, place) or f"use {next(name for name in state.contents[place] if kind_of(name) == LAMP)}"
    return _explore(state, LAMP)


def _target(state: HouseholdState) -> str:
    """Return the receptacle to put things into: the one that has most of them already."""
    places = [place for place in state.contents if kind_of(place) == state.household.receptacle]
    return max(places, key=lambda place: sum(map(state.is_ready, state.contents[place])) if place in state.seen else 0)


def _fetch(state: HouseholdState, without: str = "") -> str:
    """Take a thing of the task's kind, except ready ones in the receptacle `without`."""
    for place in _seen_with(state, state.household.object):
        for name in state.contents[place]:
            if kind_of(name) == state.household.object and not (place == without and state.is_ready(name)):
                return _reach(state, place) or f"take {name} from {place}"
    return _explore(state, state.household.object)


def _put_away(state: HouseholdState, name: str) -> str:
    """Put a thing down: here, if possible."""
    places = [place for place in state.contents if kind_of(name) in HOLDS[kind_of(place)]]
    place = state.at if state.at in places else places[0]
    return _reach(state, str(place)) or f"move {name} to {place}"


def _seen_with(state: HouseholdState, kind: str) -> Iterator[str]:
    """Return the receptacles where the agent has seen a thing of a kind."""
    return (place for place in state.contents if place in state.seen and kind in map(kind_of, state.contents[place]))


def _explore(state: HouseholdState, kind: str) -> str:
    """Look into an unseen receptacle: first where things of this kind belong, and those that need no opening."""
    unseen = [place for place in state.contents if place not in state.seen]
    place = min(
        unseen, key=lambda place: (place != state.at, kind not in HOLDS[kind_of(place)], kind_of(place) in OPENABLE)
    )
    return _reach(state, place)  # an open one within reach was seen


def _first_of_kind(state: HouseholdState, kind: str) -> str:
    return next(place for place in state.contents if kind_of(place) == kind)


def _go_to(state: HouseholdState, place: str) -> str:
    return "" if state.at == place else f"go to {place}"


def _reach(state: HouseholdState, place: str) -> str:
    """Return the command that makes a receptacle reachable; empty if it is."""
    return _go_to(state, place) or ("" if state.is_open(place) else f"open {place}")

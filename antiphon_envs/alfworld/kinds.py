"""Tables of ALFWorld: the kinds of things and receptacles, where things belong, and the types of rooms."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    """Return kinds of things from names of kinds and of groups."""
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
VESSELS = _kinds("dishes pan pot")  # could hold things, though no command puts any there
LAMP = "desklamp"
APPLIANCES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}  # by treatment
TREATED = {"clean": CLEANABLE, "heat": HEATABLE, "cool": COOLABLE}
LAMP_PLACES = frozenset({"desk", "dresser", "shelf", "sidetable"})
MOST_OF_A_KIND = 3  # things in a room


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """A type of room."""

    receptacles: Mapping[str, int]
    """Most receptacles of each kind."""
    objects: tuple[str, ...]
    """Kinds of things that may be there."""


def _plan(objects: str, **receptacles: int) -> RoomPlan:
    return RoomPlan(receptacles, tuple(sorted(_kinds(objects))))


ROOMS: Mapping[str, RoomPlan] = {
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


def kind_of(name: str) -> str:
    """Return the kind of a thing or a receptacle.

    >>> kind_of("mug 2")
    'mug'
    """
    return name.partition(" ")[0]

"""Units behind a number: found, named, and converted where they measure the same."""

import re
from dataclasses import dataclass
from fractions import Fraction

_SIZES = {  # by what is measured: how many of the first each unit is
    "length": "m 1, mm 1/1000, cm 1/100, dm 1/10, km 1000, in 127/5000, ft 381/1250, yd 1143/1250, mi 201168/125",
    "mass": "g 1, mg 1/1000, kg 1000",
    "time": "s 1, ms 1/1000, min 60, h 3600, day 86400, week 604800",
    "volume": "l 1, ml 1/1000, cl 1/100",
    "money": "$ 1, cent 1/100",
    "angle": "degree 1",
}
_KNOWN = {
    name: (measured, Fraction(size))
    for measured, sizes in _SIZES.items()
    for name, size in (each.split() for each in sizes.split(", "))
}
_NAMES = {
    **{"meter": "m", "metre": "m", "millimeter": "mm", "centimeter": "cm", "centimetre": "cm", "kilometer": "km"},
    **{"kilometre": "km", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi"},
    **{"gram": "g", "milligram": "mg", "kilogram": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h"},
    **{"hr": "h", "liter": "l", "litre": "l", "milliliter": "ml", "dollar": "$", "usd": "$", "deg": "degree"},
}
_BEFORE = re.compile(r"^\s*(-?)\s*(\\?\$|€|£|¥)\s*(?=[0-9.])")
_DEGREES = re.compile(r"(?:\^\s*\{?\\circ\}?|\N{DEGREE SIGN})\s*(?:\\(?:text|mathrm)\{\s*([CF])\s*\}|([CF]))?\s*$")
_WRITTEN = re.compile(
    r"(?:\\[,;: ]|~|\s)*"
    r"(?:\\(?:text|mathrm|textrm|textnormal|textbf|mbox)\{\s*(?P<set>[^{}]*?)\s*\}"
    r"|(?<=[\s~,])(?P<plain>[A-Za-z]+(?:[ /][A-Za-z]+)*))"
    r"\s*(?:\^\s*\{?(?P<power>[23])\}?)?\s*$"
)
# Words that no unit has in its name.
_OTHER_WORDS = """
    and or pi e i x y z sqrt yes no nope true false not never is are isn't aren't wasn't cannot can't couldn't wrong
    incorrect impossible rejected discarded ruled excluded refuted but than least most minus plus times dozen dozens gross
    half percent doubled tripled halved negative factorial factorials base above below under over off short too maybe guess
    unlikely hardly k one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy
    eighty ninety hundred thousand million billion trillion quadrillion quintillion lakh crore thousandfold octal hex
    hexadecimal binary mod modulo xor choose itself inverted reversed multiplied divided added subtracted rooted halves
    thirds fifths sixths sevenths eighths ninths tenth tenths hundredth hundredths thousandth thousandths millionth
    millionths billionth billionths trillionth trillionths
"""
_NO_UNITS = frozenset(_OTHER_WORDS.split())
_NAME = re.compile(r"[a-z\N{MICRO SIGN}\N{DEGREE SIGN}$][a-z0-9 /.^*'$-]*")
_MOST_WORDS = 5
_CASED = re.compile(r"([MP])(g|m|s|l|L|mol|bar|Wh?|J|N|Hz|Pa|V|A|eV)|(N)(m|s)")
_CASED_PREFIXES = {"M": "mega", "P": "peta", "N": "newton"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3}
_ATTACHED = re.compile(r"(?<=[0-9])(?=[A-Za-z]{2,}\s*(?:\^\s*\{?[23]\}?)?\s*$)")


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit by its short name, such as `cm` or `apple`, and its power."""

    name: str
    power: int = 1

    def factor_to(self, other: "Unit") -> Fraction | None:
        """Return how many `other` one of this unit is; None if they do not measure the same."""
        if self == other:
            return Fraction(1)
        ours, theirs = _KNOWN.get(self.name), _KNOWN.get(other.name)
        if ours is None or theirs is None or ours[0] != theirs[0] or self.power != other.power:
            return None
        return (ours[1] / theirs[1]) ** self.power


def split_unit(answer: str, attached: bool = False) -> tuple[str, Unit | None]:
    """Split an answer into what stands before its unit, and the unit; a currency may stand in front.

    Args:
        answer: A number with a unit, or any other answer.
        attached: Accept a unit without a space before it: `5cm` is no product of unknowns.
    """
    if found := _BEFORE.match(answer):
        return found[1] + answer[found.end() :], Unit(found[2].removeprefix("\\"))
    if found := _DEGREES.search(answer):
        scale = found[1] or found[2]
        return answer[: found.start()], Unit(f"degree {scale}" if scale else "degree")
    if attached:
        answer = _ATTACHED.sub(" ", answer)
    found = _WRITTEN.search(answer)
    if found is None or not re.search(r"[0-9]", answer[: found.start()]):
        return answer, None
    name, power = _read_name(found["set"] if found["set"] is not None else found["plain"])
    if not name or (found["plain"] and len(name) == 1 and name not in _KNOWN):
        return answer, None
    return answer[: found.start()], Unit(name, int(found["power"] or power))


def _read_name(text: str) -> tuple[str, int]:
    """Return the short name of a unit and its power; an empty name for text that is no unit."""
    text = text.strip()
    if cased := _CASED.fullmatch(text):  # mega is not milli, nor a newton metre a nanometre
        text = _CASED_PREFIXES[cased[1] or cased[3]] + (cased[2] or cased[4])
    name = " ".join(text.casefold().rstrip(".").split())
    words = name.split()
    if not _NAME.fullmatch(name) or len(words) > _MOST_WORDS or not _NO_UNITS.isdisjoint(words):
        return "", 1
    power = 1
    if len(words) == 2 and (found := _POWERS.get(words[0]) or _POWERS.get(words[1])):
        power, words = found, [word for word in words if word not in _POWERS]
    if words[0] in _POWERS:
        return "", 1
    return "/".join(_short_name(part.strip()) for part in re.split(r"/| per ", " ".join(words))), power


def _short_name(name: str) -> str:
    singular = name[:-1] if len(name) > 2 and name.endswith("s") else name
    return _NAMES.get(name) or _NAMES.get(singular) or (name if name in _KNOWN else singular)

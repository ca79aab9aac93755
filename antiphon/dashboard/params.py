"""The parameters of a request, each with its bounds. A wrong one is an error that names it and what would be valid."""

import math
import re
from collections.abc import Sequence
from urllib.parse import urlencode

from antiphon.dashboard.errors import RequestError

LONGEST = 400  # characters of a value


class Params:
    """Parameters of one request: those of its address, and the name of a run in its path."""

    def __init__(self, values: Sequence[tuple[str, str]], name: str = "") -> None:
        self.values = [(key, value) for key, value in values if value != ""]
        self.name = name

    def text(self, key: str, default: str = "") -> str:
        """Return a text."""
        found = next((value for name, value in self.values if name == key), default)
        if len(found) > LONGEST:
            raise RequestError(f"{key} has {len(found):,} characters; at most {LONGEST} are valid")
        return found

    def texts(self, key: str, most: int) -> list[str]:
        """Return all values of a parameter that may be repeated."""
        found = list(dict.fromkeys(value for name, value in self.values if name == key))
        if len(found) > most:
            raise RequestError(f"{key} is given {len(found)} times; at most {most} are valid")
        return found

    def choice(self, key: str, valid: Sequence[str], default: str = "") -> str:
        """Return one of several texts."""
        found = self.text(key, default)
        if found not in (*valid, default):
            raise RequestError(f"{key}: {found!r:.80} is not valid; valid are {', '.join(valid)}")
        return found

    def integer(self, key: str, default: int | None = None) -> int | None:
        """Return a whole number."""
        found = self.text(key)
        if not found:
            return default
        if not re.fullmatch(r"-?[0-9]{1,15}", found):
            raise RequestError(f"{key}: {found!r:.80} is no whole number")
        return int(found)

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return a finite number."""
        found = self.text(key)
        if not found:
            return default
        try:
            value = float(found)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise RequestError(f"{key}: {found!r:.80} is no number")
        return value

    def replaced(self, **changes: object) -> str:
        """Return the parameters as the query of an address, with some of them changed, or removed if None."""
        kept = [(key, value) for key, value in self.values if key not in changes]
        kept += [(key, str(value)) for key, value in changes.items() if value is not None and value != ""]
        return urlencode(kept, errors="replace")

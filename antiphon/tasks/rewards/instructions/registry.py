"""The registry of instruction checks."""

from collections.abc import Callable

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}


def instruction(name: str) -> Callable[[Check], Check]:
    """Register the check of an instruction under its name in the published data."""

    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def compare(count: int, relation: str, threshold: int) -> bool:
    """Return True if `count` is `less than` or `at least` the threshold, as `relation` says."""
    if relation not in ("less than", "at least"):
        raise ValueError(f"a relation is 'less than' or 'at least', not {relation!r}")
    return count < threshold if relation == "less than" else count >= threshold

"""Pickling of the frozen dataclasses with slots that processes send to one another."""

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def quick_to_pickle(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with slots quick to pickle: `dataclasses` looks up the fields anew for every object."""
    names = [each.name for each in fields(cls)]  # type: ignore[arg-type]  # a dataclass
    get = attrgetter(*names)
    setters = [getattr(cls, name).__set__ for name in names]  # of the slots, which a frozen class does not guard

    def get_state(self: T) -> Any:
        return get(self) if len(names) > 1 else (get(self),)

    def set_state(self: T, state: Sequence[Any]) -> None:
        for set_slot, value in zip(setters, state, strict=True):
            set_slot(self, value)

    setattr(cls, "__getstate__", get_state)  # noqa: B010 - a type checker refuses the assignment
    setattr(cls, "__setstate__", set_state)  # noqa: B010
    return cls

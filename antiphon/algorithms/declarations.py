"""Declarations of losses, advantages and stages: what a function reads, computes and guarantees, stated beside its definition.

    @loss(needs=[REFERENCE_LOGPROBS], zero_at_zero_advantage=True)
    def my_loss(inputs, config): ...

    @stage(produces=[SURPRISE])
    async def add_surprise(step): ...

No other code knows a function by its name: the checks of a configuration (`run/config_checks/algorithms.py`) and the training
step read its declaration, of built-in functions and of a user's alike. A function without a declaration reads no streams,
computes none and guarantees nothing. `docs/new_loss.md` has a complete example.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from antiphon.core.types import StreamSpec

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "__antiphon_declaration__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Properties that a loss, an advantage or a stage declares.

    Attributes:
        needs: Streams that the function reads.
        produces: Streams that the stage adds to the samples.
        grouped: The advantage compares the siblings of a group, so a group of one sample has no advantage.
        per_turn: The advantage differs between the turns of a trajectory and needs responses of several turns.
        pays_turns: The advantage reads the reward of each turn where an environment gives one.
        zero_at_zero_advantage: The loss and its gradient are 0 for tokens whose advantage is 0.
    """

    needs: tuple[StreamSpec, ...] = ()
    produces: tuple[StreamSpec, ...] = ()
    grouped: bool = False
    per_turn: bool = False
    pays_turns: bool = False
    zero_at_zero_advantage: bool = False

    def __post_init__(self) -> None:
        for spec in (*self.needs, *self.produces):
            if not isinstance(spec, StreamSpec):
                raise TypeError(f"a declaration names streams by their StreamSpec, not by {spec!r}")


UNDECLARED = Declaration()


def loss(*, needs: Sequence[StreamSpec] = (), zero_at_zero_advantage: bool = False) -> Callable[[F], F]:
    """Declare the properties of a loss function; see `Declaration`."""
    return _attach(Declaration(needs=tuple(needs), zero_at_zero_advantage=zero_at_zero_advantage))


def advantage(
    *, needs: Sequence[StreamSpec] = (), grouped: bool = False, per_turn: bool = False, pays_turns: bool = False
) -> Callable[[F], F]:
    """Declare the properties of an advantage function; see `Declaration`."""
    return _attach(Declaration(needs=tuple(needs), grouped=grouped, per_turn=per_turn, pays_turns=pays_turns))


def stage(*, needs: Sequence[StreamSpec] = (), produces: Sequence[StreamSpec] = ()) -> Callable[[F], F]:
    """Declare the streams that a stage reads, and those that it adds; see `Declaration`."""
    return _attach(Declaration(needs=tuple(needs), produces=tuple(produces)))


def declaration_of(function: Callable[..., Any]) -> Declaration:
    """Return what a function declares, `UNDECLARED` if it declares nothing."""
    while True:
        declaration: Declaration | None = getattr(function, _ATTRIBUTE, None)
        if declaration is not None:
            return declaration
        if isinstance(function, functools.partial):  # a function with its options
            function = function.func
        elif hasattr(function, "__wrapped__"):  # a function whose errors are named, or any other with functools.wraps
            function = function.__wrapped__
        else:
            return UNDECLARED


def _attach(declaration: Declaration) -> Callable[[F], F]:
    def attach(function: F) -> F:
        setattr(function, _ATTRIBUTE, declaration)
        return function

    return attach

"""Declarations of advantage and loss functions: what a function needs and assumes, stated beside its definition.

    @loss(needs=[REFERENCE_LOGPROBS], zero_at_zero_advantage=True)
    def my_loss(inputs, config): ...

No other code knows a function by its name: the checks of a configuration and the training step read its declaration, of
built-in functions and of a user's alike. A function without a declaration needs no streams and promises nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from antiphon.core.types import StreamSpec

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "__antiphon_declaration__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Properties that an advantage or a loss function declares.

    Attributes:
        needs: Streams that the function reads.
        grouped: The advantage compares the siblings of a group, so a group of one sample has no advantage.
        per_turn: The advantage differs between the turns of a trajectory and needs responses of several turns.
        pays_turns: The advantage reads the reward of each turn where an environment gives one.
        zero_at_zero_advantage: The loss and its gradient are 0 for tokens whose advantage is 0.
    """

    needs: tuple[StreamSpec, ...] = ()
    grouped: bool = False
    per_turn: bool = False
    pays_turns: bool = False
    zero_at_zero_advantage: bool = False


UNDECLARED = Declaration()


def advantage(
    *, needs: Sequence[StreamSpec] = (), grouped: bool = False, per_turn: bool = False, pays_turns: bool = False
) -> Callable[[F], F]:
    """Declare the properties of an advantage function; see `Declaration`."""
    return _attach(Declaration(needs=tuple(needs), grouped=grouped, per_turn=per_turn, pays_turns=pays_turns))


def loss(*, needs: Sequence[StreamSpec] = (), zero_at_zero_advantage: bool = False) -> Callable[[F], F]:
    """Declare the properties of a loss function; see `Declaration`."""
    return _attach(Declaration(needs=tuple(needs), zero_at_zero_advantage=zero_at_zero_advantage))


def declaration_of(function: Callable[..., Any]) -> Declaration:
    """Return what a function declares, `UNDECLARED` if it declares nothing."""
    declaration: Declaration = getattr(function, _ATTRIBUTE, UNDECLARED)
    return declaration


def _attach(declaration: Declaration) -> Callable[[F], F]:
    def attach(function: F) -> F:
        setattr(function, _ATTRIBUTE, declaration)
        return function

    return attach

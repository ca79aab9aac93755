"""Pickles of the types that processes send to one another."""

import pickle
from dataclasses import FrozenInstanceError, dataclass

import pytest

from antiphon.core.types import Message, PolicyVersion, Prompt, Sampling
from antiphon.core.types.pickling import quick_to_pickle


@quick_to_pickle
@dataclass(frozen=True, slots=True)
class One:
    value: object


VALUES = [
    One([1]),
    PolicyVersion(2, 3),
    Sampling(max_tokens=8, stop=("a",)),
    Prompt(id="a", task="t", messages=(Message("user", "x"),), payload={"answer": 1}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_is_read_back_equal_and_frozen(value, protocol):
    copied = pickle.loads(pickle.dumps(value, protocol))
    assert copied == value and copied is not value and hash(type(copied)) == hash(type(value))
    with pytest.raises(FrozenInstanceError):
        setattr(copied, next(iter(type(value).__slots__)), None)


def test_a_pickle_of_other_fields_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        PolicyVersion(0, 0).__setstate__([1])

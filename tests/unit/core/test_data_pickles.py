"""What a worker may send: data of all kinds arrives as pickle itself reads it; whatever would call something is refused."""

import datetime
import os
import pickle
import subprocess
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from http import HTTPStatus
from pathlib import Path

import msgspec
import numpy as np
import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.data_pickles import dump_data, load_data, rebuild_array, rebuild_tensor
from antiphon.core.errors import ConfigError
from antiphon.core.types import Message, Prompt


class Calls:
    """A pickle that has a function called."""

    def __init__(self, function, *args):
        self._reduced = function, args

    def __reduce__(self):
        return self._reduced


Point = namedtuple("Point", "x y")


class Color(Enum):
    RED = 1


@dataclass
class Note:
    text: str
    more: list["Note"] = field(default_factory=list)


class Model(pydantic.BaseModel):
    number: int


class Struct(msgspec.Struct):
    number: int


VALUES = [
    Point(1, 2),
    Color.RED,
    Note("a", [Note("b")]),
    Model(number=1),
    Struct(3),
    Prompt(id="1", task="t", messages=(Message("user", "hi"),)),
    OrderedDict(a=1),
    {frozenset({1}), 2},
    Counter("aab"),
    Decimal("1.5"),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    Path("a/b"),
    uuid.UUID(int=7),
    np.float32(1.5),
    torch.bfloat16,
    slice(1, 2),
    bytearray(b"x"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_data_of_all_kinds_arrives(value):
    read = load_data(dump_data(value))
    assert read == value and type(read) is type(value)


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()


@given(st.recursive(plain, lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner)))
def test_plain_values_arrive(value):
    assert load_data(dump_data(value)) == value


def test_a_defaultdict_arrives_as_a_dict():
    read = load_data(dump_data({"x": defaultdict(list, a=[1])}))
    assert read == {"x": {"a": [1]}} and type(read["x"]) is dict


@pytest.mark.parametrize("state", [(1, (1,), np.dtype("i8"), False, b"x" * 8), (np.dtype("i8"),)])
def test_memory_of_an_array_is_not_replaced(state):
    """numpy frees the memory of an array that gets another state, views of it or not."""
    array, build = dump_data(np.zeros(1, np.int64))[:-1], pickle.dumps(state, 4)[2:-1] + b"b."
    with pytest.raises(pickle.UnpicklingError):
        load_data(array + build)


@pytest.mark.parametrize("function", [rebuild_array, rebuild_tensor])
def test_what_rebuilds_is_not_changed(function):
    named = pickle.dumps(function, 4)[:-1]
    for state in ({"_function": 1}, (None, {"_function": 1}), (None, {"__defaults__": ()})):
        with pytest.raises(pickle.UnpicklingError):
            load_data(named + pickle.dumps(state, 4)[2:-1] + b"b.")


@pytest.mark.parametrize("state", [{"_value_": 2}, (None, {"_value_": 2})])
def test_members_of_enumerations_are_not_changed(state):
    with pytest.raises(pickle.UnpicklingError):
        load_data(pickle.dumps(Color.RED, 4)[:-1] + pickle.dumps(state, 4)[2:-1] + b"b.")
    assert Color.RED.value == 1


@pytest.mark.parametrize(
    "value", [np.array([{}, None]), np.zeros(2, "i4,f4"), np.array(["a"], np.dtypes.StringDType())]
)
def test_arrays_of_objects_are_not_sent(value):
    with pytest.raises(pickle.PicklingError):
        dump_data(value)


def test_enumerations_arrive_as_older_pythons_send_them():
    assert load_data(pickle.dumps(Calls(getattr, Color, "RED"))) is Color.RED
    for value in (Calls(getattr, Color, "mro"), Calls(getattr, Color, "__class__"), Calls(getattr, "text", "upper")):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            load_data(pickle.dumps(value))


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3)[:, ::2], np.array(["a", "bc"]), np.zeros((0, 3)), np.array(3)]
)
def test_arrays_arrive(array):
    read = load_data(dump_data(array))
    np.testing.assert_array_equal(read, array)
    assert read.flags.writeable and read.dtype == array.dtype and type(read) is np.ndarray


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6).view(2, 3)[:, ::2], torch.ones(2, dtype=torch.bfloat16), torch.empty(0, 3), torch.tensor(1.0)],
)
def test_tensors_arrive(tensor):
    read = load_data(dump_data(tensor))
    assert torch.equal(read, tensor) and read.dtype == tensor.dtype


def test_errors_keep_their_fields():
    error = load_data(dump_data(ConfigError("no", key="a.b", value=3)))
    assert isinstance(error, ConfigError) and (error.key, error.value) == ("a.b", 3)


HARM = [
    Calls(os.system, "true"),
    Calls(eval, "1"),
    Calls(exec, "1"),
    Calls(getattr, 1, "system"),
    Calls(__import__, "antigravity"),
    Calls(subprocess.Popen, ["true"]),
    Calls(subprocess.run, ["true"]),
    Calls(open, os.devnull),
    Calls(type, "X", (), {}),
    Calls(torch.load, os.devnull),
    Calls(torch.hub.load, "x"),
    Calls(np.load, os.devnull),
    Calls(np.fromfile, os.devnull),
    Calls(pickle.loads, b"N."),
    Calls(Path.unlink, Path("x")),
    Calls(SystemExit, 0),
    Calls(Note, "a constructor may do anything"),
    Calls(list, range(3)),
    Calls(HTTPStatus, 200),
    Calls(np.ndarray, (1,)),
]


@pytest.mark.parametrize("value", HARM, ids=lambda value: value._reduced[0].__qualname__)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_whatever_calls_something_is_refused(value, protocol):
    content = pickle.dumps((1, [value]), protocol)
    with pytest.raises(pickle.UnpicklingError):
        load_data(content)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("antiphon.core.registry", "import_path"),
        ("antiphon.core.objects", "receive_objects"),
        ("antiphon.core.data_pickles", "pickle.loads"),
        ("antiphon.core.data_pickles", "io.open"),
        ("pathlib", "Path.unlink"),
        ("collections", "_sys.modules"),
        ("antiphon.__main__", "main"),
        ("this", "s"),
        ("numpy", "fromfile"),
        ("torch", "load"),
        ("builtins", "eval"),
    ],
)
def test_no_function_is_reached_by_name(module, name):
    content = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)) + b"\x93."
    before = set(sys.modules)
    with pytest.raises(pickle.UnpicklingError):
        load_data(content)
    assert {module, "this"} & (set(sys.modules) - before) == set(), "nothing is imported for it"


@pytest.mark.parametrize("cls", [Note, Model, Struct, Point, Color, ConfigError, Path, uuid.UUID, Prompt])
def test_no_class_is_changed(cls):
    """`BUILD` sets attributes of whatever is on the stack, so also of a class."""
    load_data(pickle.dumps(cls))  # an enumeration is guarded when it is first read
    before = dict(vars(cls))
    state = pickle.dumps((None, {"kind": "unsafe"}), 4)[2:-1]
    content = pickle.dumps(cls, 4)[:-1] + state + b"b."
    with pytest.raises((pickle.UnpicklingError, TypeError, AttributeError)):
        load_data(content)
    assert dict(vars(cls)) == before and not hasattr(cls, "kind")

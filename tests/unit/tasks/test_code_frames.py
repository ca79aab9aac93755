"""What crosses between tests and solutions: plain values as they are, and nothing that a hostile process may write beside."""

import collections
import json
import math
import os
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.tasks.rewards.code.frames import FrameError, checked, decode, encode, receive, send

HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**30, max_value=10**4000),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.fractions(),
    st.decimals(allow_nan=False),
    st.dates(),
    st.datetimes().map(lambda moment: moment.replace(fold=0)),
    st.times().map(lambda time: time.replace(fold=0)),
    st.timedeltas(),
    st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)),
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.lists(inner).map(collections.deque),
        st.dictionaries(HASHABLE, inner),
        st.dictionaries(HASHABLE, inner).map(collections.OrderedDict),
        st.sets(HASHABLE),
        st.frozensets(HASHABLE),
        st.binary().map(bytearray),
    ),
    max_leaves=20,
)


def nothing(value, tag):
    raise AssertionError(f"{value!r} is plain")


def unknown(tag, content):
    raise FrameError(tag)


def shape(value):
    """A value with the exact types of all its parts."""
    if isinstance(value, dict):
        return type(value), [(shape(key), shape(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value), [shape(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted((str(type(item)), repr(item)) for item in value)
    return type(value), repr(value)


@given(VALUES)
def test_plain_values_arrive_as_they_are(value):
    wire = json.loads(json.dumps(encode(value, nothing)))
    assert shape(decode(wire, unknown)) == shape(value)


@pytest.mark.parametrize("value", [int, type(None), Fraction, ..., NotImplemented, slice(1, None, 2), {1: 2}.keys()])
def test_types_and_single_objects_cross(value):
    found = decode(encode(value, nothing), unknown)
    assert found == value and type(found) is type(value)


def test_nan_crosses_as_another_nan():
    found = decode(encode([math.nan, -math.inf], nothing), unknown)
    assert math.isnan(found[0]) and found[0] is not math.nan and found[1] == -math.inf


class Text(str):
    __slots__ = ()


class Whole(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


class Listed(list):
    def __iter__(self):
        return iter("lies")


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Text("a"), "a"),
        (Whole(3), 3),
        (Listed([1]), [1]),
        (Pair(1, 2), (1, 2)),
        (collections.defaultdict(list, {1: [2]}), {1: [2]}),
        (collections.OrderedDict([(1, 2)]).keys(), {1: 2}.keys()),
    ],
)
def test_subclasses_become_their_base(value, plain):
    found = decode(encode(value, nothing), unknown)
    assert type(found) is type(plain) and repr(found) == repr(plain)


def test_what_is_not_plain_is_asked_for():
    iterator, thing = iter([1]), object()
    assert encode([iterator, thing], lambda value, tag: [tag, id(value)]) == [
        "list",
        [["iterator", id(iterator)], ["kept", id(thing)]],
    ]


def test_values_in_themselves_do_not_cross():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(FrameError):
        encode(endless, nothing)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"list": []},
        [],
        ["list"],
        ["list", [], 1],
        [1, []],
        [["list"], []],
        ["list", "ab"],
        ["list", {"a": 1}],
        ["set", [1, 1]],
        ["set", [["list", []]]],
        ["dict", [[1, 2], [1, 3]]],
        ["dict", [[1]]],
        ["dict", [[["dict", []], 1]]],
        ["int", "many"],
        ["int", 7],
        ["float", "1.0"],
        ["float", 1],
        ["complex", [1.0]],
        ["complex", ["kept", 1.0]],
        ["bytes", "0g"],
        ["fraction", ["0x1", "0x0"]],
        ["range", ["0x1", "0x2", "0x0"]],
        ["decimal", "one"],
        ["date", "2020-13-01"],
        ["timedelta", [1.5, 0, 0]],
        ["timedelta", [10**12, 0, 0]],
        ["type", "object.__subclasses__"],
        ["type", ["int"]],
        ["named", ["os", "system"]],
        ["kept", 1],
        ["slice", [1]],
    ],
    ids=str,
)
def test_hostile_values_are_refused(data):
    with pytest.raises(FrameError):
        checked(decode, data, unknown)


def test_deep_values_are_refused():
    data: object = 1
    for _ in range(500):
        data = ["list", [data]]
    with pytest.raises(FrameError):
        checked(decode, data, unknown)


@pytest.fixture
def pipe():
    ends = os.pipe()
    with open(ends[0], "rb") as reading, open(ends[1], "wb") as writing:
        yield reading.fileno(), writing


@pytest.mark.parametrize(
    "content",
    [
        b"[1]",
        b"1",
        b"nothing",
        b"\xff\xfe{\x00}\x00",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 20_000,
        '{"a": "é"}'.encode(),
    ],
    ids=lambda content: str(content[:12]),
)
def test_what_is_no_message_is_refused(pipe, content):
    reading, writing = pipe
    writing.write(len(content).to_bytes(4, "little") + content)
    writing.flush()
    with pytest.raises(FrameError):
        receive(reading)


def test_messages_and_their_end(pipe):
    reading, writing = pipe
    send(writing.fileno(), {"text": "\ud800 é", "list": [1, None]})
    assert receive(reading) == {"text": "\ud800 é", "list": [1, None]}
    writing.write((1 << 31).to_bytes(4, "little"))
    writing.flush()
    with pytest.raises(FrameError):
        receive(reading)
    writing.write(b"\x05\0\0\0ab")
    writing.close()
    with pytest.raises(EOFError):
        receive(reading)

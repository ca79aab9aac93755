"""The judge's end of the link to a solution: what the tests have of it, and how it is asked.

Nothing of the solution is executed, imported or compared by its own methods in this process. Plain values that it returns are
made anew here, so that comparing them is Python's own affair. What is not plain stays there: a `Handle` stands for it, by which
the tests can call it, and get and set the attributes that their text names. Operators, `len`, `in`, `str` and the like ask a
solution only where the task declares them (`methods`); where not, the case has failed. What the solution changes of an argument
is not seen here, unless the task declares `in_place`.

This file is read as text, and imports nothing of ours but `code.frames`.
"""

import builtins
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypedDict, cast

from antiphon.tasks.rewards.code.frames import ABILITIES, FrameError, checked, decode, encode, receive, send

READ, WRITE = 3, 4  # the pipes: `LINK_READ` and `LINK_WRITE` of `antiphon.sandbox.base`
LONGEST_CHUNK = 256  # items of an iterator that are fetched at once
ONE_BY_ONE = 32  # items that are fetched each by itself: what the tests do between two of them may matter
LONGEST_STREAM = 1_000_000
DEEPEST = 50  # functions of the tests that the solution calls from within one another
LONGEST_ARGUMENT = 100_000  # items of an iterator that is an argument
AGAIN_SECONDS = 0.05  # between two interrupts of a case whose time is over

# What Python calls by itself, for an operator, a statement or a builtin.
IMPLICIT = """
    __abs__ __add__ __aenter__ __aexit__ __aiter__ __and__ __anext__ __await__ __bool__ __bytes__ __ceil__ __complex__
    __contains__ __copy__ __deepcopy__ __delitem__ __divmod__ __enter__ __eq__ __exit__ __float__ __floor__ __floordiv__
    __format__ __fspath__ __ge__ __getitem__ __gt__ __hash__ __index__ __instancecheck__ __int__ __invert__ __iter__ __le__
    __len__ __lshift__ __lt__ __matmul__ __mod__ __mro_entries__ __mul__ __neg__ __next__ __or__ __pos__
    __pow__ __radd__ __rand__ __rdivmod__ __reduce__ __reduce_ex__ __repr__ __reversed__ __rfloordiv__ __rlshift__
    __rmatmul__ __rmod__ __rmul__ __ror__ __round__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__
    __setitem__ __str__ __sub__ __subclasscheck__ __truediv__ __trunc__ __xor__
"""
EXPLICIT = frozenset({"__name__", "__qualname__", "__doc__", "__wrapped__", "__dict__"})  # where the tests name them


class Job(TypedDict, total=False):
    """The tests and the solution to be judged."""

    nonce: str
    solution: str
    setup: str
    cases: list[str]
    pytest: str
    module: str
    names: list[str]
    """Names that the tests use and the solution must define."""
    declared: list[str]
    """Those of them that replace what `setup` defines."""
    modules: dict[str, str]
    """Name in the tests -> module that it stands for."""
    attributes: list[str]
    """All that the text of the tests names after a dot, or in quotation marks."""
    caught: list[str]
    """Names of exceptions that the tests catch."""
    methods: list[str]
    in_place: bool
    seconds: float
    """For each case."""


class TimedOut(BaseException):
    """The time of a case is over."""


class RefusedError(Exception):
    """The tests do with an object of the solution what cannot be trusted, or cannot be done; the case has failed."""


class EndedError(Exception):
    """The solution answers no more; this case and those that follow have failed."""


class SolutionError(Exception):
    """An exception of the solution that is no builtin `Exception`."""


# --- what the tests have of the solution -----------------------------------------------------------------------------------


class Handle:
    """An object of the solution. What is not defined here or in `handle_type` is asked of the solution, by name."""

    __slots__ = ("number", "session")

    def __init__(self, session: "Session", number: int) -> None:
        object.__setattr__(self, "session", session)
        object.__setattr__(self, "number", number)

    def __getattribute__(self, name: str) -> Any:
        session = session_of(self)
        if name.startswith("__") and not (name in EXPLICIT and name in session.attributes):
            return object.__getattribute__(self, name)
        return session.get(number_of(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        session_of(self).ask("set", on=number_of(self), name=name, value=session_of(self).encode(value))


session_of: Callable[[Any], "Session"] = vars(Handle)["session"].__get__
number_of: Callable[[Any], int] = vars(Handle)["number"].__get__


def handle_type(methods: list[str], abilities: frozenset[str]) -> type[Handle]:
    """Return the type of handles that ask the solution for `methods`, and refuse all others.

    Of `ABILITIES` it has those that the solution says its object has, so that tests see what kind of object it is. That a
    solution can say so is no more than that it can define such a method.
    """

    def method(name: str) -> Callable[..., Any]:
        def ask(self: Handle, *args: Any) -> Any:
            session = session_of(self)
            if name not in methods:
                raise session.refuse(
                    f"{name} of an object of the solution: only a task may allow it, methods: [{name}]"
                )
            return session.value(session.ask("method", on=number_of(self), name=name, args=session.encode(args)))

        return ask

    def call(self: Handle, *args: Any, **kwargs: Any) -> Any:
        return session_of(self).call(number_of(self), args, kwargs)

    names = {*IMPLICIT.split(), *methods}.difference(ABILITIES) | (abilities - {"__call__"})
    if abilities & {"__getitem__", "__iter__"}:
        names |= {"__contains__", "__iter__", "__reversed__"}.intersection(methods)  # which Python derives from these
    if "__iter__" in methods and "__len__" not in methods:
        names.discard("__len__")  # which Python tries before it iterates, and can do without
    defined: dict[str, Any] = {name: method(name) for name in names} | (
        {"__call__": call} if "__call__" in abilities else {}
    )
    return type("Object", (Handle,), {"__slots__": (), **defined})


class Stream:
    """An iterator of the solution: it is asked for items as they are needed, one by one at first, then ever more at once."""

    def __init__(self, session: "Session", number: int) -> None:
        self._session, self.number = session, number
        self._items: Iterator[Any] = iter(())
        self._count, self._sum = 1, 0

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        for item in self._items:
            return item
        fetched = self._session.value(self._session.ask("next", on=self.number, count=self._count))
        if type(fetched) is not list or len(fetched) > self._count:
            raise self._session.end("its process answered with other than the items that were asked for")
        if not fetched:
            raise StopIteration
        self._sum += len(fetched)
        if self._sum > LONGEST_STREAM:
            raise self._session.refuse(f"an iterator of more than {LONGEST_STREAM} items")
        if self._sum >= ONE_BY_ONE:
            self._count = min(2 * self._count, LONGEST_CHUNK)
        self._items = iter(fetched)
        return next(self._items)


class ExceptionType(type):
    """The type of the solution's classes of exceptions, as the tests catch them: calling one makes one of the solution's."""

    make: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an exception in the solution's process."""
        return cls.make(*args, **kwargs)


class Session:
    """The judge's end of the link."""

    def __init__(self, job: Job) -> None:
        self.attributes = frozenset(job["attributes"]) | frozenset(job["methods"])
        self._caught = frozenset(job["caught"])
        self._ends = "StopIteration" in self._caught
        self._stops: list[Exception] = []  # in this case, of calls
        self.timed_out = False
        self._armed = False
        self.refused = ""  # why this case has failed, whatever the tests make of it
        self.ended = ""  # why all that follow have, too
        self._in_place = job["in_place"]
        self._methods = job["methods"]
        self._types: dict[frozenset[str], type[Handle]] = {}  # by abilities, made when needed: that takes a while
        self._handles: dict[int, Handle] = {}
        self._streams: dict[int, Stream] = {}
        self._exceptions: dict[int, type[Exception]] = {}
        self._callbacks: list[Any] = []
        self._depth = 0

    def greet(self) -> None:
        """Wait until the solution's process is there; nothing of the solution runs in it yet."""
        if receive(READ) != {"hello": True}:
            raise EOFError

    def refuse(self, why: str) -> RefusedError:
        """Note why the case has failed, and return it as an exception: tests may catch that, and fail all the same."""
        self.refused = self.refused or why
        return RefusedError(why)

    def end(self, why: str) -> EndedError:
        """The same for all that follow."""
        self.ended = self.ended or why
        return EndedError(why)

    def check_stops(self) -> None:
        """Refuse a case in which a loop, as of `map`, took the `StopIteration` of a call for its end.

        Where the tests catch it themselves, its traceback has a frame of theirs.
        """
        for error in self._stops:
            reached = error.__traceback__
            while reached and reached.tb_frame.f_globals is globals():
                reached = reached.tb_next
            if not reached:
                self.refuse("the solution ended a loop of the tests by StopIteration")
        self._stops.clear()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Raise `TimedOut` in the block when its time is over, again and again if it goes on. Nothing is asked any more."""

        def interrupt(*_: object) -> None:
            if self._armed:
                self.timed_out = True
                self.end(f"no answer within {seconds:g} s")
                raise TimedOut

        signal.signal(signal.SIGALRM, interrupt)
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
        try:
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    # --- asking ----------------------------------------------------------------------------------------------------------

    def ask(self, op: str, **asked: Any) -> dict[str, Any]:
        """Return the reply, which has a `value`; raise what the solution raised."""
        if self.ended:
            raise EndedError(self.ended)
        number = os.urandom(8).hex()  # which nobody can write an answer to before it is asked
        self._send({"id": number, "op": op, **asked})
        while "callback" in (reply := self._receive(number)):
            self._send(self._call_back(reply))
        if "raised" in reply:
            iterates = asked.get("name") in ("__next__", "__anext__")
            error = self._raised(reply["raised"], ends=iterates or self._ends)
            if isinstance(error, StopIteration) and not iterates:
                self._stops.append(error)
            raise error
        if "value" not in reply:
            raise self.end("its process answered without a value")
        return reply

    def _send(self, message: dict[str, Any]) -> None:
        try:
            send(WRITE, message)
        except BrokenPipeError:
            raise self.end("its process has ended") from None
        except (FrameError, ValueError) as error:
            raise self.refuse(f"the solution cannot be sent this: {error}") from None

    def _receive(self, number: str) -> dict[str, Any]:
        try:
            reply = receive(READ)
        except EOFError:
            raise self.end("its process has ended") from None
        except FrameError as error:
            raise self.end(f"its process answered with what is no message: {error}") from None
        if reply.get("id") != number:
            raise self.end("its process answered out of turn")
        return reply

    def load(self, job: Job) -> dict[str, Any]:
        """Run the solution; return what it defines of `names`."""
        found = self.value(self.ask("load", source=job["solution"], names=job["names"]))
        if type(found) is not dict or not found.keys() <= {*job["names"]}:
            raise self.end("its process answered with other than what was asked for")
        return {name: self._as_caught(name, value) for name, value in found.items()}

    def attribute(self, name: str) -> Any:
        """Return what the solution's module has under a name now."""
        return self._as_caught(name, self.get(0, name))

    def get(self, on: int, name: str) -> Any:
        """Return an attribute of an object; 0 is the solution's module."""
        if on and name not in self.attributes:
            raise AttributeError(f"the tests name no attribute {name!r}: a task may, as one of its methods")
        return self.value(self.ask("get", on=on, name=name))

    def call(self, on: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an object. Arguments are copied; with `in_place` lists, sets, dicts and bytearrays change as they did there."""
        asked = {"args": self.encode(args), "kwargs": self.encode(kwargs), "in_place": self._in_place}
        reply = self.ask("call", on=on, **asked)
        if self._in_place:
            self._change(args, reply.get("args"))
        return self.value(reply)

    def _change(self, args: tuple[Any, ...], told: Any) -> None:
        theirs = self.value({"value": told})
        changeable = (list, bytearray, set, dict)
        if type(theirs) is not tuple or len(theirs) != len(args):
            raise self.end("its process answered with other arguments than it was given")
        pairs = [(mine, other) for mine, other in zip(args, theirs, strict=True) if type(mine) in changeable]
        if any(type(mine) is not type(other) for mine, other in pairs):
            raise self.end("its process answered with arguments of other types than it was given")
        for mine, other in pairs:
            if type(mine) is list or type(mine) is bytearray:
                mine[:] = other
            else:
                mine.clear()
                mine.update(other)

    # --- values ----------------------------------------------------------------------------------------------------------

    def value(self, reply: dict[str, Any]) -> Any:
        """Return the value of a reply, made anew."""
        try:
            return checked(decode, reply["value"], self._named)
        except FrameError as error:
            raise self.end(f"its process answered with what is no value: {error}") from None

    def encode(self, value: Any) -> Any:
        """Return the JSON of an argument."""
        try:
            return encode(value, self._number)
        except FrameError as error:
            raise self.refuse(f"the solution cannot be sent this: {error}") from None

    def handle(self, number: int, abilities: list[str]) -> Handle:
        """Return what stands for an object: always the same for the same one."""
        if number not in self._handles:
            kind = frozenset(abilities)
            if kind not in self._types:
                self._types[kind] = handle_type(self._methods, kind)
            self._handles[number] = self._types[kind](self, number)
        return self._handles[number]

    def _named(self, tag: str, content: Any) -> Any:
        abilities: list[str] = []
        if tag == "kept":
            if type(content) is not list or len(content) != 2 or type(content[1]) is not list:
                raise FrameError("an object without a number and its abilities")
            content, abilities = content
            if any(type(name) is not str or name not in ABILITIES for name in abilities):
                raise FrameError("an object with unknown abilities")
        if type(content) is not int or content < 0:
            raise FrameError("an object without a number")
        if tag == "kept":
            return self._exceptions.get(content) or self.handle(content, abilities)
        if tag == "iterator":
            return self._streams.setdefault(content, Stream(self, content))
        if tag == "awaitable":
            return self._wait(content)
        if tag == "callback" and content < len(self._callbacks):
            return self._callbacks[content]
        raise FrameError(f"unknown tag {tag[:20]!r}")

    async def _wait(self, number: int) -> Any:
        """Stand for a coroutine of the solution: it runs there, to its end, when it is awaited here."""
        return self.value(self.ask("await", on=number))

    def _number(self, value: Any, tag: str) -> list[Any]:
        """The JSON of an argument that is not plain."""
        if isinstance(value, Handle):
            return ["kept", number_of(value)]
        if isinstance(value, Stream):
            return ["kept", value.number]
        if tag == "iterator":
            items = [item for item, _ in zip(value, range(LONGEST_ARGUMENT + 1), strict=False)]
            if len(items) > LONGEST_ARGUMENT:
                raise FrameError(f"an iterator of more than {LONGEST_ARGUMENT} items")
            return ["list", [encode(item, self._number) for item in items]]
        if isinstance(value, type) and value in self._exceptions.values():
            return ["kept", next(number for number, kind in self._exceptions.items() if kind is value)]
        if (place := standard_place(value)) is not None:
            return ["named", place]
        if callable(value):
            self._callbacks.append(value)
            return ["callback", len(self._callbacks) - 1]
        raise FrameError(f"a {type(value).__name__} is neither plain data nor a function")

    # --- exceptions and functions of the tests ----------------------------------------------------------------------------

    def _as_caught(self, name: str, value: Any) -> Any:
        """Return what stands for a class of exceptions of the solution, if the tests catch what has this name."""
        if name not in self._caught or not isinstance(value, Handle):
            return value
        number = number_of(value)
        if number not in self._exceptions:
            made = {"make": staticmethod(lambda *args, **kwargs: self.call(number, args, kwargs))}
            self._exceptions[number] = cast(type[Exception], ExceptionType(name, (Exception,), made))
        return self._exceptions[number]

    def _raised(self, told: Any, ends: bool) -> Exception:
        """Return what the solution raised as an exception of ours; `ends`: whether that may be `StopIteration`."""
        shape = {"types": list, "classes": list, "text": str, "number": int}
        if type(told) is not dict or {key: type(item) for key, item in told.items()} != shape:
            return self.end("its process raised what is no exception")
        named = [vars(builtins).get(name) for name in told["types"] if type(name) is str]
        builtin = next(
            (kind for kind in named if isinstance(kind, type) and issubclass(kind, Exception)), SolutionError
        )
        if issubclass(builtin, StopIteration | StopAsyncIteration) and not ends:
            builtin = RuntimeError  # as in generators: it would end a loop of the tests
        classes = [self._exceptions[each] for each in told["classes"] if type(each) is int and each in self._exceptions]
        for kind in builtin.__mro__:
            try:
                return self._instance((*classes, kind), told)
            except TypeError:  # it takes other arguments, or has another layout
                continue
        return SolutionError(told["text"])

    def _instance(self, kinds: tuple[type, ...], told: dict[str, Any]) -> Exception:
        if len(kinds) > 1:  # of the solution's own
            attributes = {"__getattr__": lambda _, name: self.get(told["number"], name)}
            made: type = ExceptionType(kinds[0].__name__, kinds, attributes)
        else:
            made = kinds[0]
        error: Exception = type.__call__(made, told["text"])
        return error

    def _call_back(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the tests for the solution, and return what it is told."""
        number, args, kwargs = (self.value({"value": asked.get(key)}) for key in ("callback", "args", "kwargs"))
        if type(number) is not int or not 0 <= number < len(self._callbacks):
            raise self.end("its process called a function that it was not given")
        if type(args) is not tuple or type(kwargs) is not dict or not all(type(key) is str for key in kwargs):
            raise self.end("its process called a function without arguments")
        if self._depth >= DEEPEST:
            raise self.end(f"its process called functions of the tests {DEEPEST} deep")
        self._depth += 1
        try:
            return {"value": self.encode(self._callbacks[number](*args, **kwargs))}
        except EndedError:
            raise
        except Exception as error:  # noqa: BLE001 - the function's own, or a mistake of the solution in calling it
            kind = type(error)
            return {
                "raised": [kind.__module__ if kind.__module__ == "builtins" else "", kind.__name__, str(error)[:500]]
            }
        finally:
            self._depth -= 1


def standard_place(value: Any) -> list[str] | None:
    """Return module and name of a function or class of Python's own, by which another process finds its own."""
    owner = getattr(value, "__objclass__", value)
    module, name = getattr(owner, "__module__", None), getattr(value, "__qualname__", None)
    if type(module) is not str or type(name) is not str or module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return [module, name] if found is value else None

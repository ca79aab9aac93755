"""Run inside the box of a verdict: tests, each in a process of its own, under a hook that sees what the package reaches for.

    python -PB runner.py PACKAGE CPU_SECONDS TEST_FILE...

A line of output for each test that passes (`PASSED marks name`, where marks are the secrets that it gave away) and for each
thing that a package has no business with (`REACHED what`), which ends the process it happens in.

The package runs in these processes, so all that is needed is bound before the package is imported. Tests are compiled
before, too, and their files emptied: from then on their text is nowhere, and their code only where Python tells the hook who
looks at it.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Generator, Iterable
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

MARK = "__reached__"
STOOD_IN_FOR = ("test", "setup", "teardown")
REACHED = 86  # exit status
ALWAYS = (
    "code.__new__",
    "cpython.PyInterpreterState_New",
    "ctypes.",
    "gc.get_",
    "mmap.__new__",
    "os.chdir",
    "os.chmod",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.link",
    "os.posix_spawn",
    "os.putenv",
    "os.remove",
    "os.rename",
    "os.symlink",
    "os.system",
    "os.truncate",
    "pty.spawn",
    "socket.",
    "subprocess.Popen",
    "sys._current_frames",
    "sys.addaudithook",
    "sys.monitoring",
    "sys.setprofile",
    "sys.settrace",
)
CODE = frozenset({"f_code", "gi_code", "cr_code", "ag_code", "__code__"})
FRAMES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"}) | CODE
NOT_TO_BE_READ = ("/proc", "..", "/tests", "/test_", "/conftest")


class Tests:
    """The modules of the tests: compiled before the package is imported, and executed when pytest imports them."""

    def __init__(self, work: str, paths: Iterable[str], remember: Callable[[int], None]) -> None:
        """Compile the tests, and empty their files.

        Args:
            work: Folder of the `paths`.
            paths: Files of tests.
            remember: Called with the identities of the modules' namespaces and of their test functions. The package can get at
                this object, by `sys.meta_path`, so it is no attribute.
        """
        self._names = {module_name(path): work + path for path in paths}
        self._modules = self._bodies({name: compiled(path) for name, path in self._names.items()}, remember)
        next(self._modules)

    def find_spec(self, name: str, *_: object) -> Any:
        """As a finder of modules does."""
        return (
            importlib.util.spec_from_file_location(name, self._names[name], loader=self)  # type: ignore[arg-type]
            if name in self._names
            else None
        )

    def create_module(self, spec: object) -> None:
        """As Python does."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute it, with stand-ins for its test functions."""
        self._modules.send(module)

    def _bodies(self, codes: dict[str, CodeType], remember: Callable[[int], None]) -> Generator[None, ModuleType, None]:
        # Nothing of the locals of a generator can be had without its frame, which the hook guards.
        run = exec
        while True:
            module = yield
            code, space = codes.pop(module.__name__), module.__dict__
            space[MARK] = MARKS.append
            remember(id(space))
            run(code, space)
            for owner in [module, *(each for each in space.values() if isinstance(each, type))]:
                for name, found in list(vars(owner).items()):
                    test = getattr(found, "__func__", found)  # of a class method
                    if name.startswith(STOOD_IN_FOR) and isinstance(test, FunctionType):
                        new = stand_in(test)
                        setattr(owner, name, new if test is found else type(found)(new))
                        cells = [cell.cell_contents for cell in test.__closure__ or ()]  # where it is decorated
                        for each in (test, *cells):
                            remember(id(each))


MARKS: list[str] = []  # which this process came to


def module_name(path: str) -> str:
    """Under which pytest imports a file of tests."""
    folder, _, name = path.removesuffix(".py").rpartition("/")
    return f"{folder.replace('/', '.')}.{name}" if os.path.exists(f"{folder}/__init__.py") else name


def compiled(path: str) -> CodeType:
    """The code of a file, which is empty afterwards."""
    with open(path, "r+b") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
        file.truncate(0)
    return code


def stand_in(test: FunctionType) -> Callable[..., None]:
    """Return a function that runs a test and fails without its traceback.

    It takes more arguments than the test, because pytest passes some to functions that set a test up.
    """
    from inspect import Parameter, signature

    from _pytest.outcomes import OutcomeException

    parameters = signature(test).parameters.values()
    most = None if any(each.kind is Parameter.VAR_POSITIONAL for each in parameters) else len(parameters)

    def run(*args: object, **kwargs: object) -> None:
        failed: BaseException | None = None
        try:
            test(*args[:most], **kwargs)
        except OutcomeException as outcome:
            failed = type(outcome)(outcome.msg)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test fails
            failed = AssertionError(type(error).__name__)
        if failed is not None:
            raise failed

    def prepare(subject: object, *args: object) -> None:  # pytest counts these parameters
        run(subject, *args)

    new = run if test.__name__.startswith("test") else prepare
    functools.update_wrapper(new, test)
    new.__signature__ = signature(test)  # type: ignore[attr-defined]
    del new.__wrapped__  # type: ignore[attr-defined]
    return new


Args = tuple[Any, ...]  # of an audit event
Judge = tuple[Callable[[str, Args], str], Callable[[Args], bool], Callable[[str, Args, str, str], bool]]


def watch(tell: int, work: str, mine: str, secret: set[int]) -> Callable[[str, Args], None]:  # noqa: C901
    """Return an audit hook that ends the process when code cheats.

    It ends the process, and writes the reason to the descriptor `tell`, when anyone looks at the code of a test (by `secret`
    identities), and when code of the package in `work`, or code without a file, does what only cheating needs. Tests, pytest
    and this file (`mine`) may do anything. The hook looks up no global name, all it uses is bound in closures before the
    package is imported, and it calls no method of an object of the package.
    """
    frame_of, thread, leave, write = sys._getframe, __import__("_thread").get_ident, os._exit, os.write
    watched, code = (*ALWAYS, "sys._getframe", "object.__", "open", "compile", "import"), CODE
    busy, own = set(), set()  # threads that are in the hook, and those that are about to ask for a frame there
    identity, error_type, status = id, BaseException, REACHED
    named, of_a_test, suspicious = judge_of_events(work, secret)

    def end(event: str, name: str, where: str) -> None:
        write(tell, f"\nREACHED {event} {name!r} in {where!r}\n".encode("utf-8", "replace"))
        leave(status)

    def look(event: str, args: tuple[Any, ...]) -> None:
        name = named(event, args)
        guarded = event == "object.__getattr__" and name in code
        if guarded and of_a_test(args):
            end(event, name, "a test")
        me = thread()
        if me in busy:
            if me in own and event == "sys._getframe":
                own.discard(me)
            elif not guarded:
                end(event, name, "a signal, or the end of an object")
            return
        busy.add(me)
        own.add(me)
        frame = frame_of(2)
        caller = where = "" if identity(frame.f_globals) in secret else frame.f_code.co_filename
        while where and (not where.startswith((work, "<")) or where.startswith("<frozen")):
            before = frame.f_back
            if before is None:
                break
            frame = before
            where = "" if identity(frame.f_globals) in secret else frame.f_code.co_filename
        else:
            ours = not where or where == mine or "/tests/" in where or where.endswith("/conftest.py")
            if not ours and suspicious(event, args, caller, name):
                end(event, name, where)
        busy.discard(me)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(watched):
            try:
                look(event, args)
            except error_type:
                end(event, "", "an event that nobody raises")

    return hook


def judge_of_events(work: str, secret: set[int]) -> Judge:  # noqa: C901
    """Return three functions of the hook: an event's name, whether it reads a test's code, and whether it is suspicious.

    As in `watch`, these functions look up no global name.
    """
    always, frames, hidden, writing = ALWAYS, FRAMES, NOT_TO_BE_READ, os.O_WRONLY | os.O_RDWR
    text, data, number, function, frame_type = str, bytes, int, FunctionType, FrameType
    one_of, kind, identity, plain, decode, both = isinstance, type, id, str.__str__, bytes.decode, int.__and__

    def of_a_test(args: tuple[Any, ...]) -> bool:
        if kind(args[0]) is function:
            return identity(args[0]) in secret
        return kind(args[0]) is frame_type and identity(args[0].f_globals) in secret

    def opens(args: tuple[Any, ...], name: str) -> bool:
        if name.startswith("/") and not name.startswith((work, "/proc")) and ".." not in name:
            return False
        if one_of(args[2], number) and both(args[2], writing):
            return True
        for word in hidden:  # noqa: SIM110 - any() may be another one by now
            if word in f"/{name}":
                return True
        return False

    def suspicious(event: str, args: tuple[Any, ...], caller: str, name: str) -> bool:
        if event.startswith(always):
            return True
        if event == "import":
            return name == "_posixsubprocess"
        if event == "sys._getframe":
            return caller.startswith((work, "<")) or caller.endswith(("/inspect.py", "/traceback.py"))
        if event.startswith("object.__"):
            return name in frames and (name != "__code__" or identity(args[0].__globals__) in secret)
        if event == "compile":
            return one_of(args[1], text) and not name.startswith("<") and not caller.startswith("<frozen importlib")
        return event == "open" and one_of(args[0], (text, data)) and opens(args, name)

    def named(event: str, args: tuple[Any, ...]) -> str:
        found: Any = args[1] if event.startswith("object.__") or event == "compile" else args[0] if args else ""
        return plain(found) if one_of(found, text) else decode(found, "utf-8", "replace") if one_of(found, data) else ""

    return named, of_a_test, suspicious


def guard(tell: int, work: str, paths: Iterable[str]) -> None:
    """Install the finder of the tests in `paths`, and the hook, which tells what it sees on the descriptor `tell`.

    What both share, the identities of what the tests are, is in no frame that lives on, and no attribute of an object.
    """
    import signal
    import subprocess

    secret: set[int] = set()
    sys.meta_path.insert(0, Tests(work, paths, secret.add))
    hook = watch(tell, work, os.path.abspath(__file__), secret)
    subprocess._fork_exec = sys.modules["_posixsubprocess"].fork_exec = None  # type: ignore[attr-defined]
    # A handler would be given the frames of the hook, and with them all that it knows.
    signal.signal = sys.modules["_signal"].signal = None  # type: ignore[attr-defined, assignment]
    for name in sys.builtin_module_names:  # to make some, such as Debian's _pickle, others are imported
        __import__(name)
    importer = sys.modules["_imp"]
    creating = creates(importer.create_builtin)
    next(creating)
    importer.create_builtin = creating.send  # type: ignore[attr-defined]
    sys.addaudithook(hook)


def creates(create: Callable[[Any], Any]) -> Generator[Any, Any, None]:
    """Make builtin modules, but none that has what `guard` took away; a generator, so that nobody can take `create` out."""
    from types import SimpleNamespace as Spec

    module, text, refused = None, str.__str__, frozenset({"_imp", "_posixsubprocess", "_signal"})
    while True:
        spec = yield module
        name = text(spec.name)  # read once: the next time it may be another
        module = None if name in refused else create(Spec(name=name))


def run(package: str, seconds: float, paths: list[str]) -> None:
    """Run the tests in these files: paths from the working directory, where the `package` is."""
    import resource

    import pytest
    from _pytest.runner import runtestprotocol

    work, tell, passed = os.getcwd() + "/", os.dup(1), []
    fork, wait, pipe, close, read, write, leave = os.fork, os.waitpid, os.pipe, os.close, os.read, os.write, os._exit
    used, limit, join = os.times, resource.setrlimit, ",".join

    def in_child(item: Any, answer: int, left: float) -> None:
        limit(resource.RLIMIT_CPU, (int(left) + 1, int(left) + 1))
        calls = [r for r in runtestprotocol(item, nextitem=None, log=False) if r.when == "call"]
        if [r.outcome == "passed" and not hasattr(r, "wasxfail") for r in calls] == [True]:
            write(answer, f"passed {join(MARKS)}".encode())
        leave(0)

    class Apart:
        """Each test in a child, which says how the test's report came out, and the marks."""

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(self, item: Any) -> bool:
            """In place of pytest's own."""
            times = used()
            left = seconds - times.user - times.children_user - times.children_system
            if left <= 0:
                leave(1)  # and no test has passed
            answers, answer = pipe()
            child = fork()
            if not child:
                close(answers)
                in_child(item, answer, left)
            close(answer)
            said = b""
            while part := read(answers, 4096):
                said += part
            close(answers)
            status = wait(child, 0)[1]
            if said.startswith(b"passed ") and not status:
                passed.append(f"PASSED {said[7:].decode()} {item.nodeid}\n")
            return True

    guard(tell, work, paths)
    sys.path.insert(0, work)
    options = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-W", f"ignore:::{package}.conftest"]
    pytest.main([*options, *paths], plugins=[Apart()])
    for line in passed:
        write(tell, line.encode())


if __name__ == "__main__":
    run(sys.argv[1], float(sys.argv[2]), sys.argv[3:])

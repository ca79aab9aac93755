"""The sandboxes of Mini-SWE: one in which an attempt works, and a new one in which its tests run.

A sandbox has Python and pytest of this installation and no original of the package. Of what an attempt leaves, only the modules
that the package had are taken; tests and all other files that pytest reads come from the stored package.

Tests share a process with the code under test, whose author wants them to pass. So a test counts only if it reveals secrets
that stand at its end, and tests run twice, each time with another random half of them made to fail (`planted`): code that
controls pytest's reports knows neither. Each test has a process of its own without the test's source, under a hook that
watches what code accesses (`runner`). Names that cheating needs and repairing does not must not be new in a module.
docs/integrity.md lists what remains possible.
"""

import asyncio
import atexit
import functools
import io
import os
import re
import secrets
import shlex
import tarfile
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import SandboxError
from antiphon.sandbox.base import Limits, Status
from antiphon.sandbox.sessions.command import STDOUT
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.interpreter import with_python
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon_envs.mini_swe.packages import Files, Instance, Package, package_of
from antiphon_envs.mini_swe.planted import halves

LIMITS = Limits(seconds=60, cpu_seconds=600, memory=1 << 30, file_size=64 << 20, disk=128 << 20, processes=64)
TEST_CPU_SECONDS = 30  # of a suite, which needs a few
TEST_SECONDS = 100.0  # reached only on an overloaded machine, because the CPU limit ends a suite before
MOVE_SECONDS = 60.0  # to pack or unpack a tree
MOST_BYTES = 16 << 20  # of the modules that are taken from a sandbox
BUSY_PER_CORE = 2  # sandboxes that work at the same time
RUNNER = Path(__file__).with_name("runner.py")

REACHING = frozenset(
    b"__builtins__ __globals__ __import__ __subclasses__ _exit _getframe _pytest atexit builtins ctypes eval exec gc "
    b"importlib meta_path os pluggy pytest setprofile settrace subprocess sys unittest".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptVerdict:
    """The verdict on an attempt."""

    solved: bool
    passed: int
    """Number of tests that pass."""
    flags: tuple[str, ...] = ()
    """Signs of cheating; an attempt with any does not count."""


@functools.cache
def _shared() -> tuple[RuntimeDirs, ShellSandboxConfig]:
    """Return the directories and the configuration that all sandboxes of this process share."""
    rooms = RuntimeDirs()
    atexit.register(rooms.close)
    quiet = {"PYTHONWARNINGS": "ignore:::networkx.conftest"}  # its conftest warns outside a checkout
    return rooms, with_python(ShellSandboxConfig(limits=LIMITS, environment=quiet), rooms.path / "python", ("pytest",))


_TURNS: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = weakref.WeakKeyDictionary()


def turn() -> asyncio.Semaphore:
    """Return the semaphore to hold while a sandbox works: it keeps time limits meaningful on a busy machine."""
    most = BUSY_PER_CORE * len(os.sched_getaffinity(0))
    return _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(most))


async def open_box(tar: bytes) -> ShellSandbox:
    """Start a sandbox with a tree in its work directory."""
    box = await ShellSandbox.start(*_shared(), Deadlines())
    try:
        result = await Session(box).run("tar -xf -", seconds=MOVE_SECONDS, stdin=tar)
        if result.status is not Status.OK:
            raise SandboxError(f"a package could not be unpacked: {result.stderr or result.detail or result.status}")
    except BaseException:
        await box.close()
        raise
    return box


async def modules_in(box: ShellSandbox, package: Package) -> Files:
    """Return the modules of the package that are still files in a sandbox."""
    names = "\n".join(package.sources).encode()
    command = "tar --ignore-failed-read --no-recursion --hard-dereference -cf - -T -"
    result = await Session(box).run(command, seconds=MOVE_SECONDS, stdin=names, output=MOST_BYTES)
    if result.status is Status.TIMEOUT:
        raise SandboxError(f"the modules of {package.name} could not be taken out in {MOVE_SECONDS:g} s")
    files, expected = {}, set(package.sources)
    try:
        with tarfile.open(fileobj=io.BytesIO(result.raw(STDOUT)), mode="r:") as tar:
            for member in tar:
                if member.isreg() and member.name in expected and (content := tar.extractfile(member)):
                    files[member.name] = content.read()
    except tarfile.TarError:  # nothing is there, or more than is taken
        pass
    return files


async def judge(instance: Instance, modules: Files) -> AttemptVerdict:
    """Run the tests of an instance on a package with these modules.

    They run twice in new sandboxes; in each run another random half of the test functions must fail.
    """
    package = package_of(instance)
    before = {**package.files, instance.path: instance.faulty(package)}
    changed = {path: content for path, content in modules.items() if content != package.files[path]}
    missing = set(package.sources) - modules.keys()
    flags = {
        f"{path} reaches for {name}" for path in changed for name in _new_suspicious_names(before[path], changed[path])
    }
    passed: set[str] = set()
    for tests in halves({path: package.files[path] for path in instance.tests}, secrets.SystemRandom()):
        passes, reached = await run(package.tar({**changed, **tests.files}, missing), instance.tests)
        ended = {name for name, marks in passes.items() if tests.marks.get(_function(name), frozenset()) <= marks}
        lies = {name for name in ended if _function(name) in tests.must_fail}
        passed |= ended - lies
        flags |= {f"the tests saw {what}" for what in reached}
        if lies:
            flags.add("tests that must fail have passed")
        if passes.keys() - ended:
            flags.add("tests have passed that did not come to their end")
    return AttemptVerdict(
        solved=instance.solved_by(passed) and not flags, passed=len(passed), flags=tuple(sorted(flags))
    )


def _function(name: str) -> str:
    """Return the name of a test without its parameters."""
    return name.partition("[")[0]


async def passing(tar: bytes, tests: Collection[str]) -> set[str]:
    """Return the names of passing tests; none if they exceed the CPU limit. `SandboxError` if they do not end."""
    return {*(await run(tar, tests))[0]}


async def run(tar: bytes, tests: Collection[str]) -> tuple[dict[str, set[str]], set[str]]:
    """Run test files; return the reported passes with the marks that each test reached, and suspicious accesses."""
    folder, package = secrets.token_hex(8), PurePosixPath(next(iter(tests))).parts[0]
    runner = f"{folder}/{RUNNER.name}"
    command = f"mkdir {folder}; cat > {runner}; python -PB {runner} {package} {TEST_CPU_SECONDS} {shlex.join(tests)}"
    async with turn(), await open_box(tar) as box:
        result = await Session(box).run(command, seconds=TEST_SECONDS, stdin=RUNNER.read_bytes())
    if result.status is Status.TIMEOUT:
        raise SandboxError(f"the tests did not end in {TEST_SECONDS:g} s")
    passes: dict[str, set[str]] = {}
    reached = set()
    for line in result.stdout.splitlines():
        match line.split(" ", 2):
            case ["PASSED", marks, name]:
                passes[name] = {*marks.split(",")}
            case ["REACHED", *what]:
                reached.add(" ".join(what))
    return passes, reached


def _new_suspicious_names(before: bytes, after: bytes) -> list[str]:
    """Return the words of `REACHING` that were not in a file before."""
    words, known = (set(re.findall(rb"[A-Za-z_]\w*", text)) for text in (after, before))
    return sorted(word.decode() for word in (words - known) & REACHING)

"""The boxes of Mini-SWE: one that an attempt works in, and a fresh one that its tests run in.

No box sees the package as it is installed: of what is installed here it has Python and pytest. Of what an attempt leaves, only
the modules that the package had are taken; tests, and all else that pytest reads, come from the installation.

Tests run in one process with the code that they test, and that was written by somebody who wants them to pass. So a test
counts only if it gives away secrets that stand at its end, and tests run twice, each time with another random half of them
made to fail (`planted`): code that makes pytest say what it likes knows neither. Each test has a process of its own,
in which its source is no more, under a hook that sees what code reaches for (`runner`), and names that such code
needs, and mending a package does not, must not be new in a module. What is left is listed in docs/integrity.md.
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
TEST_CPU_SECONDS = 30  # for suites that need a few
TEST_SECONDS = 100.0  # for what, if it only computes, has been ended before, unless the machine is overloaded
MOVE_SECONDS = 60.0  # for a tree to be packed or unpacked
LARGEST = 16 << 20  # bytes of modules that are taken from a box
BUSY = 2  # boxes for each core in which something is done at a time
RUNNER = Path(__file__).with_name("runner.py")

REACHING = frozenset(
    b"__builtins__ __globals__ __import__ __subclasses__ _exit _getframe _pytest atexit builtins ctypes eval exec gc "
    b"importlib meta_path os pluggy pytest setprofile settrace subprocess sys unittest".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of an attempt."""

    solved: bool
    passed: int
    """Tests that pass now."""
    flags: tuple[str, ...] = ()
    """Why it does not count, if its tests may not tell the truth."""


@functools.cache
def _shared() -> tuple[RuntimeDirs, ShellSandboxConfig]:
    """What all boxes of this process have in common."""
    rooms = RuntimeDirs()
    atexit.register(rooms.close)
    quiet = {"PYTHONWARNINGS": "ignore:::networkx.conftest"}  # it would rather lie in a checkout
    return rooms, with_python(ShellSandboxConfig(limits=LIMITS, environment=quiet), rooms.path / "python", ("pytest",))


_TURNS: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = weakref.WeakKeyDictionary()


def turn() -> asyncio.Semaphore:
    """Held while anything is done in a box: time limits mean something only if this machine has time for all that is."""
    most = BUSY * len(os.sched_getaffinity(0))
    return _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(most))


async def open_box(tar: bytes) -> ShellSandbox:
    """A box with a tree in its work directory."""
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
    """The modules of the package that are there: those that it had, where they still are files."""
    names = "\n".join(package.sources).encode()
    command = "tar --ignore-failed-read --no-recursion --hard-dereference -cf - -T -"
    result = await Session(box).run(command, seconds=MOVE_SECONDS, stdin=names, output=LARGEST)
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


async def judge(instance: Instance, modules: Files) -> Verdict:
    """Run the tests of an instance on a package with these modules, twice, in fresh boxes: in each run another random half of
    the test functions must fail."""
    package = package_of(instance)
    before = {**package.files, instance.path: instance.faulty(package)}
    changed = {path: content for path, content in modules.items() if content != package.files[path]}
    missing = set(package.sources) - modules.keys()
    flags = {f"{path} reaches for {name}" for path in changed for name in _reached(before[path], changed[path])}
    passed: set[str] = set()
    for tests in halves({path: package.files[path] for path in instance.tests}, secrets.SystemRandom()):
        said, reached = await run(package.tar({**changed, **tests.files}, missing), instance.tests)
        ended = {name for name, marks in said.items() if tests.marks.get(_function(name), frozenset()) <= marks}
        lies = {name for name in ended if _function(name) in tests.must_fail}
        passed |= ended - lies
        flags |= {f"the tests saw {what}" for what in reached}
        if lies:
            flags.add("tests that must fail have passed")
        if said.keys() - ended:
            flags.add("tests have passed that did not come to their end")
    return Verdict(solved=instance.solved_by(passed) and not flags, passed=len(passed), flags=tuple(sorted(flags)))


def _function(name: str) -> str:
    """The name of a test without its parameters."""
    return name.partition("[")[0]


async def passing(tar: bytes, tests: Collection[str]) -> set[str]:
    """Names of the tests in these files that pass; none if they compute for too long. `SandboxError` if they do not end."""
    return {*(await run(tar, tests))[0]}


async def run(tar: bytes, tests: Collection[str]) -> tuple[dict[str, set[str]], set[str]]:
    """Names of the tests in these files that are said to pass, each with the marks that it came to, and what the package was
    seen to reach for."""
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


def _reached(before: bytes, after: bytes) -> list[str]:
    """Words of `REACHING` that were not in a file before."""
    words, known = (set(re.findall(rb"[A-Za-z_]\w*", text)) for text in (after, before))
    return sorted(word.decode() for word in (words - known) & REACHING)

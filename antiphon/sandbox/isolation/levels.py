"""How far this machine can keep a program apart: found by doing it, once.

`require_level` gives the highest level there is, and refuses if that is not enough. Nothing degrades silently.
"""

import functools
import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import antiphon
from antiphon.core.errors import UnsupportedError
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import cgroups, kernel, seccomp

PROBE_SECONDS = 30.0
TRIAL_UID = 60578
_SCOPED = 6  # the first version of Landlock that keeps signals and sockets in

_HOW_TO_LOWER = "to run untrusted code with less, say so in the YAML: {key}: {level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What works here."""

    root: bool
    landlock: int = 0
    """Version of Landlock's interface; 0 if it does not work."""
    seccomp: bool = False
    own_user: bool = False
    """Whether a program can be given a user of its own."""
    namespaces: bool = False
    user_namespace: bool = False
    """Whether the rights to make the other namespaces must come from one of users."""
    memory_groups: bool = False
    """Whether the memory of several processes can be bounded together."""
    problems: dict[str, str] = field(default_factory=dict)
    """What does not work, and the reason."""

    @property
    def level(self) -> Level | None:
        """The highest level; None where there is no level at all."""
        return next((level for level in sorted(Level, reverse=True) if not self.lacks(level)), None)

    def lacks(self, level: Level) -> list[str]:
        """What is missing for a level, each with the reason."""
        if "platform" in self.problems:
            return [self.problems["platform"]]
        needed = []
        if level >= Level.CONFINED:
            needed += [("landlock", bool(self.landlock)), ("seccomp", self.seccomp)]
            needed += [("own_user", self.own_user or not self.root)]
        if level == Level.CONFINED:  # level 3 keeps them in by namespaces
            needed += [("landlock_scopes", self.own_user or self.landlock >= _SCOPED)]
        if level >= Level.ISOLATED:
            needed += [("namespaces", self.namespaces)]
        return [f"{name}: {self.problems.get(name, 'missing')}" for name, there in needed if not there]


def require_level(minimum: Level, key: str = "sandbox.minimum_level") -> Level:
    """The highest level of this machine; `UnsupportedError` if it is below `minimum`, which is the value of `key`."""
    capabilities = probe()
    level = capabilities.level
    if level is None:
        raise UnsupportedError(f"there is no sandbox on this platform: {'; '.join(capabilities.lacks(Level.LIMITS))}")
    if level < minimum:
        raise UnsupportedError(
            f"this machine can run untrusted code at level {level} ({level.name.lower()}), but {key} is "
            f"{minimum} ({minimum.name.lower()}), for which it lacks: {'; '.join(capabilities.lacks(minimum))}; "
            + _HOW_TO_LOWER.format(key=key, level=int(level))
        )
    return level


@functools.cache
def probe() -> Capabilities:
    """What works here, tried in a process of its own."""
    command = python_command("antiphon.sandbox.isolation.levels", "report()")
    try:
        done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return Capabilities(root=False, problems={"platform": f"the trial failed: {detail.strip().splitlines()[-1]}"})
    return Capabilities(**json.loads(done.stdout))


def python_command(module: str, call: str) -> list[str]:
    """The command line of a clean Python that imports `module`, of ours, and does `call` in it; its path is as it was."""
    ours = str(Path(antiphon.__file__).parents[1])
    program = f"import sys; sys.path.insert(0, {ours!r}); import {module} as module; del sys.path[0]; module.{call}"
    return [os.path.realpath(sys.executable), "-I", "-S", "-E", "-X", "utf8", "-c", program]


def python_sources() -> dict[str, str]:
    """What a Python program reads of this machine: the path it is found at -> where it lies."""
    base = {"platbase": sys.base_exec_prefix}  # not of a virtual environment
    library = {sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")}
    installation = {os.path.realpath(sys.executable), *library}
    libraries = Path(sys.base_prefix) / "lib"
    shared = [str(path) for path in libraries.glob("*.so*")] if libraries != Path("/usr/lib") else []
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    return {path: path for path in [*sorted(installation), *shared, *system] if os.path.lexists(path)}


# --- what follows runs in the process of the trial -----------------------------------------------------------------------


def report() -> None:
    """Try everything and print what works."""
    print(json.dumps(asdict(_try_all())))  # noqa: T201 - this is the process's answer


def _try_all() -> Capabilities:
    root = os.geteuid() == 0
    try:
        kernel.machine()
        os.pidfd_open(os.getpid())
    except (OSError, AttributeError) as error:
        return Capabilities(root=root, problems={"platform": str(error)})
    trials: dict[str, Callable[[], object]] = {
        "landlock": _restrict_files,
        "seccomp": _filter_calls,
        "own_user": lambda: kernel.change_user(TRIAL_UID),
        "memory_groups": _make_group,
        "namespaces": lambda: _isolate(False),
    }
    problems = {name: problem for name, trial in trials.items() if (problem := _trial(trial))}
    user_namespace = False
    if "namespaces" in problems and not (problem := _trial(lambda: _isolate(True))):
        user_namespace = not root
        if user_namespace:
            del problems["namespaces"]
    version = 0 if "landlock" in problems else kernel.landlock_version()
    problems |= {"landlock_scopes": f"Landlock has version {version}, needed is {_SCOPED}"} if version < _SCOPED else {}
    return Capabilities(
        root=root,
        landlock=version,
        user_namespace=user_namespace,
        problems=problems,
        **{name: name not in problems for name in ("seccomp", "own_user", "memory_groups", "namespaces")},
    )


def _trial(attempt: Callable[[], object]) -> str:
    """Do it in a child; what went wrong, or nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 - named boundary: whatever it is, this does not work here
            os.write(writer, (str(error) or type(error).__name__).encode()[:1000])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        problem = pipe.read().decode()
    status = os.waitpid(pid, 0)[1]
    return problem or ("" if status == 0 else f"the trial ended with {os.waitstatus_to_exitcode(status)}")


def _restrict_files() -> None:
    kernel.forbid_privileges()
    kernel.restrict(kernel.file_rules(["/usr"], []))
    _must_fail(lambda: os.close(os.open("/", os.O_RDONLY)), "opening / is still allowed")


def _filter_calls() -> None:
    kernel.forbid_privileges()
    seccomp.install(seccomp.filter_program())
    _must_fail(socket.socket, "a socket can still be made")


def _must_fail(attempt: Callable[[], object], otherwise: str) -> None:
    try:
        attempt()
    except PermissionError:
        return
    raise OSError(otherwise)


def _make_group() -> None:
    _, path = cgroups.make_group(f"antiphon-trial-{os.getpid()}")
    cgroups.remove_group(path)


def _isolate(user_namespace: bool) -> None:
    """Enter a root of its own, and start a process in namespaces of its own there."""
    namespaces = kernel.NEW_MOUNTS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_UTS | kernel.NEW_CGROUP
    proc, uid, gid = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY), os.getuid(), os.getgid()
    kernel.unshare(namespaces | (kernel.NEW_USER if user_namespace else 0))
    if user_namespace:
        kernel.map_user(proc, 0, uid, gid)
    kernel.enter_root({})
    inner = kernel.NEW_PIDS | kernel.NEW_MOUNTS | (kernel.NEW_USER if user_namespace else 0)
    pid = kernel.fork(inner)
    if not pid:
        try:
            if user_namespace:
                kernel.map_user(proc, TRIAL_UID, 0, 0)
            kernel.mount_scratch("/tmp", 1 << 20, TRIAL_UID)
            os._exit(0 if os.getpid() == 1 else 2)
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise OSError("a process in new namespaces cannot mount a file system in memory")

"""Finds the highest isolation level that this machine supports, by trying each feature once.

`require_level` returns that level and raises if it is too low. No level is lowered silently.
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
_SCOPED = 6  # the first version of Landlock that confines signals and abstract sockets

_HOW_TO_LOWER = "to accept less isolation for untrusted code, set in the YAML: {key}: {level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Isolation features that work on this machine."""

    root: bool
    landlock: int = 0
    """Version of Landlock's interface; 0 if it does not work."""
    seccomp: bool = False
    own_user: bool = False
    """True if a program can get a user of its own."""
    namespaces: bool = False
    user_namespace: bool = False
    """True if the other namespaces can only be created inside a user namespace."""
    memory_groups: bool = False
    """True if the memory of several processes can be bounded together."""
    problems: dict[str, str] = field(default_factory=dict)
    """Features that do not work -> the reason."""

    @property
    def level(self) -> Level | None:
        """The highest supported level; None if the platform supports none."""
        return next((level for level in sorted(Level, reverse=True) if not self.missing_for(level)), None)

    def missing_for(self, level: Level) -> list[str]:
        """Return the features that a level lacks, each with the reason."""
        if "platform" in self.problems:
            return [self.problems["platform"]]
        needed = []
        if level >= Level.CONFINED:
            needed += [("landlock", bool(self.landlock)), ("seccomp", self.seccomp)]
            needed += [("own_user", self.own_user or not self.root)]
        if level == Level.CONFINED:  # level 3 confines signals and sockets by namespaces
            needed += [("landlock_scopes", self.own_user or self.landlock >= _SCOPED)]
        if level >= Level.ISOLATED:
            needed += [("namespaces", self.namespaces)]
        return [f"{name}: {self.problems.get(name, 'missing')}" for name, there in needed if not there]


def require_level(minimum: Level, key: str = "sandbox.minimum_level") -> Level:
    """Return the highest level of this machine.

    Args:
        minimum: The lowest acceptable level.
        key: Configuration key of `minimum`, for the error.

    Raises:
        UnsupportedError: This machine does not reach `minimum`.
    """
    capabilities = probe()
    level = capabilities.level
    if level is None:
        reasons = "; ".join(capabilities.missing_for(Level.LIMITS))
        raise UnsupportedError(f"this platform has no sandbox: {reasons}", key=key, value=minimum)
    if level < minimum:
        raise UnsupportedError(
            f"this machine can run untrusted code at level {level} ({level.name.lower()}), but {key} is "
            f"{minimum} ({minimum.name.lower()}), for which it lacks: {'; '.join(capabilities.missing_for(minimum))}; "
            + _HOW_TO_LOWER.format(key=key, level=int(level)),
            key=key,
            value=minimum,
        )
    return level


@functools.cache
def probe() -> Capabilities:
    """Try all features in a separate process and return those that work."""
    command = python_command("antiphon.sandbox.isolation.levels", "report()")
    try:
        done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return Capabilities(root=False, problems={"platform": f"the trial failed: {detail.strip().splitlines()[-1]}"})
    return Capabilities(**json.loads(done.stdout))


def python_command(module: str, call: str) -> list[str]:
    """Return the command line of a clean Python that imports our `module` and makes `call` in it, with `sys.path` unchanged."""
    ours = str(Path(antiphon.__file__).parents[1])
    program = f"import sys; sys.path.insert(0, {ours!r}); import {module} as module; del sys.path[0]; module.{call}"
    return [os.path.realpath(sys.executable), "-I", "-S", "-E", "-X", "utf8", "-c", program]


def python_sources() -> dict[str, str]:
    """Return the files that a Python program needs, as path in the sandbox -> path on this machine."""
    base = {"platbase": sys.base_exec_prefix}  # the base installation, not the virtual environment
    library = {sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")}
    installation = {os.path.realpath(sys.executable), *library}
    libraries = Path(sys.base_prefix) / "lib"
    shared = [str(path) for path in libraries.glob("*.so*")] if libraries != Path("/usr/lib") else []
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    return {path: path for path in [*sorted(installation), *shared, *system] if os.path.lexists(path)}


# --- the following runs in the trial process -----------------------------------------------------------------------


def report() -> None:
    """Try all features and print those that work."""
    print(json.dumps(asdict(_try_all())))  # noqa: T201 - this is the process's answer


def _try_all() -> Capabilities:
    root = os.geteuid() == 0
    try:
        kernel.machine()
        os.pidfd_open(os.getpid())
    except (OSError, AttributeError) as error:
        return Capabilities(root=root, problems={"platform": str(error)})
    trials: dict[str, Callable[[], object]] = {
        "landlock": _try_landlock,
        "seccomp": _try_seccomp,
        "own_user": lambda: kernel.change_user(TRIAL_UID),
        "memory_groups": _try_cgroup,
        "namespaces": lambda: _try_namespaces(False),
    }
    problems = {name: problem for name, trial in trials.items() if (problem := _try_in_child(trial))}
    user_namespace = False
    if "namespaces" in problems and not (problem := _try_in_child(lambda: _try_namespaces(True))):
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


def _try_in_child(attempt: Callable[[], object]) -> str:
    """Call `attempt` in a child process and return what went wrong, or an empty string."""
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


def _try_landlock() -> None:
    kernel.forbid_privileges()
    kernel.apply_landlock(kernel.make_landlock_rules(["/usr"], []))
    _expect_denied(lambda: os.close(os.open("/", os.O_RDONLY)), "opening / is still allowed")


def _try_seccomp() -> None:
    kernel.forbid_privileges()
    seccomp.install_filter(seccomp.filter_program())
    _expect_denied(socket.socket, "a socket can still be made")


def _expect_denied(attempt: Callable[[], object], otherwise: str) -> None:
    try:
        attempt()
    except PermissionError:
        return
    raise OSError(otherwise)


def _try_cgroup() -> None:
    _, path = cgroups.make_group(f"antiphon-trial-{os.getpid()}")
    cgroups.remove_group(path)


def _try_namespaces(user_namespace: bool) -> None:
    """Enter a private root and start a process in new namespaces there."""
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

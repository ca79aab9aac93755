"""Boxes with the commands of this machine, made by bubblewrap."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from antiphon.core.errors import SandboxError, UnsupportedError
from antiphon.sandbox.isolation import kernel, levels, seccomp
from antiphon.sandbox.sessions.config import CONTROL, PATH, USER, VARIABLES, WORK, Launched, ShellSandboxConfig
from antiphon.sandbox.sessions.egress import PROXIES
from antiphon.sandbox.sessions.runtime_dirs import FILES

NOBODY = 65534  # outside, where the controller is root

_SYSTEM = (
    "/usr",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/ssl/certs",
)


_KERNEL = "/run/landlock"
# Landlock forbids to mount, so it comes last: process 1 is a Python that shuts itself in and then becomes the keeper's shell.
_CONFINE = f"""
import os, signal, sys
sys.path.append({_KERNEL!r})
import kernel
for number in signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP}}:  # what is ignored here no shell can take back
    signal.signal(number, signal.SIG_DFL)
writable = ["/dev", "/dev/shm", "/proc", "/tmp", {WORK!r}, {CONTROL!r}]
kernel.apply_landlock(kernel.make_landlock_rules(["/"], writable, connect=True))
os.execv("/bin/bash", ["/bin/bash", "-c", sys.argv[1]])
"""


async def launch(config: ShellSandboxConfig, room: Path, keeper: str) -> Launched:
    """Start a box whose process 1 runs `keeper`, a program for bash."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UnsupportedError("shell sandboxes need bwrap, and there is none here: install the package bubblewrap")
    if config.network and shutil.which("python3", path=PATH) is None:
        raise UnsupportedError("a box with a network needs the python3 of the system, and there is none here")
    told, tell = os.pipe()
    held, release = os.pipe()
    try:
        process = _spawn([bwrap, *_arguments(config, room)], keeper, room, tell, held)
    except BaseException:
        os.close(told)
        os.close(release)
        raise
    finally:
        os.close(tell)
        os.close(held)
    try:
        answer = await asyncio.to_thread(_read_all, told)
        if not answer:
            said = (room / "errors").read_text(encoding="utf-8", errors="replace").strip()
            raise SandboxError(f"bubblewrap made no box: {said or 'it said nothing'}")
        return Launched(process=process, first=json.loads(answer)["child-pid"], held=release)
    except BaseException:
        process.kill()
        process.wait()
        os.close(release)
        raise


def _spawn(command: list[str], keeper: str, room: Path, tell: int, held: int) -> "subprocess.Popen[bytes]":
    """It tells of process 1 in `tell`, and that one waits until the other end of `held` is closed."""
    user = NOBODY if os.geteuid() == 0 else None
    with (room / "errors").open("wb") as errors, tempfile.TemporaryFile() as calls:
        calls.write(seccomp.filter_program(sockets=True))
        calls.seek(0)
        descriptors = ["--info-fd", str(tell), "--block-fd", str(held), "--seccomp", str(calls.fileno())]
        return subprocess.Popen(
            [*command, *descriptors, _python(), "-I", "-S", "-E", "-c", _CONFINE, keeper],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[tell, held, calls.fileno()],
            cwd="/",
            env={},
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )


def _python() -> str:
    """The interpreter that process 1 begins as: the system's, which all boxes have, or where there is none our own."""
    return shutil.which("python3", path=PATH) or os.path.realpath(sys.executable)


def _read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as pipe:
        return pipe.read()


def _arguments(config: ShellSandboxConfig, room: Path) -> list[str]:
    """What bubblewrap is told of namespaces and mounts."""
    told = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1"]
    told += ["--uid", str(USER), "--gid", str(USER), "--hostname", "box", "--cap-drop", "ALL", "--clearenv"]
    proxies = PROXIES if config.network else {}
    for name, value in {"PATH": PATH, **VARIABLES, **proxies, **config.environment}.items():
        told += ["--setenv", name, value]
    for path in _SYSTEM:
        told += ["--ro-bind-try", path, path]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        told += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    for name in FILES:
        told += ["--ro-bind", str(room.parent / name), f"/etc/{name}"]
    ours = levels.python_sources() if _python() == os.path.realpath(sys.executable) else {}
    for inside, here in {**ours, f"{_KERNEL}/kernel.py": kernel.__file__, **config.mounts}.items():
        told += ["--ro-bind", str(here), inside]
    told += ["--proc", "/proc", "--dev", "/dev"]
    for path, mode in (("/dev/shm", "1777"), ("/tmp", "1777"), (WORK, "0755")):
        told += ["--perms", mode, "--size", str(config.limits.disk), "--tmpfs", path]
    told += ["--ro-bind", str(room), CONTROL, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
    return told

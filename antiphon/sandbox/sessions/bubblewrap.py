"""Starts shell sandboxes with bubblewrap. They have the commands of this machine."""

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

NOBODY = 65534  # user of the sandbox outside, if the controller is root

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
# Landlock forbids mounting, so it comes last: process 1 starts as a Python that applies it and then becomes the keeper's shell.
_CONFINE = f"""
import os, signal, sys
sys.path.append({_KERNEL!r})
import kernel
# A shell cannot reset a signal that is ignored when it starts.
for number in signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP}}:
    signal.signal(number, signal.SIG_DFL)
writable = ["/dev", "/dev/shm", "/proc", "/tmp", {WORK!r}, {CONTROL!r}]
kernel.apply_landlock(kernel.make_landlock_rules(["/"], writable, connect=True))
os.execv("/bin/bash", ["/bin/bash", "-c", sys.argv[1]])
"""


async def launch(config: ShellSandboxConfig, directory: Path, keeper: str) -> Launched:
    """Start a sandbox whose process 1 runs `keeper`, a program for bash.

    Raises:
        UnsupportedError: bubblewrap is missing, or the sandbox needs a `python3` that the system lacks.
        SandboxError: bubblewrap failed.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UnsupportedError(
            "shell sandboxes need bwrap, which is not installed here: install the package bubblewrap"
        )
    if config.network and shutil.which("python3", path=PATH) is None:
        message = "a sandbox with a network needs the system's python3, which is not installed here"
        raise UnsupportedError(message, key="network", value=config.network)
    info_reader, info_writer = os.pipe()
    held, release = os.pipe()
    try:
        process = _spawn(bwrap, _arguments(config, directory), keeper, directory, info_writer, held)
    except BaseException:
        os.close(info_reader)
        os.close(release)
        raise
    finally:
        os.close(info_writer)
        os.close(held)
    try:
        answer = await asyncio.to_thread(_read_all, info_reader)
        if not answer:
            reason = (directory / "errors").read_text(encoding="utf-8", errors="replace").strip()
            raise SandboxError(f"bubblewrap started no sandbox: {reason or 'it gave no reason'}")
        return Launched(process=process, first=json.loads(answer)["child-pid"], held=release)
    except BaseException:
        process.kill()
        process.wait()
        os.close(release)
        raise


def _spawn(
    bwrap: str, arguments: list[str], keeper: str, directory: Path, info: int, held: int
) -> "subprocess.Popen[bytes]":
    """Start bubblewrap. It writes about process 1 to `info`; process 1 waits until the other end of `held` is closed.

    Its arguments go through a file, because every user of the machine can read those of a command line: here are the
    environment, with keys, and the path of the pipes.
    """
    user = NOBODY if os.geteuid() == 0 else None
    with (
        (directory / "errors").open("wb") as errors,
        tempfile.TemporaryFile() as calls,
        tempfile.TemporaryFile() as given,
    ):
        for file, content in ((calls, seccomp.filter_program(sockets=True)), (given, _terminate(arguments))):
            file.write(content)
            file.seek(0)
        descriptors = ["--info-fd", str(info), "--block-fd", str(held), "--seccomp", str(calls.fileno())]
        return subprocess.Popen(
            [bwrap, "--args", str(given.fileno()), *descriptors, _python(), "-I", "-S", "-E", "-c", _CONFINE, keeper],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[info, held, calls.fileno(), given.fileno()],
            cwd="/",
            env={},
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )


def _terminate(arguments: list[str]) -> bytes:
    return b"".join(os.fsencode(argument) + b"\0" for argument in arguments)


def _python() -> str:
    """Return the interpreter that process 1 starts as: the system's, which every sandbox has, or else our own."""
    return shutil.which("python3", path=PATH) or os.path.realpath(sys.executable)


def _read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as pipe:
        return pipe.read()


def _arguments(config: ShellSandboxConfig, directory: Path) -> list[str]:
    """Return bubblewrap's arguments for namespaces and mounts."""
    arguments = [
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
    ]
    arguments += ["--uid", str(USER), "--gid", str(USER), "--hostname", "box", "--cap-drop", "ALL", "--clearenv"]
    proxies = PROXIES if config.network else {}
    for name, value in {"PATH": PATH, **VARIABLES, **proxies, **config.environment}.items():
        arguments += ["--setenv", name, value]
    for path in _SYSTEM:
        arguments += ["--ro-bind-try", path, path]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        arguments += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    for name in FILES:
        arguments += ["--ro-bind", str(directory.parent / name), f"/etc/{name}"]
    ours = levels.python_sources() if _python() == os.path.realpath(sys.executable) else {}
    for inside, here in {**ours, f"{_KERNEL}/kernel.py": kernel.__file__, **config.mounts}.items():
        arguments += ["--ro-bind", str(here), inside]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for path, mode in (("/dev/shm", "1777"), ("/tmp", "1777"), (WORK, "0755")):
        arguments += ["--perms", mode, "--size", str(config.limits.disk), "--tmpfs", path]
    arguments += ["--ro-bind", str(directory), CONTROL, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
    return arguments

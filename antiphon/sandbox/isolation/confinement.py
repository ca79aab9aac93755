"""Confines the calling process for good: for trusted code that reads model output with large libraries.

Such a process needs no new sandbox for each text. It must confine itself before it starts threads, because confinement covers
the calling thread and those that it starts. This module imports the standard library and modules of this directory that do the
same.
"""

import os
import resource
import signal
import sys
from collections.abc import Iterable
from typing import NoReturn

from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import kernel, seccomp, users

_USER_CLAIMS: list[object] = []  # sockets that reserve this process's user until it ends


def confine(level: Level, readable: Iterable[str], *, user_namespace: bool = False) -> None:
    """Confine this process at level 2 or 3.

    At level 2 the process can only read files below `readable`. It has no network and no privileges, and a user of its own if
    root starts it. At level 3 it also has namespaces: a child continues in them, while this process waits and then ends the
    way the child did.

    Args:
        level: Isolation of the process.
        readable: Paths below which files can be read.
        user_namespace: Create the other namespaces inside a user namespace.

    Raises:
        OSError: The machine cannot do this.
    """
    paths = _existing(readable)
    kernel.set_limits({resource.RLIMIT_CORE: 0})
    root = os.getuid() == 0
    if root:
        claim, uid = users.claim_user()  # before the network namespace, in which all socket names are free
        _USER_CLAIMS.append(claim)
    if level >= Level.ISOLATED:
        _enter_namespaces(paths, user_namespace)
    kernel.forbid_privileges()
    kernel.apply_landlock(kernel.make_landlock_rules(paths, [f"/dev/{name}" for name in kernel.DEVICES]))
    if root:
        private = level < Level.ISOLATED and users.have_private_parents(paths)
        kernel.change_user(uid, keep=(kernel.READ_SEARCH,) if private else ())
    else:
        kernel.drop_capabilities()
    seccomp.install_filter(seccomp.filter_program(keep_attributes=True))


def _existing(paths: Iterable[str]) -> list[str]:
    """Return the paths that exist, and the targets of those that are links."""
    found = {each for path in paths for each in (os.path.abspath(path), os.path.realpath(path))}
    return sorted(path for path in found if os.path.exists(path))


def _enter_namespaces(paths: list[str], user_namespace: bool) -> None:
    proc, uid, gid = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY), os.getuid(), os.getgid()
    namespaces = kernel.NEW_MOUNTS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_UTS | kernel.NEW_CGROUP
    kernel.unshare(namespaces | (kernel.NEW_USER if user_namespace else 0))
    if user_namespace:
        kernel.map_user(proc, uid, uid, gid)
    os.close(proc)
    kernel.enter_root({path: path for path in paths})
    child = kernel.fork(kernel.NEW_PIDS)
    if child:
        _end_as(child)


def _end_as(child: int) -> NoReturn:
    """Wait for a child and end with its exit code or signal."""
    kernel.close_from(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.stderr.flush()
    os._exit(code & 0xFF)

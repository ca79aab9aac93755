"""A process that confines itself, for good: for code of ours that reads with large libraries what a model wrote.

It needs no sandbox started for each text, and so costs none of them any time. It must come first: what is confined is a thread,
and those that it starts. The standard library alone is imported here, and neighbours that do the same.
"""

import os
import resource
import signal
import sys
from collections.abc import Iterable
from typing import NoReturn

from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import kernel, seccomp, users

_CLAIMS: list[object] = []  # what this process holds until it ends


def confine(level: Level, readable: Iterable[str], *, user_namespace: bool = False) -> None:
    """From here on the process opens no file but what lies below `readable`, to read it; it has no network, no privileges, and
    where root starts it a user of its own. That is level 2. At level 3 it has namespaces too, in a child that takes its place,
    while the process itself waits and then ends as the child did. `OSError` if the machine cannot do it."""
    paths = _existing(readable)
    kernel.limit({resource.RLIMIT_CORE: 0})
    root = os.getuid() == 0
    if root:
        claim, uid = users.claim()  # before it has a network of its own, in which all names are free
        _CLAIMS.append(claim)
    if level >= Level.ISOLATED:
        _isolate(paths, user_namespace)
    kernel.forbid_privileges()
    kernel.restrict(kernel.file_rules(paths, [f"/dev/{name}" for name in kernel.DEVICES]))
    if root:
        hidden = level < Level.ISOLATED and users.hidden(paths)
        kernel.change_user(uid, keep=(kernel.READ_SEARCH,) if hidden else ())
    else:
        kernel.keep_capabilities()
    seccomp.install(seccomp.filter_program(keep_attributes=True))


def _existing(paths: Iterable[str]) -> list[str]:
    """The paths that are there, and what they are links to."""
    found = {each for path in paths for each in (os.path.abspath(path), os.path.realpath(path))}
    return sorted(path for path in found if os.path.exists(path))


def _isolate(paths: list[str], user_namespace: bool) -> None:
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
    kernel.close_from(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.stderr.flush()
    os._exit(code & 0xFF)

"""System calls that confine a process: namespaces, mounts, Landlock, capabilities and resource limits.

This file imports the standard library alone, because shell sandboxes run a copy of it. `seccomp` has the filters of system
calls, and `cgroups` the control groups. Every failure is an `OSError` that names the call. Numbers and structures are those of
the kernel's headers, for x86_64 and aarch64.
"""

import ctypes
import os
import platform
import resource
import signal
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence

NEW_MOUNTS = 0x00020000
NEW_CGROUP = 0x02000000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

READ_ONLY, NO_SUID, NO_DEVICES = 0x1, 0x2, 0x4  # flags of both mount and mount_setattr
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x1000, 0x4000, 0x40000, 0x2

DEVICES = ("null", "zero", "full", "random", "urandom")
READ_SEARCH = 2  # CAP_DAC_READ_SEARCH: read files and directories whatever their permissions
OF_FILES = (0, 1, READ_SEARCH, 3, 4)  # all capabilities that concern files alone: owners, permissions, set-id bits

# Calls made here, as name: (x86_64, aarch64). The calls that filters deny are listed in `syscalls`.
_NUMBERS = {
    "clone": (56, 220),
    "capset": (126, 91),
    "pivot_root": (155, 41),
    "close_range": (436, 436),
    "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
_MACHINES = {"x86_64": 0, "aarch64": 1}

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock, so that after a fork both processes hold it


def machine() -> int:
    """Return the column of the syscall tables for this processor.

    Raises:
        OSError: The platform is not Linux on a supported processor.
    """
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        raise OSError(f"{platform.system()} on {platform.machine()}: supported is Linux on {', '.join(_MACHINES)}")
    return _MACHINES[platform.machine()]


def _check(name: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Make the system call `name`."""
    words = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return _check(name, _libc.syscall(ctypes.c_long(_NUMBERS[name][machine()]), *words))


def _prctl(name: str, option: int, *arguments: int | bytes) -> None:
    words = [ctypes.c_ulong(item) if isinstance(item, int) else item for item in arguments]
    _check(f"prctl {name}", _libc.prctl(option, *words, *[ctypes.c_ulong(0)] * (4 - len(words))))


# --- processes -------------------------------------------------------------------------------------------------------------


def fork(namespaces: int = 0) -> int:
    """Fork like `os.fork`, but into new namespaces. The caller must have a single thread."""
    if not namespaces:
        return os.fork()
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    try:
        pid = _call("clone", namespaces | signal.SIGCHLD, 0, 0, 0, 0)
    except OSError:
        python.PyOS_AfterFork_Parent()
        raise
    if pid:
        python.PyOS_AfterFork_Parent()
    else:
        python.PyOS_AfterFork_Child()
    return pid


def unshare(namespaces: int) -> None:
    """Move this process into new namespaces. A new process namespace holds its children only."""
    _check("unshare", _libc.unshare(namespaces))


def map_user(proc: int, inside: int, uid: int, gid: int) -> None:
    """Map this process to user and group `inside` in its new user namespace.

    Args:
        proc: Descriptor of /proc.
        inside: User and group in the new namespace.
        uid: User outside.
        gid: Group outside.
    """
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {uid} 1"),
        ("gid_map", f"{inside} {gid} 1"),
    ):
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        try:
            os.write(descriptor, content.encode())
        finally:
            os.close(descriptor)


def become_subreaper() -> None:
    """Adopt every descendant of this process that loses its parent."""
    _prctl("subreaper", 36, 1)


def close_from(first: int) -> None:
    """Close every descriptor from `first` on."""
    _call("close_range", first, 0xFFFFFFFF, 0)


def change_user(uid: int, keep: Sequence[int] = ()) -> None:
    """Become user `uid` without other groups, keeping only the capabilities `keep`."""
    if keep:
        _prctl("keep capabilities", 8, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    drop_capabilities(keep)


def drop_capabilities(keep: Sequence[int] = ()) -> None:
    """Give up all capabilities but `keep` (each below 32)."""
    mask = sum(1 << capability for capability in keep)
    _call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", mask, mask, 0, 0, 0, 0))


def forbid_privileges() -> None:
    """Prevent programs started from here from gaining rights, and make this process opaque."""
    _prctl("no new privileges", 38, 1)
    make_opaque()


def make_opaque() -> None:
    """Close the memory and descriptors of this process, and of those forked from it, to others without CAP_SYS_PTRACE.

    It also leaves no core when it crashes. A new program (`exec`) and a change of user end this.
    """
    _prctl("not dumpable", 4, 0)


def set_filter(program: bytes) -> None:
    """Install a seccomp filter, given as a `struct sock_fprog`."""
    _prctl("seccomp", 22, 2, program)


def set_limits(values: Mapping[int, int]) -> None:
    """Set soft and hard limits of `resource`, never above the present hard limit."""
    for name, value in values.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


# --- files -----------------------------------------------------------------------------------------------------------------


def mount_scratch(target: str, size: int, uid: int) -> None:
    """Mount an empty file system in memory, of at most `size` bytes and owned by `uid`."""
    options = f"size={size},nr_inodes={max(1024, size >> 12)},mode=0700,uid={uid},gid={uid}"
    _mount("tmpfs", target, "tmpfs", NO_SUID | NO_DEVICES, options)


def unmount(target: str) -> None:
    """Detach a file system at once, even if it is in use."""
    _check(f"umount {target}", _libc.umount2(os.fsencode(target), _DETACH))


def enter_root(sources: Mapping[str, str]) -> None:
    """Replace the root of this mount namespace by a read-only one that holds `sources`, a few devices and an empty /tmp.

    Args:
        sources: Path in the new root -> path in the old one.
    """
    base = "/proc"  # a mount point that no source lies below
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", base, "tmpfs", NO_SUID | NO_DEVICES, "mode=0755,size=1m")
    for target, source in sources.items():
        _bind(source, base + target)
    os.mkdir(f"{base}/dev")
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{base}/dev/{name}")
    os.symlink("/tmp/shm", f"{base}/dev/shm")
    os.makedirs(f"{base}/tmp", exist_ok=True)
    _protect(base, READ_ONLY | NO_SUID | NO_DEVICES)
    os.chdir(base)
    _call("pivot_root", b".", b".")
    unmount(".")
    os.chdir("/")


def _bind(source: str, target: str) -> None:
    if os.path.islink(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(source, target, None, _BIND | _RECURSIVE)
    device = stat.S_ISCHR(os.stat(source).st_mode)
    _protect(target, READ_ONLY | NO_SUID | (0 if device else NO_DEVICES), recursive=True)


def _protect(target: str, flags: int, recursive: bool = False) -> None:
    at_fdcwd, at_recursive = -100, 0x8000
    attributes = struct.pack("4Q", flags, 0, 0, 0)
    _call("mount_setattr", at_fdcwd, os.fsencode(target), at_recursive if recursive else 0, attributes, len(attributes))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(f"mount {source or 'none'} on {target}", result)


# --- Landlock --------------------------------------------------------------------------------------------------------------

_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_MAKE_DEVICES = 1 << 6 | 1 << 11
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of file rights, by version; 16 from version 5 on
_SCOPES_SINCE, _NETWORK_SINCE = 6, 4


def landlock_version() -> int:
    """Return the version of Landlock's interface; raise `OSError` if the kernel has none."""
    return _call("landlock_create_ruleset", None, 0, 1)


def make_landlock_rules(readable: Iterable[str], writable: Iterable[str], *, connect: bool = False) -> int:
    """Make Landlock rules for `apply_landlock` and return their descriptor.

    Where this version of Landlock supports it, the rules also keep signals and abstract Unix sockets inside the sandbox.

    Args:
        readable: Paths below which files can be read and executed.
        writable: Paths below which files can also be written and created.
        connect: Allow TCP.
    """
    version = landlock_version()
    every = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    network = 0b11 if version >= _NETWORK_SINCE and not connect else 0
    scopes = 0b11 if version >= _SCOPES_SINCE else 0
    fields = 1 + (version >= _NETWORK_SINCE) + (version >= _SCOPES_SINCE)
    attributes = struct.pack("3Q", every, network, scopes)[: 8 * fields]
    rules = _call("landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        for path in readable:
            _allow(rules, path, _EXECUTE | _READ | _LIST)
        for path in writable:
            _allow(rules, path, every & ~_MAKE_DEVICES)
    except BaseException:
        os.close(rules)
        raise
    return rules


def apply_landlock(rules: int) -> None:
    """Apply the rules to this process for good, and close their descriptor. Requires `forbid_privileges` first."""
    try:
        _call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        _call("landlock_add_rule", rules, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)

"""Seccomp filters: one for programs at levels 2 and 3, and a short one for level 1.

A denied call fails with EPERM, and the program goes on. A call of another architecture (`int 0x80` on x86_64) kills it. The
filter is classic BPF, the format that the kernel and `bwrap --seccomp` take.
"""

import ctypes
import errno
import functools
import struct
from collections.abc import Sequence

from antiphon.sandbox.isolation import kernel
from antiphon.sandbox.isolation.syscalls import (
    ALL_NAMESPACES,
    ATTRIBUTES,
    CONDITIONAL,
    DENIED,
    F_SETOWN,
    F_SETOWN_EX,
    FCNTL,
    FIOSETOWN,
    PIDFD_SEND_SIGNAL,
    PROCESSES,
    SHARED,
    SIGNALS,
    SIOCSPGRP,
    SO_ATTACH_FILTER,
    SO_ATTACH_REUSEPORT_CBPF,
    SOCKET,
    SOL_SOCKET,
    TIOCLINUX,
    TIOCSTI,
    SyscallTable,
)

_AUDIT = (0xC000003E, 0xC00000B7)  # audit architecture numbers of x86_64 and aarch64
_X32 = 0x40000000  # bit of calls of the x32 interface, which share x86_64's audit number

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def _return(action: int) -> _Instruction:
    return _RETURN, 0, 0, action


_ALLOW = _return(0x7FFF0000)
_KILL = _return(0x80000000)
_DENY = _return(0x00050000 | errno.EPERM)
_NOT_IMPLEMENTED = _return(0x00050000 | errno.ENOSYS)


def _argument(index: int) -> _Instruction:
    """Load the lower half of an argument, which is all that the kernel reads of the arguments checked here."""
    return _LOAD, 0, 0, 16 + 8 * index


def _only_if(index: int, value: int) -> list[_Instruction]:
    """Deny the call unless an argument has this value."""
    return [_argument(index), (_EQUAL, 1, 0, value), _DENY]


def _choose(index: int, values: Sequence[int], found: _Instruction, otherwise: _Instruction) -> list[_Instruction]:
    """Return `found` for a call of which an argument has one of the values. Ends in a return."""
    jumps = [(_EQUAL, len(values) - number, 0, value & 0xFFFFFFFF) for number, value in enumerate(values)]
    return [_argument(index), *jumps, otherwise, found]


def _condition_instructions(name: str) -> list[_Instruction]:
    """Return the instructions for a call of which only some uses are denied. They end in a return."""
    if name == "clone3":  # its flags lie in memory, where no filter sees them; the C library falls back to clone
        return [_NOT_IMPLEMENTED]
    if name == "clone":
        return [_argument(0), (_ANY_BIT, 0, 1, ALL_NAMESPACES), _DENY, _ALLOW]
    if name == "ioctl":  # these requests put characters into a terminal as if they had been typed
        return _choose(1, (TIOCSTI, TIOCLINUX), _DENY, _ALLOW)
    if name == "socketpair":  # a datagram socket could send to others by name
        stream, packets, unix = 1, 5, 1
        kind = [_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 2, 0, stream), (_EQUAL, 1, 0, packets), _DENY, _ALLOW]
        return _only_if(0, unix) + kind
    if name == "setsockopt":  # socket filters: the whole machine shares the memory of compiled ones (bpf_jit_limit)
        return [
            *(_argument(1), (_EQUAL, 1, 0, SOL_SOCKET), _ALLOW, _argument(2)),
            *((_EQUAL, 2, 0, SO_ATTACH_FILTER), (_EQUAL, 1, 0, SO_ATTACH_REUSEPORT_CBPF), _ALLOW, _DENY),
        ]
    if name == "socket":
        unix, internet = 1, 2
        return [_argument(0), (_EQUAL, 2, 0, unix), (_EQUAL, 1, 0, internet), _DENY, _ALLOW]
    if name == "setpriority":
        return [*_only_if(0, 0), *_only_if(1, 0), _ALLOW]  # only for this process, like the calls below
    return [*_only_if(0, 0), _ALLOW]


@functools.cache
def filter_program(*, keep_attributes: bool = False, sockets: bool = False) -> bytes:
    """Return the filter for this processor, as an array of the kernel's `struct sock_filter`.

    Args:
        keep_attributes: Also deny calls that change permissions, times and attributes of files.
        sockets: Allow IPv4 and Unix sockets, for a process with a network namespace of its own.
    """
    column = kernel.machine()
    conditional = CONDITIONAL | ({"socket": SOCKET} if sockets else {})
    conditions = []
    for name, numbers in conditional.items():
        body = _condition_instructions(name)
        conditions += [(_EQUAL, 0, len(body), numbers[column]), *body]
    table = DENIED | ATTRIBUTES if keep_attributes else DENIED
    return _pack(
        [*_preamble(), *conditions, *_deny_listed({name: table[name] for name in table.keys() - conditional.keys()})]
    )


def trusted_filter(pid: int) -> bytes:
    """Return the filter for trusted code.

    It denies calls that use up a resource of the whole machine, and those that reach other processes. The filter does not know
    which processes the program will start, so the program cannot signal these either, except as its process group.

    Args:
        pid: Process of the program, which leads a process group.
    """
    column = kernel.machine()
    receivers = {name: (pid, 0, -pid) if name == "kill" else (pid,) for name in SIGNALS}
    requests = {"fcntl": (F_SETOWN, F_SETOWN_EX), "ioctl": (TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP)}
    of_processes = [name for name in CONDITIONAL if name.startswith(("prlimit", "setpriority", "sched_"))]
    bodies = {name: _choose(0, values, _ALLOW, _DENY) for name, values in receivers.items()}
    bodies |= {name: _choose(1, values, _DENY, _ALLOW) for name, values in requests.items()}
    bodies |= {name: _condition_instructions(name) for name in of_processes}
    numbers = CONDITIONAL | SIGNALS | {"fcntl": FCNTL}
    conditions = []
    for name, body in bodies.items():
        conditions += [(_EQUAL, 0, len(body), numbers[name][column]), *body]
    listed = SHARED | PROCESSES | {"pidfd_send_signal": PIDFD_SEND_SIGNAL}
    return _pack([*_preamble(), *conditions, *_deny_listed(listed)])


def _preamble() -> list[_Instruction]:
    """Kill callers of another architecture, and load the number of the call."""
    column = kernel.machine()
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT[column]), _KILL, (_LOAD, 0, 0, 0)]
    return [*program, (_AT_LEAST, 0, 1, _X32), _NOT_IMPLEMENTED] if column == 0 else program


def _deny_listed(table: SyscallTable) -> list[_Instruction]:
    """Deny these calls, found by binary search: the kernel evaluates the filter for every call when it is installed."""
    denied = sorted(number for each in table.values() if (number := each[kernel.machine()]) is not None)
    edges = [(0, _ALLOW)]  # verdict from each number on
    for number in denied:
        if edges[1:] and edges[-1][0] == number:  # the previous number is denied too
            edges.pop()
        else:
            edges.append((number, _DENY))
        edges.append((number + 1, _ALLOW))
    return _binary_search(edges)


def _binary_search(edges: Sequence[tuple[int, _Instruction]]) -> list[_Instruction]:
    if len(edges) == 1:
        return [edges[0][1]]
    middle = len(edges) // 2
    below, above = _binary_search(edges[:middle]), _binary_search(edges[middle:])
    return [(_AT_LEAST, len(below), 0, edges[middle][0]), *below, *above]


def _pack(program: Sequence[_Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def install_filter(program: bytes) -> None:
    """Apply the filter to this process and everything it starts. Requires `kernel.forbid_privileges` first."""
    content = ctypes.create_string_buffer(program, len(program))
    kernel.set_filter(struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(content)))

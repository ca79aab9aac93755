"""The filter, run by an interpreter of its instructions that is not the kernel's, and against the kernel's own names."""

import errno
import platform
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.sandbox.isolation import kernel, seccomp, syscalls

ALLOW, KILL, DENY, UNKNOWN = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}


@pytest.fixture(params=AUDIT)
def machine(request, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    seccomp.filter_program.cache_clear()
    yield request.param
    seccomp.filter_program.cache_clear()


def judge(program, number, *arguments, audit):
    """What the filter says of a call."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, audit, 0, *(word & (1 << 64) - 1 for word in words))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                accumulator &= operand
            case 0x06:
                return operand
            case 0x15:
                at += if_true if accumulator == operand else if_false
            case 0x35:
                at += if_true if accumulator >= operand else if_false
            case 0x45:
                at += if_true if accumulator & operand else if_false
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


def numbers(table, machine):
    column = list(AUDIT).index(machine)
    return {name: both[column] for name, both in table.items() if both[column] is not None}


def test_denied(machine):
    program = seccomp.filter_program()
    for name, number in numbers(syscalls.DENIED, machine).items():
        assert judge(program, number, audit=AUDIT[machine]) == DENY, name


# by the tables of the kernel (syscall_64.tbl and asm-generic/unistd.h)
SHARED_BY_ALL = {
    "x86_64": {"io_setup": 206, "io_destroy": 207, "io_getevents": 208, "io_submit": 209, "io_cancel": 210}
    | {"io_pgetevents": 333, "inotify_init": 253, "inotify_init1": 294, "sync": 162, "syncfs": 306},
    "aarch64": {"io_setup": 0, "io_destroy": 1, "io_submit": 2, "io_cancel": 3, "io_getevents": 4}
    | {"io_pgetevents": 292, "inotify_init1": 26, "sync": 81, "syncfs": 267},
}


def test_what_the_machine_shares_is_denied(machine):
    verdicts = {
        name: judge(seccomp.filter_program(), number, audit=AUDIT[machine])
        for name, number in SHARED_BY_ALL[machine].items()
    }
    assert verdicts == dict.fromkeys(SHARED_BY_ALL[machine], DENY)


# by the same tables: what reaches other processes, and first arguments with which it does not
OWN = 4242
REACHING = {
    "x86_64": {"kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297}
    | {"pidfd_send_signal": 424, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438}
    | {"process_madvise": 440, "process_mrelease": 448, "kcmp": 312, "migrate_pages": 256, "move_pages": 279}
    | {"ioprio_set": 251, "prlimit64": 302, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144}
    | {"sched_setaffinity": 203, "sched_setattr": 314},
    "aarch64": {"kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240}
    | {"pidfd_send_signal": 424, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_getfd": 438}
    | {"process_madvise": 440, "process_mrelease": 448, "kcmp": 272, "migrate_pages": 238, "move_pages": 239}
    | {"ioprio_set": 30, "prlimit64": 261, "setpriority": 140, "sched_setparam": 118, "sched_setscheduler": 119}
    | {"sched_setaffinity": 122, "sched_setattr": 274},
}
OTHER = OWN + 1


def test_trusted_code_reaches_no_other_process(machine):
    program = seccomp.trusted_filter(OWN)
    verdicts = {
        name: judge(program, call, OTHER, OTHER, audit=AUDIT[machine]) for name, call in REACHING[machine].items()
    }
    assert verdicts == dict.fromkeys(REACHING[machine], DENY)


@pytest.mark.parametrize(
    ("name", "arguments", "verdict"),
    [
        ("kill", (OWN, 9), ALLOW),
        ("kill", (0, 9), ALLOW),  # its process group
        ("kill", (-OWN, 9), ALLOW),
        ("kill", (-1, 9), DENY),  # all
        ("kill", (-OTHER, 9), DENY),
        ("kill", (1 << 32 | OTHER, 9), DENY),  # the kernel looks at the lower half
        ("tgkill", (OWN, OTHER, 9), ALLOW),  # a thread of its own
        ("tgkill", (0, OTHER, 9), DENY),
        ("tkill", (0, 9), DENY),
        ("rt_sigqueueinfo", (OWN, 9), ALLOW),
        ("prlimit64", (0, 7), ALLOW),
        ("sched_setaffinity", (0,), ALLOW),
    ],
)
def test_trusted_code_signals_itself(machine, name, arguments, verdict):
    assert judge(seccomp.trusted_filter(OWN), REACHING[machine][name], *arguments, audit=AUDIT[machine]) == verdict


@pytest.mark.parametrize(
    ("calls", "request_", "verdict"),
    [
        ({"x86_64": 72, "aarch64": 25}, 8, DENY),  # fcntl: F_SETOWN
        ({"x86_64": 72, "aarch64": 25}, 15, DENY),  # F_SETOWN_EX
        ({"x86_64": 72, "aarch64": 25}, 4, ALLOW),  # F_SETFL
        ({"x86_64": 16, "aarch64": 29}, 0x8901, DENY),  # ioctl: FIOSETOWN
        ({"x86_64": 16, "aarch64": 29}, 0x8902, DENY),  # SIOCSPGRP
        ({"x86_64": 16, "aarch64": 29}, 0x5412, DENY),  # TIOCSTI
        ({"x86_64": 16, "aarch64": 29}, 0x5401, ALLOW),
    ],
)
def test_trusted_code_names_no_owner(machine, calls, request_, verdict):
    program = seccomp.trusted_filter(OWN)
    assert judge(program, calls[machine], 5, request_, OTHER, audit=AUDIT[machine]) == verdict


def test_the_short_filter_allows_the_rest(machine):
    denied = {number for name, number in SHARED_BY_ALL[machine].items() if name.startswith("io_")}
    verdicts = {number: judge(seccomp.trusted_filter(OWN), number, audit=AUDIT[machine]) for number in range(500)}
    assert denied <= {number for number, verdict in verdicts.items() if verdict == DENY}
    assert {number for number, verdict in verdicts.items() if verdict != ALLOW} <= denied | {
        *REACHING[machine].values()
    }


def test_attributes_without_opening_the_file(machine):
    file_setattr = 469  # of both
    assert judge(seccomp.filter_program(keep_attributes=True), file_setattr, audit=AUDIT[machine]) == DENY


def test_attributes_of_files(machine):
    for name, number in numbers(syscalls.ATTRIBUTES, machine).items():
        for keep in (False, True):
            verdict = judge(seccomp.filter_program(keep_attributes=keep), number, audit=AUDIT[machine])
            assert verdict == (DENY if keep else ALLOW), name


@pytest.mark.parametrize(
    ("name", "arguments", "verdict"),
    [
        ("clone", (17,), ALLOW),
        ("clone", (0x3D0F00,), ALLOW),  # a thread of the C library
        ("clone", (0x10000000 | 17,), DENY),
        ("clone", (0x20000,), DENY),
        ("clone3", (1, 88), UNKNOWN),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x5412), DENY),
        ("ioctl", (0, 0x541C), DENY),
        ("ioctl", (0, 1 << 32 | 0x5412), DENY),  # the kernel looks at the lower half
        ("socketpair", (1, 1), ALLOW),
        ("socketpair", (1, 1 | 0o2000000), ALLOW),  # closed on exec
        ("socketpair", (1, 5), ALLOW),
        ("socketpair", (1, 2), DENY),
        ("socketpair", (16, 1), DENY),
        ("setsockopt", (3, 1, 7), ALLOW),  # the size of a buffer
        ("setsockopt", (3, 41, 26), ALLOW),  # the same number, of IPv6
        ("setsockopt", (3, 1, 26), DENY),
        ("setsockopt", (3, 1, 51), DENY),
        ("setsockopt", (3, 1 << 32 | 1, 26), DENY),
        ("prlimit64", (0, 7), ALLOW),
        ("prlimit64", (1, 7), DENY),
        ("setpriority", (0, 0, 5), ALLOW),
        ("setpriority", (0, 1, 5), DENY),
        ("setpriority", (2, 0, 5), DENY),
        ("sched_setaffinity", (0,), ALLOW),
        ("sched_setaffinity", (1,), DENY),
    ],
)
def test_conditions(machine, name, arguments, verdict):
    number = numbers(syscalls.CONDITIONAL, machine)[name]
    assert judge(seccomp.filter_program(), number, *arguments, audit=AUDIT[machine]) == verdict


@given(st.integers(0, 0xFFFFFFFF), st.integers(0, 0xFFFFFFFF))
def test_other_architectures_are_killed(number, audit):
    if audit != AUDIT[platform.machine()]:
        assert judge(seccomp.filter_program(), number, audit=audit) == KILL


@given(st.integers(0, 500))
def test_x32(number):
    program = seccomp.filter_program()
    if platform.machine() == "x86_64":
        assert judge(program, 0x40000000 | number, audit=AUDIT["x86_64"]) == UNKNOWN


def test_the_rest_is_allowed(machine):
    program = seccomp.filter_program()
    judged = {*numbers(syscalls.DENIED, machine).values(), *numbers(syscalls.CONDITIONAL, machine).values()}
    for number in set(range(500)) - judged:
        assert judge(program, number, audit=AUDIT[machine]) == ALLOW


def test_the_kernels_headers_agree(machine):
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip("the kernel's headers are not installed")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    ours = {**syscalls.DENIED, **syscalls.CONDITIONAL, **syscalls.ATTRIBUTES, **kernel._NUMBERS}
    checked = {name: number for name, number in numbers(ours, machine).items() if name in found}
    assert {name: int(found[name]) for name in checked} == checked
    assert len(checked) > 0.9 * len(numbers(ours, machine))

"""Which system calls a program may make: one filter for whatever is run at level 2 and above, a short one for level 1.

What is denied fails with EPERM, so that a program can go on; a call of another architecture (`int 0x80` on x86_64) kills.
The filter is classic BPF, as the kernel takes it and as `bwrap --seccomp` reads it.
"""

import ctypes
import errno
import functools
import json
import struct
from collections.abc import Sequence

from antiphon.sandbox.isolation import kernel

_SOCKET = (41, 198)
_Calls = dict[
    str, tuple[int | None, int | None]
]  # name: (x86_64, aarch64); None where the architecture has no such call
# Asynchronous I/O: the whole machine shares its contexts (fs.aio-max-nr), and no limit of a process counts them.
_SHARED: _Calls = {
    "io_setup": (206, 0),
    "io_destroy": (207, 1),
    "io_submit": (209, 2),
    "io_cancel": (210, 3),
    "io_getevents": (208, 4),
    "io_pgetevents": (333, 292),
}
_DENIED: _Calls = _SHARED | {
    # the network, and what speaks to other processes by name
    "socket": _SOCKET,
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "ioprio_set": (251, 30),
    # watches: all processes of a user share a few (fs.inotify.max_user_instances), and boxes may share a user
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    # writes out what all of the machine has written, and waits for it
    "sync": (162, 81),
    "syncfs": (306, 267),
    # large and often faulty parts of the kernel
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "lookup_dcookie": (212, 18),
    # memory that no limit of the process counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_tree_attr": (467, 467),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "uselib": (134, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
}
# What changes a file without opening it.
_ATTRIBUTES: _Calls = {
    "chmod": (90, None),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
# Of these only some uses are denied: see `_conditions`.
_CONDITIONAL = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "ioctl": (16, 29),
    "socketpair": (53, 199),
    "setsockopt": (54, 208),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
_AUDIT = (0xC000003E, 0xC00000B7)  # what the kernel calls x86_64 and aarch64
_X32 = 0x40000000  # calls of the x32 interface, which run under x86_64's name

_ALL_NAMESPACES = (
    kernel.NEW_MOUNTS | kernel.NEW_CGROUP | kernel.NEW_UTS | kernel.NEW_IPC | kernel.NEW_USER | kernel.NEW_PIDS
) | kernel.NEW_NETWORK
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_SOL_SOCKET, _SO_ATTACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF = 1, 26, 51

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def _return(action: int) -> _Instruction:
    return _RETURN, 0, 0, action


_ALLOW = _return(0x7FFF0000)
_KILL = _return(0x80000000)
_DENY = _return(0x00050000 | errno.EPERM)
_UNKNOWN = _return(0x00050000 | errno.ENOSYS)


def _argument(index: int) -> _Instruction:
    """Load the lower half of an argument: the kernel reads no more of any that is looked at here."""
    return _LOAD, 0, 0, 16 + 8 * index


def _only_if(index: int, value: int) -> list[_Instruction]:
    """Deny unless an argument has this value."""
    return [_argument(index), (_EQUAL, 1, 0, value), _DENY]


def _conditions(name: str) -> list[_Instruction]:
    """What happens to a call of which some uses are denied; ends in a return."""
    if name == "clone3":  # its flags lie in memory, where no filter sees them: the C library falls back to clone
        return [_UNKNOWN]
    if name == "clone":
        return [_argument(0), (_ANY_BIT, 0, 1, _ALL_NAMESPACES), _DENY, _ALLOW]
    if name == "ioctl":  # puts characters into a terminal as if they had been typed
        return [_argument(1), (_EQUAL, 1, 0, _TIOCSTI), (_EQUAL, 0, 1, _TIOCLINUX), _DENY, _ALLOW]
    if name == "socketpair":  # a datagram socket could send to others by name
        stream, packets, unix = 1, 5, 1
        kind = [_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 2, 0, stream), (_EQUAL, 1, 0, packets), _DENY, _ALLOW]
        return _only_if(0, unix) + kind
    if name == "setsockopt":  # filters of sockets: the whole machine shares the memory of compiled ones (bpf_jit_limit)
        return [
            *(_argument(1), (_EQUAL, 1, 0, _SOL_SOCKET), _ALLOW, _argument(2)),
            *((_EQUAL, 2, 0, _SO_ATTACH_FILTER), (_EQUAL, 1, 0, _SO_ATTACH_REUSEPORT_CBPF), _ALLOW, _DENY),
        ]
    if name == "socket":
        unix, internet = 1, 2
        return [_argument(0), (_EQUAL, 2, 0, unix), (_EQUAL, 1, 0, internet), _DENY, _ALLOW]
    if name == "setpriority":
        return [*_only_if(0, 0), *_only_if(1, 0), _ALLOW]  # of this process alone, as below
    return [*_only_if(0, 0), _ALLOW]


def docker_profile() -> str:
    """What `filter_program(sockets=True)` denies, as docker reads it: of several conditions on a call, each one denies."""
    unix, internet, datagram, raw = 1, 2, 2, 3
    conditions = {
        **{name: [_compare(0, "NE", 0)] for name in _CONDITIONAL},
        "clone": [_compare(0, "MASKED_EQ", 1 << bit, 1 << bit) for bit in range(32) if _ALL_NAMESPACES >> bit & 1],
        "ioctl": [_compare(1, "EQ", _TIOCSTI), _compare(1, "EQ", _TIOCLINUX)],
        "socketpair": [_compare(0, "NE", unix), *(_compare(1, "MASKED_EQ", 0xF, kind) for kind in (datagram, raw))],
        "socket": [_compare(0, "GT", max(unix, internet))],
        "setpriority": [_compare(0, "NE", 0), _compare(1, "NE", 0)],
    }
    del conditions["clone3"], conditions["setsockopt"]
    of_sockets = [_compare(1, "EQ", _SOL_SOCKET)]
    filters = [[*of_sockets, _compare(2, "EQ", each)] for each in (_SO_ATTACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF)]
    denied = {"action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}
    rules = [
        {"names": [name for name in _DENIED if name not in conditions], **denied},
        {"names": ["clone3"], **denied, "errnoRet": errno.ENOSYS},
        *({"names": [name], "args": [each], **denied} for name, every in conditions.items() for each in every),
        *({"names": ["setsockopt"], "args": both, **denied} for both in filters),
    ]
    architecture = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")[kernel.machine()]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "architectures": [architecture], "syscalls": rules})


def _compare(index: int, operator: str, value: int, second: int = 0) -> dict[str, object]:
    return {"index": index, "op": f"SCMP_CMP_{operator}", "value": value, "valueTwo": second}


@functools.cache
def filter_program(*, keep_attributes: bool = False, sockets: bool = False) -> bytes:
    """The filter for this processor, as an array of the kernel's `struct sock_filter`.

    With `keep_attributes` it also denies what changes the permissions, times and attributes of files. With `sockets`, those of
    IPv4 and of Unix can be made: for what has a network namespace of its own.
    """
    column = kernel.machine()
    conditional = _CONDITIONAL | ({"socket": _SOCKET} if sockets else {})
    conditions = []
    for name, numbers in conditional.items():
        body = _conditions(name)
        conditions += [(_EQUAL, 0, len(body), numbers[column]), *body]
    table = _DENIED | _ATTRIBUTES if keep_attributes else _DENIED
    return _pack([*_begin(), *conditions, *_search({name: table[name] for name in table.keys() - conditional.keys()})])


def shared_program() -> bytes:
    """The filter for code that is trusted: it denies what would use up a count of the whole machine."""
    return _pack([*_begin(), *_search(_SHARED)])


def _begin() -> list[_Instruction]:
    """Kill what calls by another architecture, and load the number of the call."""
    column = kernel.machine()
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT[column]), _KILL, (_LOAD, 0, 0, 0)]
    return [*program, (_AT_LEAST, 0, 1, _X32), _UNKNOWN] if column == 0 else program


def _search(table: _Calls) -> list[_Instruction]:
    """Deny these calls, found by halves: the kernel asks of every call there is when a filter is installed."""
    denied = sorted(number for each in table.values() if (number := each[kernel.machine()]) is not None)
    edges = [(0, _ALLOW)]  # from each number on
    for number in denied:
        if edges[1:] and edges[-1][0] == number:  # it follows one that is denied
            edges.pop()
        else:
            edges.append((number, _DENY))
        edges.append((number + 1, _ALLOW))
    return _halves(edges)


def _halves(edges: Sequence[tuple[int, _Instruction]]) -> list[_Instruction]:
    if len(edges) == 1:
        return [edges[0][1]]
    middle = len(edges) // 2
    below, above = _halves(edges[:middle]), _halves(edges[middle:])
    return [(_AT_LEAST, len(below), 0, edges[middle][0]), *below, *above]


def _pack(program: Sequence[_Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def install(program: bytes) -> None:
    """Put the filter over this process and whatever it starts. No new privileges must have been forbidden before."""
    content = ctypes.create_string_buffer(program, len(program))
    kernel.set_filter(struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(content)))

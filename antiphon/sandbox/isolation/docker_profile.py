"""The seccomp filter of shell sandboxes in the JSON format that docker reads."""

import errno
import json

from antiphon.sandbox.isolation import kernel
from antiphon.sandbox.isolation.syscalls import (
    ALL_NAMESPACES,
    CONDITIONAL,
    DENIED,
    SO_ATTACH_FILTER,
    SO_ATTACH_REUSEPORT_CBPF,
    SOL_SOCKET,
    TIOCLINUX,
    TIOCSTI,
)


def docker_profile() -> str:
    """Return the profile that denies what `seccomp.filter_program(sockets=True)` denies.

    A call with several rules is denied if any of them matches.
    """
    unix, internet, datagram, raw = 1, 2, 2, 3
    conditions = {
        **{name: [_compare(0, "NE", 0)] for name in CONDITIONAL},
        "clone": [_compare(0, "MASKED_EQ", 1 << bit, 1 << bit) for bit in range(32) if ALL_NAMESPACES >> bit & 1],
        "ioctl": [_compare(1, "EQ", TIOCSTI), _compare(1, "EQ", TIOCLINUX)],
        "socketpair": [_compare(0, "NE", unix), *(_compare(1, "MASKED_EQ", 0xF, kind) for kind in (datagram, raw))],
        "socket": [_compare(0, "GT", max(unix, internet))],
        "setpriority": [_compare(0, "NE", 0), _compare(1, "NE", 0)],
    }
    del conditions["clone3"], conditions["setsockopt"]
    of_sockets = [_compare(1, "EQ", SOL_SOCKET)]
    filters = [[*of_sockets, _compare(2, "EQ", each)] for each in (SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF)]
    denied = {"action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}
    rules = [
        {"names": [name for name in DENIED if name not in conditions], **denied},
        {"names": ["clone3"], **denied, "errnoRet": errno.ENOSYS},
        *({"names": [name], "args": [each], **denied} for name, every in conditions.items() for each in every),
        *({"names": ["setsockopt"], "args": both, **denied} for both in filters),
    ]
    architecture = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")[kernel.machine()]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "architectures": [architecture], "syscalls": rules})


def _compare(index: int, operator: str, value: int, second: int = 0) -> dict[str, object]:
    return {"index": index, "op": f"SCMP_CMP_{operator}", "value": value, "valueTwo": second}

"""What a box is given, and how one that has just been started is handed over."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.sandbox.base import Limits

WORK = "/box"
CONTROL = "/run/antiphon"  # where a box sees the pipes that its controller made
USER = 1000  # inside
VARIABLES = {"HOME": WORK, "USER": "box", "LANG": "C.UTF-8", "TERM": "dumb"}
PATH = "/usr/local/bin:/usr/bin:/bin"  # of the commands of this machine
RESERVED = 16  # processes that only the keeper may add, so that a session can be started in a box that is full of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellSandboxConfig:
    """What a box is given."""

    limits: Limits = field(
        default_factory=lambda: Limits(
            seconds=60, cpu_seconds=3600, memory=2 << 30, file_size=512 << 20, disk=512 << 20, processes=256
        )
    )
    """`seconds` and `output` are of one command, `cpu_seconds` and `file_size` of one process, the others of the box. `disk` is
    the size of the work directory, of /tmp and of /dev/shm, each; they lie in memory, and count as memory of the box."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """More of this machine that can be read in the box: path there -> path here."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables, or other values of those that every box has."""
    network: tuple[str, ...] = ()
    """What can be reached from the box, by HTTP and HTTPS through a proxy, each as `host:port`; nothing else can."""
    image: str = ""
    """A docker image of this machine whose commands the box has; without one it has those of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A box that has been started, and in which nothing has been done yet."""

    process: "subprocess.Popen[bytes]"
    """Of this machine; it ends after the box."""
    first: int
    """The number, here, of the box's process 1, the keeper."""
    held: int | None = None
    """A descriptor; the keeper begins when it is closed. None: it has begun."""

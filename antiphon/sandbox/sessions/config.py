"""Configuration of a shell sandbox, and constants of its inside."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.sandbox.base import Limits

WORK = "/box"
CONTROL = "/run/antiphon"  # where a sandbox sees the pipes that its controller created
USER = 1000  # user and group inside
VARIABLES = {"HOME": WORK, "USER": "box", "LANG": "C.UTF-8", "TERM": "dumb"}
PATH = "/usr/local/bin:/usr/bin:/bin"  # for the commands of this machine
RESERVED = (
    16  # processes reserved for the keeper, so that it can start a session when the sandbox is at its process limit
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellSandboxConfig:
    """Limits, mounts, network and image of a shell sandbox."""

    limits: Limits = field(
        default_factory=lambda: Limits(
            seconds=60, cpu_seconds=3600, memory=2 << 30, file_size=512 << 20, disk=512 << 20, processes=256
        )
    )
    """`seconds` and `output` hold for one command, `cpu_seconds` and `file_size` for one process, the others for the sandbox.
    `disk` is the size of each of the work directory, /tmp and /dev/shm; they lie in memory and count towards `memory`."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Further files that can be read inside: path inside -> path on this machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables, or other values for the default ones."""
    network: tuple[str, ...] = ()
    """Hosts, each as `host:port`, that can be reached by HTTP and HTTPS through a proxy. Nothing else can be reached."""
    image: str = ""
    """Local docker image whose commands the sandbox has; without one, it has those of this machine."""
    image_as_built: bool = False
    """Keep the image's own user, working directory and variables, and let programs write everywhere in the container. `disk`
    then bounds only /dev/shm. Otherwise programs have a user of their own and can write only to the work directory and /tmp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A sandbox that has just been started and runs nothing yet."""

    process: "subprocess.Popen[bytes]"
    """Process of this machine that ends after the sandbox."""
    first: int
    """Process number on this machine of the sandbox's process 1, the keeper."""
    held: int | None = None
    """Descriptor upon whose closing the keeper starts; None if it has started."""

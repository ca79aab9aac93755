"""Messages and settings that a `ForkedPython`, its zygote and its workers share.

Messages are JSON packets on Unix sockets, with file descriptors attached. This module runs in confined processes too: it
imports the standard library and modules of this directory that do the same.
"""

import os
import select
from collections.abc import Iterable
from dataclasses import dataclass

from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import cgroups, seccomp

WORK = "/tmp/work"  # working directory of a program in the private root
PACKAGES = "/packages"  # where a program in the private root finds installed packages
FIRST_LINK = 3  # the first descriptor after the standard streams
LARGEST_MESSAGE = 1 << 16  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteSetup:
    """Settings that the zygote receives in its first message."""

    level: Level
    user_namespace: bool
    """True if the other namespaces can only be created inside a user namespace."""
    seccomp: bool
    """True if system calls can be filtered. Levels 2 and 3 require it."""
    client_pid: int
    """Process that owns the sandbox. The zygote and its workers end when it does."""
    sources: dict[str, str]
    """Files and directories that programs may read: path inside the private root (level 3) -> path on this machine."""
    imports: tuple[str, ...]
    """Packages that the zygote imports once, for all programs."""
    paths: tuple[str, ...]
    """Directories appended to `sys.path`."""
    scratch: str
    """Parent of the working directories at levels 1 and 2; unused at level 3."""

    @property
    def readable(self) -> list[str]:
        """Paths on this machine that programs may read."""
        return list(self.sources.values())

    @property
    def changes_user(self) -> bool:
        """True if each program gets a user of its own: at levels 2 and 3, when root runs the sandbox."""
        return self.level >= Level.CONFINED and os.getuid() == 0

    def filter_program(self) -> bytes:
        """Return the seccomp filter of this level, for the calling process.

        Landlock does not cover permissions and times of files. At level 2, where the machine's files are in view, the filter
        therefore denies the calls that change them.
        """
        if self.level < Level.CONFINED:
            return seccomp.trusted_filter(os.getpid())
        return seccomp.filter_program(keep_attributes=self.level == Level.CONFINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Settings of one worker, inherited from the zygote by fork."""

    zygote: ZygoteSetup
    client: int
    """Descriptor of the client's process, readable once that process has ended."""
    uid: int
    """User that this worker's programs run as."""
    group: cgroups.Group | None
    """Control group that bounds the memory of a program's processes together; None if there is none."""
    base_memory: int
    """Bytes of address space that every fork starts with."""


def wait_readable(descriptors: Iterable[int], seconds: float | None = None) -> int | None:
    """Wait until a descriptor can be read, and return the first such; None if `seconds` pass before."""
    descriptors = list(descriptors)
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0.0, seconds) * 1000)}
    return next((descriptor for descriptor in descriptors if descriptor in ready), None)

"""Counting the memory of all processes of a program together: control groups, version 1 or 2, where they may be written.

All access is by descriptor, so that groups can be used by a process that no longer sees the file system they lie in.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

# the files of a group that bound its memory, and the one that counts the processes killed for it, by version
_LIMITS = {1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), 2: ("memory.max",)}
_KILLS = {1: "memory.oom_control", 2: "memory.events"}


@dataclass(frozen=True, slots=True)
class Group:
    """One control group. Its descriptor is closed with the process that opened it."""

    directory: int
    version: int

    def __post_init__(self) -> None:
        os.close(os.open("cgroup.procs", os.O_WRONLY, dir_fd=self.directory))

    def limit_memory(self, size: int) -> None:
        """Bound the memory, swap included, of all processes in the group, in bytes."""
        for name in _LIMITS[self.version]:
            try:
                self._write(name, str(size))
            except FileNotFoundError:  # this kernel does not count swap
                if name == _LIMITS[self.version][0]:
                    raise
        if self.version == 2:
            self._write("memory.swap.max", "0")

    def join(self) -> None:
        """Put this process, and what it starts from now on, into the group."""
        self.take(0)

    def take(self, pid: int) -> None:
        """Put a process, and what it starts from now on, into the group."""
        self._write("cgroup.procs", str(pid))

    def kills(self) -> int:
        """How many processes have been killed because the group's memory was used up."""
        descriptor = os.open(_KILLS[self.version], os.O_RDONLY, dir_fd=self.directory)
        try:
            found = re.search(rb"oom_kill (\d+)", os.read(descriptor, 4096))
        finally:
            os.close(descriptor)
        return int(found[1]) if found else 0

    def child(self, name: str) -> "Group":
        """Make a group below this one."""
        os.mkdir(name, dir_fd=self.directory)
        return Group(os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.directory), self.version)

    def remove_child(self, name: str) -> None:
        """Remove a group below this one, if it is there and empty."""
        try:
            os.rmdir(name, dir_fd=self.directory)
        except OSError:  # gone, or a process is still ending in it: then it goes when its parent goes
            return

    def _write(self, name: str, content: str) -> None:
        descriptor = os.open(name, os.O_WRONLY, dir_fd=self.directory)
        try:
            os.write(descriptor, content.encode())
        finally:
            os.close(descriptor)


def make_group(name: str) -> tuple[Group, Path]:
    """A new group below this process's own that can bound memory, and where it lies; `OSError` if there can be none."""
    for version, parent in _memory_groups():
        path = parent / name
        try:
            if version == 2:
                (parent / "cgroup.subtree_control").write_text("+memory")
            path.mkdir()
            if version == 2:
                (path / "cgroup.subtree_control").write_text("+memory")
            return Group(os.open(path, os.O_RDONLY | os.O_DIRECTORY), version), path
        except OSError as error:
            problem = error
            remove_group(path)
    raise problem if "problem" in locals() else OSError("no control group counts memory here")


def remove_group(path: Path) -> None:
    """Remove a group and those below it, as far as they are empty."""
    for directory in [*path.glob("*/"), path]:
        try:
            directory.rmdir()
        except OSError:
            continue


def _memory_groups() -> list[tuple[int, Path]]:
    """This process's group in each hierarchy that may count memory: version and path."""
    found = []
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, inside = line.split(":", 2)
        for _, target, kind, options, *_ in mounts:
            first = kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(",")
            if first or (kind == "cgroup2" and number == "0"):
                found.append((1 if first else 2, Path(target) / inside.lstrip("/")))
    return found

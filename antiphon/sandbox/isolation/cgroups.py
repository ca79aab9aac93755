"""Control groups (version 1 or 2) that bound the memory of all processes of a program together.

They are used where this process may write to them. All access is by descriptor, so that a process can use a group although it
no longer sees the file system that the group lies in.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

# By version: the files that bound a group's memory, with the values to write in order, and the file that counts the processes
# killed for it. Version 1 never allows the bound with swap to be below the bound without.
_UNBOUNDED, _SIZE, _NONE = -1, None, 0
_LIMITS: dict[int, list[tuple[str, int | None]]] = {
    1: [
        ("memory.memsw.limit_in_bytes", _UNBOUNDED),
        ("memory.limit_in_bytes", _SIZE),
        ("memory.memsw.limit_in_bytes", _SIZE),
    ],
    2: [("memory.max", _SIZE), ("memory.swap.max", _NONE)],
}
_KILLS = {1: "memory.oom_control", 2: "memory.events"}


@dataclass(frozen=True, slots=True)
class Group:
    """One control group. Its descriptor is closed with the process that opened it."""

    directory: int
    version: int
    above: int
    """Descriptor of the parent directory."""
    name: str

    def __post_init__(self) -> None:
        os.close(os.open("cgroup.procs", os.O_WRONLY, dir_fd=self.directory))

    def limit_memory(self, size: int) -> None:
        """Bound the memory of all processes in the group, swap included, to `size` bytes."""
        for name, value in _LIMITS[self.version]:
            try:
                self._write(name, str(size if value is None else value))
            except FileNotFoundError:
                if "sw" not in name:  # not every kernel counts swap
                    raise

    def join(self) -> None:
        """Move this process into the group; processes that it starts later follow."""
        self.add_process(0)

    def add_process(self, pid: int) -> None:
        """Move a process into the group; processes that it starts later follow."""
        self._write("cgroup.procs", str(pid))

    def kills(self) -> int:
        """Return how many processes the kernel has killed because the group's memory was used up."""
        descriptor = os.open(_KILLS[self.version], os.O_RDONLY, dir_fd=self.directory)
        try:
            found = re.search(rb"oom_kill (\d+)", os.read(descriptor, 4096))
        finally:
            os.close(descriptor)
        return int(found[1]) if found else 0

    def child(self, name: str) -> "Group":
        """Create a group below this one."""
        return _make(self.directory, name, self.version)

    def remove(self) -> None:
        """Remove the group if it is empty."""
        with contextlib.suppress(OSError):  # a process in it is still ending, or the group is gone
            os.rmdir(self.name, dir_fd=self.above)

    def _write(self, name: str, content: str) -> None:
        descriptor = os.open(name, os.O_WRONLY, dir_fd=self.directory)
        try:
            os.write(descriptor, content.encode())
        finally:
            os.close(descriptor)


def make_group(name: str) -> tuple[Group, Path]:
    """Create a group below this process's own that can bound memory.

    Returns:
        The group and its path.

    Raises:
        OSError: No such group can be created here.
    """
    problems = []
    for version, parent in _memory_groups():
        try:
            if version == 2:
                (parent / "cgroup.subtree_control").write_text("+memory")
            group = _make(os.open(parent, os.O_RDONLY | os.O_DIRECTORY), name, version)
            if version == 2:
                (parent / name / "cgroup.subtree_control").write_text("+memory")
            return group, parent / name
        except OSError as error:
            problems.append(str(error))
            remove_group(parent / name)
    raise OSError("; ".join(problems) or "no control group counts memory here")


def _make(above: int, name: str, version: int) -> Group:
    os.mkdir(name, dir_fd=above)
    return Group(os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=above), version, above, name)


def remove_group(path: Path) -> None:
    """Remove a group and the groups below it, as far as they are empty."""
    for directory in [*path.glob("*/"), path]:
        with contextlib.suppress(OSError):
            directory.rmdir()


def _memory_groups() -> list[tuple[int, Path]]:
    """Return version and path of this process's group in each hierarchy that may count memory."""
    found = []
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, inside = line.split(":", 2)
        for _, target, kind, options, *_ in mounts:
            first = kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(",")
            if first or (kind == "cgroup2" and number == "0"):
                found.append((1 if first else 2, Path(target) / inside.lstrip("/")))
    return found

"""A disk that forgets what was not forced to it, heard from the kernel: every fsync and fdatasync of a program and its threads.

A program runs under a seccomp filter that has the kernel ask here before each of these calls. What a file holds then is on
disk, and of a directory the names in it; nothing else is. What a crash would leave at a moment can be laid out as files, for
SQLite and everybody else to open.
"""

import ctypes
import fcntl
import os
import platform
import select
import socket
import stat
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

SUPPORTED = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
ARM = platform.machine() == "aarch64"
SECCOMP, CALLS = (277, (82, 83)) if ARM else (317, (74, 75))  # fsync, fdatasync
ASK, ALLOW = 0x7FC00000, 0x7FFF0000
NEW_LISTENER, CONTINUE = 1 << 3, 1
RECEIVE, SEND = 0xC0502100, 0xC0182101
QUESTION, ANSWER = struct.Struct("QIIiIQ6Q"), struct.Struct("QqiI")

PRELUDE = """
import os, sys
sys.path[:0] = {path!r}
from tests.system.disk import ask_before_syncs
ask_before_syncs({descriptor})
def mark(name):
    os.write({marks}, name.encode() + b"\\n")
"""


def ask_before_syncs(descriptor: int) -> None:
    """In the program: from here on its calls wait for an answer, from whoever is behind the socket `descriptor`."""
    steps = [
        (0x20, 0, 0, 0),
        *((0x15, len(CALLS) - at, 0, call) for at, call in enumerate(CALLS)),
        (6, 0, 0, ALLOW),
        (6, 0, 0, ASK),
    ]
    content = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("@HxxxxxxP", len(steps), ctypes.addressof(content))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)
    listener = libc.syscall(SECCOMP, 1, NEW_LISTENER, program)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    with socket.socket(fileno=descriptor) as connection:
        socket.send_fds(connection, [b"."], [listener])
    os.close(listener)


@dataclass(frozen=True)
class Disk:
    """What is on disk: contents of files by inode, and of directories the inode of each name and whether it is a directory."""

    files: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)

    def synced(self, path: str) -> None:
        """The open file behind a link of /proc was forced to disk."""
        is_now = os.stat(path)
        if stat.S_ISDIR(is_now.st_mode):
            with os.scandir(path) as entries:
                self.names[is_now.st_ino] = {
                    each.name: (each.inode(), each.is_dir(follow_symlinks=False)) for each in entries
                }
        else:
            self.files[is_now.st_ino] = Path(path).read_bytes()

    def copy(self) -> "Disk":
        return Disk(dict(self.files), dict(self.names))

    def lay_out(self, directory: Path, target: Path) -> Path:
        """What a crash leaves of a directory, in `target`: files whose content was never forced are empty."""
        self._lay_out(directory.stat().st_ino, target)
        return target

    def _lay_out(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, (child, is_directory) in self.names.get(inode, {}).items():
            if is_directory:
                self._lay_out(child, target / name)
            else:
                (target / name).write_bytes(self.files.get(child, b""))


def watched(program: str, *arguments: str, latency: float = 0.0) -> dict[str, Disk]:
    """Run Python code, which may call `mark(name)`; what was on disk at each mark, and at its `end`.

    Args:
        program: The code.
        arguments: Of the program, in `sys.argv` from 1.
        latency: Seconds that the disk takes for each fsync.
    """
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    path = [str(Path(__file__).parents[2])]
    code = PRELUDE.format(path=path, descriptor=theirs.fileno(), marks=writing) + program
    disk, moments = Disk(), dict[str, Disk]()
    with subprocess.Popen([sys.executable, "-c", code, *arguments], pass_fds=[theirs.fileno(), writing]) as process:
        theirs.close()
        os.close(writing)
        with ours:
            _, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
        while _serve(listener, reading, disk, moments, latency):
            pass
        os.close(listener)
        os.close(reading)
    assert process.returncode == 0
    return {**moments, "end": disk}


def _serve(listener: int, marks: int, disk: Disk, moments: dict[str, Disk], latency: float) -> bool:
    """One question or mark, marks first; False when the program has ended."""
    poll = select.poll()
    poll.register(marks, select.POLLIN)
    poll.register(listener, select.POLLIN)
    ready = dict(poll.poll())
    if ready.get(marks, 0) & select.POLLIN:
        _mark(marks, disk, moments)
        return True
    if ready.get(listener, 0) & select.POLLIN:
        question = bytearray(QUESTION.size)
        fcntl.ioctl(listener, RECEIVE, question)
        number, pid, _, _, _, _, descriptor, *_ = QUESTION.unpack(question)
        if select.select([marks], [], [], latency)[0]:  # while the disk is at work
            _mark(marks, disk, moments)
        disk.synced(f"/proc/{pid}/fd/{descriptor}")
        fcntl.ioctl(listener, SEND, bytearray(ANSWER.pack(number, 0, 0, CONTINUE)))
        return True
    return False


def _mark(marks: int, disk: Disk, moments: dict[str, Disk]) -> None:
    for name in os.read(marks, 4096).decode().split():
        moments[name] = disk.copy()

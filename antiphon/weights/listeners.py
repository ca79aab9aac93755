"""Listening sockets of this process, and how to stop strangers from connecting to them.

Gloo treats whatever connects to its ports as a peer: it keeps each connection open, and ends the process when there are
too many. So its ports refuse connections once all peers are connected.
"""

import ctypes
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress

SO_ATTACH_FILTER = 26  # Linux: attaches a BPF program that decides which packets reach the socket
REFUSE_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K with 0 bytes
MOST_DESCRIPTORS = 65_536
MIN_TTL = ((socket.IPPROTO_IP, 21), (socket.IPPROTO_IPV6, 73))  # Linux: drop packets with a smaller time to live


_TRACKING = threading.Lock()


class ListeningSockets:
    """The listening sockets that a library opened while it was tracked."""

    def __init__(self) -> None:
        self._found: list[int] = []  # inodes

    @contextmanager
    def track(self) -> Iterator[None]:
        """Remember the sockets that are opened within the context, in which one thread is at a time."""
        with _TRACKING:  # else the sockets of one would be taken for those of the other, and refuse its peers
            before = listening_sockets()
            yield
            self._found += listening_sockets().keys() - before.keys()

    def refuse_connections(self) -> None:
        """Refuse new connections to the tracked sockets; established ones stay open."""
        open_now = listening_sockets()
        program = ctypes.create_string_buffer(REFUSE_ALL)
        for inode in self._found:
            with suppress(OSError), closing(socket.socket(fileno=os.dup(open_now[inode]))) as listener:
                try:
                    refuse_all = struct.pack("HP", 1, ctypes.addressof(program))
                    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, refuse_all)
                except PermissionError:  # as some kernels have it for all but root
                    for level, option in MIN_TTL:  # holds off whoever does not raise the TTL of packets
                        with suppress(OSError):
                            listener.setsockopt(level, option, 255)


def listening_sockets() -> dict[int, int]:
    """Return the descriptors of this process's listening sockets by their inodes; empty if not on Linux."""
    found = {}
    for descriptor in _descriptors() if sys.platform == "linux" else ():
        with suppress(OSError):  # closed meanwhile, or no socket
            state = os.fstat(descriptor)
            if stat.S_ISSOCK(state.st_mode):
                with closing(socket.socket(fileno=os.dup(descriptor))) as known:
                    if known.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[state.st_ino] = descriptor
    return found


def _descriptors() -> Sequence[int]:
    """Return the open descriptors of this process, and maybe others."""
    try:
        return [int(entry) for entry in os.listdir("/proc/self/fd")]
    except PermissionError:  # a process that is opaque to ordinary users is so to itself
        return range(MOST_DESCRIPTORS)

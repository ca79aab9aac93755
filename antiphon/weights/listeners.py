"""The ports that gloo listens on. It takes all that comes there for its own, keeps it open, and ends the process when that is
too many. So nobody is let in once all are connected that should be.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

SO_ATTACH_FILTER = 26  # Linux: a program of the socket's own decides what reaches it
REFUSE_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K with 0 bytes


class ListeningSockets:
    """Listening sockets of this process."""

    def __init__(self) -> None:
        self._found: list[str] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Remember those that are opened within."""
        before = listening()
        yield
        self._found += listening().keys() - before.keys()

    def shut(self) -> None:
        """Let nobody connect to them any more. What is connected stays so."""
        here = listening()
        program = ctypes.create_string_buffer(REFUSE_ALL)
        for name in self._found:
            with suppress(OSError), closing(socket.socket(fileno=os.dup(here[name]))) as listener:
                listener.setsockopt(
                    socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
                )


def listening() -> dict[str, int]:
    """Descriptors of this process's listening sockets, by the kernel's names for these; none where it is not Linux."""
    found = {}
    for entry in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError):  # closed meanwhile, or no socket
            if (name := os.readlink(f"/proc/self/fd/{entry}")).startswith("socket:"):
                with closing(socket.socket(fileno=os.dup(int(entry)))) as known:
                    if known.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[name] = int(entry)
    return found

"""Frames on a stream socket: the length of the content in 8 bytes, then the content.

A process reads and writes its frames with calls that block. Its parent has a `FrameConnection` on the event loop. The content
is bytes: a parent that does not trust its child sets a limit, and decodes what arrives as plain data.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable

HEADER = struct.Struct("!Q")
CHUNK = 1 << 18  # bytes that are read at once


def write_frame(connection: socket.socket, content: bytes) -> None:
    """Write a frame to a blocking socket."""
    connection.sendall(HEADER.pack(len(content)) + content)


def read_frame(connection: socket.socket) -> bytearray | None:
    """Read the next frame of a blocking socket; return None at the end."""
    header = _read(connection, HEADER.size)
    return None if header is None else _read(connection, *HEADER.unpack(header))


def _read(connection: socket.socket, size: int) -> bytearray | None:
    content = bytearray(size)
    left = memoryview(content)
    while left:
        if not (received := connection.recv_into(left)):
            return None
        left = left[received:]
    return content


class FrameConnection:
    """One end of a socket, on the event loop, which never waits for the other end: not to read, nor to take what is sent.

    Everything that the other end has sent before it closed the socket is passed on, even if it was closed while this end was
    sending: the last frame often says why. An error of `on_frame` goes to the loop's exception handler; the next frame is
    passed on all the same.
    """

    def __init__(
        self,
        end: socket.socket,
        on_frame: Callable[[bytes], object],
        on_end: Callable[[], object],
        limit: int | None = None,
    ) -> None:
        """Take over a socket. Must be called on the event loop's thread.

        Args:
            end: The socket.
            on_frame: Called with the content of each frame, in order.
            on_end: Called once after the last frame, unless `close` was called before.
            limit: Most bytes of a frame; a longer one counts as the end.
        """
        self._socket = end
        self._on_frame = on_frame
        self._on_end = on_end
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._frames: deque[bytes] = deque()  # received, not passed on yet
        self._at_end = False
        self._unsent = bytearray()
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    def send(self, content: bytes) -> None:
        """Send a frame. If the other end is gone, or `close` was called, nothing is sent."""
        if not self._is_closed():
            self._unsent += HEADER.pack(len(content))
            self._unsent += content
            self._write()

    def close(self) -> None:
        """Close the socket; nothing is passed on any more. May be called twice."""
        if not self._is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._frames.clear()

    def _is_closed(self) -> bool:
        return self._socket.fileno() < 0

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the other end is gone; what it sent before is still to be read
            sent = len(self._unsent)
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._socket, self._write)
        else:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            received = self._socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        self._received += received
        self._at_end = not received
        self._split_frames()
        if self._at_end:
            self._loop.remove_reader(self._socket)
        self._pass_on()

    def _split_frames(self) -> None:
        """Move the complete frames out of what was received."""
        while not self._at_end and len(self._received) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._received)
            end = HEADER.size + length
            self._at_end = self._limit is not None and length > self._limit
            if self._at_end or len(self._received) < end:
                return
            with memoryview(self._received) as view:
                self._frames.append(bytes(view[HEADER.size : end]))
            del self._received[:end]

    def _pass_on(self) -> None:
        while self._frames:
            try:
                self._on_frame(self._frames.popleft())
            except BaseException:
                self._loop.call_soon(self._pass_on)
                raise
        if self._at_end and not self._is_closed():
            self.close()
            self._on_end()

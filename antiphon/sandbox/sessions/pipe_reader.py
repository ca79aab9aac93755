"""The reading end of a named pipe that takes the output of one command."""

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CHUNK = 1 << 16  # bytes read at once, which is the capacity of a pipe
PAUSE_SECONDS = 0.002  # after each chunk that is dropped, so that a flood of output does not keep the controller busy


class PipeReader:
    """Reads a pipe while its writers fill it, so that no writer is blocked for long."""

    def __init__(self, path: Path, receive: Callable[[bytes], bool]) -> None:
        """Create the pipe and start reading.

        Args:
            path: Where to create it.
            receive: Called on the event loop with everything that arrives; returns False if it dropped the bytes.
        """
        os.mkfifo(path)
        path.chmod(0o622)  # processes inside the sandbox write to it
        self._receive: Callable[[bytes], bool] | None = receive
        self._pause: asyncio.TimerHandle | None = None
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self._listen()

    @property
    def closed(self) -> bool:
        """True if no process can write to the pipe any more."""
        return self._descriptor < 0

    def take_available(self) -> None:
        """Pass on exactly the bytes written so far.

        Later bytes are read and dropped, so that a background job that writes them can continue.
        """
        left = 0 if self.closed else struct.unpack("i", fcntl.ioctl(self._descriptor, termios.FIONREAD, b"\0" * 4))[0]
        while left > 0 and (count := self._read(min(left, CHUNK))):
            left -= count
        self._receive = None
        if not self.closed:
            self._read(CHUNK)  # closes the pipe if it has no writer left
        with suppress(FileNotFoundError):
            self._path.unlink()

    def close(self) -> None:
        """Stop reading. A process that still writes gets SIGPIPE."""
        if self._pause is not None:
            self._pause.cancel()
        if not self.closed:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        with suppress(FileNotFoundError):
            self._path.unlink()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._read, CHUNK)

    def _read(self, size: int) -> int:
        try:
            content = os.read(self._descriptor, size)
        except BlockingIOError:
            return 0
        if not content:
            self.close()
        elif not (self._receive and self._receive(content)) and self._pause is None and not self.closed:
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(PAUSE_SECONDS, self._listen)
        return len(content)

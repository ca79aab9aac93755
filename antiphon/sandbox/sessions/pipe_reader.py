"""What a command writes: the reading end of a named pipe that the command alone got."""

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CHUNK = 1 << 16  # bytes that are read at once, which is what a pipe holds
PAUSE_SECONDS = 0.002  # after each chunk that nobody wants: a flood must not keep the controller busy


class PipeReader:
    """Reads a pipe as its writers fill it, so that no writer ever waits for long."""

    def __init__(self, path: Path, receive: Callable[[bytes], bool]) -> None:
        """Create the pipe, and call `receive` on the event loop with all that arrives; it says whether that was of use."""
        os.mkfifo(path)
        path.chmod(0o622)  # who is inside writes
        self._receive: Callable[[bytes], bool] | None = receive
        self._pause: asyncio.TimerHandle | None = None
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self._listen()

    @property
    def closed(self) -> bool:
        """Whether nobody writes, or can write, any more."""
        return self._descriptor < 0

    def settle(self) -> None:
        """Take what has been written up to now, exactly. From here on the pipe is read, so that a job in the background can go
        on, and nothing is kept."""
        left = 0 if self.closed else struct.unpack("i", fcntl.ioctl(self._descriptor, termios.FIONREAD, b"\0" * 4))[0]
        while left > 0 and (count := self._read(min(left, CHUNK))):
            left -= count
        self._receive = None
        if not self.closed:
            self._read(CHUNK)  # closes it, if nobody writes any more
        with suppress(FileNotFoundError):
            self._path.unlink()

    def close(self) -> None:
        """Read no more: whoever writes is sent SIGPIPE."""
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

"""One command of a shell session: the files and pipes that carry its input and output."""

import asyncio
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from antiphon.sandbox.sessions.pipe_reader import PipeReader

STDOUT, STDERR = 1, 2

OutputCallback = Callable[[int, bytes], None]
"""Called with (STDOUT or STDERR, bytes) as output arrives."""


class Command:
    """One command under way: its input file, its output pipes, and its state."""

    def __init__(self, directory: Path, stdin: bytes | Path, keep: int, receive: OutputCallback | None) -> None:
        """Create the input file and the output pipes.

        Args:
            directory: The sandbox's directory on this machine.
            stdin: Standard input, as bytes or as a file of this machine.
            keep: Bytes of each stream that are kept.
            receive: Called with everything that arrives, as (stream, bytes).
        """
        self.nonce = secrets.token_hex(8)
        self.chunks: list[tuple[int, bytes]] = []
        self.dropped = 0  # bytes
        self.last_pid: int | None = None  # the highest process number before it began; None: it has not begun
        self.finished: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()  # its exit code
        self.interrupted = False
        self._receive = receive
        self._remaining = {STDOUT: keep, STDERR: keep}
        self._stdin = directory / f"{self.nonce}.in"
        if isinstance(stdin, Path):
            shutil.copyfile(stdin, self._stdin)
        else:
            self._stdin.write_bytes(stdin)
        self._stdin.chmod(0o644)
        self._readers = [
            PipeReader(directory / f"{self.nonce}.out", lambda content: self._keep(STDOUT, content)),
            PipeReader(directory / f"{self.nonce}.err", lambda content: self._keep(STDERR, content)),
        ]

    @property
    def is_silent(self) -> bool:
        """True if no process that it started can write any more."""
        return all(reader.closed for reader in self._readers)

    def take_output(self) -> None:
        """Take the output written so far, and ignore what comes later."""
        for reader in self._readers:
            reader.take_available()
        self._stdin.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop reading. A process that still writes gets SIGPIPE."""
        for reader in self._readers:
            reader.close()

    def _keep(self, stream: int, content: bytes) -> bool:
        kept = content[: self._remaining[stream]]
        self._remaining[stream] -= len(kept)
        self.dropped += len(content) - len(kept)
        if kept:
            self.chunks.append((stream, kept))
        if self._receive is not None:
            self._receive(stream, content)
        return bool(kept) or self._receive is not None

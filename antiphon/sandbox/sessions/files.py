"""Files of a shell sandbox: read, write, list, upload, download, snapshot and restore.

All operations run inside, as commands of a separate session. Paths and links are therefore resolved inside the sandbox, and a
planted link cannot lead out of it. The bytes that come out are bounded here.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import DataError, SandboxError
from antiphon.sandbox.sessions.archives import sanitize_archive
from antiphon.sandbox.sessions.command import STDOUT, OutputCallback
from antiphon.sandbox.sessions.config import WORK
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

LARGEST = 64 << 20  # bytes that are read or written at once, by default
SECONDS = 120.0  # for one operation

_KINDS = {"f": "file", "d": "directory", "l": "link"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryEntry:
    """One entry of a directory."""

    name: str
    kind: str
    """file, directory, link or other."""
    mode: int
    size: int
    """Bytes."""
    modified: float
    """Seconds since 1970."""


class SandboxFiles:
    """The files of one sandbox. Relative paths start at the work directory. A failed operation raises `SandboxError`."""

    def __init__(self, sandbox: ShellSandbox) -> None:
        """Start nothing yet; the first operation starts a session."""
        self._session = Session(sandbox)
        self._space = sandbox.config.limits.disk

    async def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file, and create its parent directories."""
        if len(content) > LARGEST:
            raise SandboxError(f"{path}: {len(content)} bytes exceed the limit of {LARGEST} bytes per write")
        name = _quoted(path)
        copy = f"dd of={name} bs=1M iflag=fullblock oflag=nonblock status=none"
        script = f'mkdir -p -- "$(dirname -- {name})" && {_is_regular(path)} && {copy} && chmod {mode:o} -- {name}'
        await self._run(f"write {path}", script, stdin=content)

    async def read(self, path: str, largest: int = LARGEST) -> bytes:
        """Return the content of a file of at most `largest` bytes."""
        copy = f"dd if={_quoted(path)} bs=1M count={largest + 1} iflag=fullblock,count_bytes,nonblock status=none"
        content = await self._run(f"read {path}", f"{_is_regular(path)} && {copy}", output=largest + 1)
        if len(content) > largest:
            raise SandboxError(f"read {path}: it is larger than {largest} bytes")
        return content

    async def list(self, path: str = ".") -> list[DirectoryEntry]:
        """List a directory, sorted by name."""
        script = f"find -H {_quoted(path)} -mindepth 1 -maxdepth 1 -printf '%y %m %s %T@ %f\\0'"
        entries = []
        for line in (await self._run(f"list {path}", script, output=LARGEST)).split(b"\0")[:-1]:
            kind, mode, size, modified, name = os.fsdecode(line).split(" ", 4)
            kind = _KINDS.get(kind, "other")
            entries.append(
                DirectoryEntry(name=name, kind=kind, mode=int(mode, 8), size=int(size), modified=float(modified))
            )
        return sorted(entries, key=lambda entry: entry.name)

    async def upload(self, archive: bytes, path: str = ".") -> None:
        """Unpack a zip or tar archive into a directory; raise `DataError` for an unsafe one (`sanitize_archive`)."""
        content = sanitize_archive(archive, self._space)
        name = _quoted(path)
        await self._run(f"upload to {path}", f"mkdir -p -- {name} && tar -xf - -C {name}", stdin=content)

    async def download(self, path: str = ".", largest: int = LARGEST) -> bytes:
        """Return a file or directory as a tar of at most `largest` bytes. Its names start with the last part of `path`."""
        script = f'path=$(realpath -- {_quoted(path)}) && tar -C "$(dirname -- "$path")" -cf - "$(basename -- "$path")"'
        content = await self._run(f"download {path}", script, output=largest + 1)
        if len(content) > largest:
            raise SandboxError(f"download {path}: it is larger than {largest} bytes")
        return content

    async def snapshot(self, file: Path) -> None:
        """Save the work directory, with modes, times and links, to a file of this machine, completely or not at all."""
        largest = 2 * self._space  # a sparse file looks larger than it is
        draft = file.with_name(f"{file.name}.draft")
        try:
            with draft.open("wb") as stream:

                def save(channel: int, content: bytes) -> None:
                    if channel == STDOUT and stream.tell() <= largest:
                        stream.write(content)

                await self._run("snapshot", "tar --format=posix -Scpf - .", receive=save)
                if stream.tell() > largest:
                    raise SandboxError(f"snapshot: the work directory is larger than {largest} bytes")
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)

    async def restore(self, file: Path) -> None:
        """Restore the work directory from a snapshot of this sandbox or another."""
        if not file.is_file():
            raise DataError(f"there is no snapshot {file}", path=file)
        script = "chmod -R u+rwX . && find . -mindepth 1 -delete && tar -xpf -"
        await self._run(f"restore {file.name}", script, stdin=file)

    def close(self) -> None:
        """End the session."""
        self._session.close()

    async def _run(
        self,
        operation: str,
        script: str,
        *,
        stdin: bytes | Path = b"",
        output: int = 1 << 16,
        receive: OutputCallback | None = None,
    ) -> bytes:
        result = await self._session.run(
            f"cd {WORK} && umask 022 && {script}", stdin=stdin, seconds=SECONDS, output=output, receive=receive
        )
        if result.exit_code != 0:
            reason = result.stderr.strip() or result.detail or result.status
            raise SandboxError(f"{operation}: {reason}")
        return result.raw(STDOUT)


def _is_regular(path: str) -> str:
    """Return a shell command that fails if the path exists but is not a regular file.

    Opening a pipe, for example, could block for ever. If one is put there after the check, it is opened without blocking.
    """
    name, message = _quoted(path), shlex.quote(f"{path}: it is not a regular file")
    return f"{{ [ ! -e {name} ] || [ -f {name} ] || {{ printf '%s\\n' {message} >&2; false; }}; }}"


def _quoted(path: str) -> str:
    """Return `path` quoted for the shell, such that it cannot be taken for an option."""
    return shlex.quote(path if path.startswith("/") else f"./{path}")

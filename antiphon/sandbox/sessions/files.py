"""Files in and out of a box.

All of it happens inside, by commands in a session of its own: a path means what it means there, so a link that somebody planted
leads nowhere else. What comes out is bytes, and is bounded here.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import DataError, SandboxError
from antiphon.sandbox.sessions.archives import checked_tar
from antiphon.sandbox.sessions.config import WORK
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell import STDOUT, OutputCallback
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

LARGEST = 64 << 20  # bytes that are read or written at once, unless told otherwise
SECONDS = 120.0  # for one operation

_KINDS = {"f": "file", "d": "directory", "l": "link"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryEntry:
    """One name in a directory."""

    name: str
    kind: str
    """file, directory, link or other."""
    mode: int
    size: int
    """Bytes."""
    modified: float
    """Seconds since 1970."""


class SandboxFiles:
    """The files of one box. A path that is not absolute begins at the work directory. `SandboxError` says what went wrong."""

    def __init__(self, box: ShellSandbox) -> None:
        """Nothing is started before the first use."""
        self._session = Session(box)
        self._space = box.config.limits.disk

    async def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file, and the directories it lies in."""
        if len(content) > LARGEST:
            raise SandboxError(f"{path}: {len(content)} bytes are more than the {LARGEST} that are written at once")
        name = _quoted(path)
        copy = f"dd of={name} bs=1M iflag=fullblock oflag=nonblock status=none"
        script = f'mkdir -p -- "$(dirname -- {name})" && {_is_regular(path)} && {copy} && chmod {mode:o} -- {name}'
        await self._run(f"write {path}", script, stdin=content)

    async def read(self, path: str, largest: int = LARGEST) -> bytes:
        """What a file contains; an error if that is more than `largest` bytes."""
        copy = f"dd if={_quoted(path)} bs=1M count={largest + 1} iflag=fullblock,count_bytes,nonblock status=none"
        content = await self._run(f"read {path}", f"{_is_regular(path)} && {copy}", output=largest + 1)
        if len(content) > largest:
            raise SandboxError(f"read {path}: it is larger than {largest} bytes")
        return content

    async def list(self, path: str = ".") -> list[DirectoryEntry]:
        """What is in a directory, by name."""
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
        """Unpack a zip or tar into a directory. `DataError` for one that is not to be trusted (see `checked_tar`)."""
        content = checked_tar(archive, self._space)
        name = _quoted(path)
        await self._run(f"upload to {path}", f"mkdir -p -- {name} && tar -xf - -C {name}", stdin=content)

    async def download(self, path: str = ".", largest: int = LARGEST) -> bytes:
        """A file or directory as a tar of at most `largest` bytes, whose names begin with the last part of `path`."""
        script = f'path=$(realpath -- {_quoted(path)}) && tar -C "$(dirname -- "$path")" -cf - "$(basename -- "$path")"'
        content = await self._run(f"download {path}", script, output=largest + 1)
        if len(content) > largest:
            raise SandboxError(f"download {path}: it is larger than {largest} bytes")
        return content

    async def snapshot(self, file: Path) -> None:
        """Keep the work directory, with modes, times and links, in a file of this machine; it is there whole or not at all."""
        largest = 2 * self._space  # a file with holes looks larger than it is
        draft = file.with_name(f"{file.name}.draft")
        try:
            with draft.open("wb") as stream:

                def keep(channel: int, content: bytes) -> None:
                    if channel == STDOUT and stream.tell() <= largest:
                        stream.write(content)

                await self._run("snapshot", "tar --format=posix -Scpf - .", receive=keep)
                if stream.tell() > largest:
                    raise SandboxError(f"snapshot: the work directory comes to more than {largest} bytes")
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)

    async def restore(self, file: Path) -> None:
        """Make the work directory what it was at a snapshot, of this box or another."""
        if not file.is_file():
            raise DataError(f"there is no snapshot {file}")
        script = "chmod -R u+rwX . && find . -mindepth 1 -delete && tar -xpf -"
        await self._run(f"restore {file.name}", script, stdin=file)

    def close(self) -> None:
        """End the session."""
        self._session.close()

    async def _run(
        self,
        what: str,
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
            raise SandboxError(f"{what}: {reason}")
        return result.raw(STDOUT)


def _is_regular(path: str) -> str:
    """A command that fails for what is there and no regular file, as a pipe, which might be opened for ever. What takes its
    place afterwards is opened without waiting."""
    name, what = _quoted(path), shlex.quote(f"{path}: it is no regular file")
    return f"{{ [ ! -e {name} ] || [ -f {name} ] || {{ printf '%s\\n' {what} >&2; false; }}; }}"


def _quoted(path: str) -> str:
    """`path` as a word of the shell, that cannot be taken for an option."""
    return shlex.quote(path if path.startswith("/") else f"./{path}")

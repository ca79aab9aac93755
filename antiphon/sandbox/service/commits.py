"""Commits: work directories of sandboxes that clients have kept under the name of an image, for sandboxes to start with.

They are files of one directory, which several services of a machine, or of machines with a common file system, may share.
"""

import fcntl
import hashlib
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from antiphon.core.errors import DataError, SandboxError
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.sessions.files import SandboxFiles

ATTEMPTS = 5  # to find the files of a commit that others replace
LEFT_SECONDS = 3600.0  # after which a file belongs to no commit under way


class Commit(BaseModel):
    """One commit, as it is described in a file."""

    model_config = ConfigDict(frozen=True)

    tag: str
    """Name under which clients start it."""
    image: str
    """Docker image of the sandbox that it was; empty if it had none."""
    archive: str
    """Name of the file that holds the work directory."""


class Commits:
    """The commits in a directory."""

    def __init__(self, directory: Path | None, most: int) -> None:
        """Remove what is left of commits that did not come to their end.

        Args:
            directory: Where they are; None if there are none.
            most: How many there may be.
        """
        self._directory = directory
        self._most = most
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep()

    def find(self, tag: str | None) -> Commit | None:
        """Return the commit of this name, if there is one."""
        return None if self._directory is None or tag is None else _read(self._description(tag))

    async def restore(self, tag: str, files: SandboxFiles) -> Commit:
        """Restore the work directory of a sandbox from a commit.

        Raises:
            SandboxError: There is none, or its files do not fit.
        """
        for _ in range(ATTEMPTS):  # it may be replaced meanwhile
            if (commit := self.find(tag)) is not None:
                with suppress(DataError, FileNotFoundError):
                    await files.restore(self._archive(commit))
                    return commit
        raise SandboxError(f"there is no commit {tag!r} any more")

    async def save(self, tag: str, image: str, files: SandboxFiles) -> None:
        """Keep the work directory of a sandbox. One of the same name is replaced.

        Args:
            tag: Name of the commit.
            image: Docker image of the sandbox.
            files: The sandbox's.

        Raises:
            RefusedError: This service keeps no commits, or there are too many.
            SandboxError: The files cannot be read, for example because they change.
        """
        if self._directory is None:
            raise RefusedError(Reason.INPUT, "commit: this service keeps none; its operator sets commit_directory")
        self._check_number(tag)
        name = secrets.token_hex(16)
        commit = Commit(tag=tag, image=image, archive=f"{name}.tar")
        await files.snapshot(self._archive(commit))
        try:
            with self._alone():
                self._check_number(tag)
                before, description = self.find(tag), self._description(tag)
                draft = description.with_suffix(f".{name}")
                draft.write_text(commit.model_dump_json(), encoding="utf-8")
                draft.replace(description)
        except RefusedError:
            self._archive(commit).unlink()
            raise
        if before is not None:
            self._archive(before).unlink(missing_ok=True)

    def _check_number(self, tag: str) -> None:
        """Raise `RefusedError` if there is no room for a commit."""
        assert self._directory is not None
        if self.find(tag) is None and sum(1 for _ in self._directory.glob("*.json")) >= self._most:
            raise RefusedError(Reason.QUOTA, f"{self._most} commits are kept, which is the limit (commits)")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run the block, which must not wait, in one service at a time."""
        assert self._directory is not None
        with (self._directory / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _sweep(self) -> None:
        """Remove what commits have left that did not come to their end."""
        assert self._directory is not None
        kept = {commit.archive for file in self._directory.glob("*.json") if (commit := _read(file)) is not None}
        for file in self._directory.iterdir():
            is_left = file.suffix != ".json" and file.name not in {*kept, "lock"}
            with suppress(FileNotFoundError):
                if is_left and time.time() - file.stat().st_mtime > LEFT_SECONDS:
                    file.unlink()

    def _archive(self, commit: Commit) -> Path:
        assert self._directory is not None
        return self._directory / commit.archive

    def _description(self, tag: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{hashlib.sha256(tag.encode()).hexdigest()}.json"


def _read(description: Path) -> Commit | None:
    try:
        return Commit.model_validate_json(description.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None

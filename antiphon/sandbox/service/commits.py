"""Commits: work directories of sandboxes that clients have kept under the name of an image, for sandboxes to start with.

They are files of one directory, which several services of a machine, or of machines with a common file system, may share.
"""

import hashlib
import secrets
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.sessions.files import SandboxFiles


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
        """Read nothing yet.

        Args:
            directory: Where they are; None if there are none.
            most: How many there may be.
        """
        self._directory = directory
        self._most = most
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def find(self, tag: str | None) -> Commit | None:
        """Return the commit of this name, if there is one."""
        if self._directory is None or tag is None:
            return None
        try:
            return Commit.model_validate_json(self._description(tag).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def archive(self, commit: Commit) -> Path:
        """Return the file that holds the work directory."""
        assert self._directory is not None
        return self._directory / commit.archive

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
        before = self.find(tag)
        if before is None and sum(1 for _ in self._directory.glob("*.json")) >= self._most:
            raise RefusedError(Reason.QUOTA, f"{self._most} commits are kept, which is the limit (commits)")
        description, name = self._description(tag), secrets.token_hex(16)
        commit = Commit(tag=tag, image=image, archive=f"{name}.tar")
        await files.snapshot(self.archive(commit))
        draft = description.with_suffix(f".{name}")
        draft.write_text(commit.model_dump_json(), encoding="utf-8")
        draft.replace(description)
        if before is not None:
            self.archive(before).unlink(missing_ok=True)

    def _description(self, tag: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{hashlib.sha256(tag.encode()).hexdigest()}.json"

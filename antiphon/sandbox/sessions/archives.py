"""Checks untrusted archives and rewrites them as a tar of regular files, folders and links that stay inside."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import IO, Any

from antiphon.core.errors import DataError

MAX_MEMBERS = 100_000
_DECOMPRESSORS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
_Member = tuple[tarfile.TarInfo, bytes]


def sanitize_archive(archive: bytes, largest: int) -> bytes:
    """Convert a zip or a tar (plain, gz, bz2, xz) to a plain tar without owners and special permissions.

    Args:
        archive: Content of the archive.
        largest: Maximum bytes when unpacked.

    Raises:
        DataError: The content is not an archive or is too large, or a member is absolute, leaves the directory, goes through a
            link or is a device.
    """
    try:
        unpack = _from_zip if zipfile.is_zipfile(io.BytesIO(archive)) else _from_tar
        members = list(unpack(archive, largest))
    except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, OSError, EOFError, RuntimeError) as error:
        raise DataError(f"the archive cannot be read: {error or type(error).__name__}") from error
    links = {_parts(member.name) for member, _ in members if member.issym()}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in members:
            _check_member(member, links)
            tar.addfile(_strip_member(member), io.BytesIO(content))
    return packed.getvalue()


def _from_zip(archive: bytes, largest: int) -> Iterator[_Member]:
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        for number, entry in enumerate(file.infolist()):
            member = tarfile.TarInfo(entry.filename.rstrip("/"))
            mode = entry.external_attr >> 16
            if mode & 0o170000 not in (0, 0o100000, 0o040000):
                raise DataError(f"{entry.filename!r} in the archive is neither a file nor a folder")
            member.type = tarfile.DIRTYPE if entry.is_dir() else tarfile.REGTYPE
            member.mode = mode & 0o777 or (0o755 if entry.is_dir() else 0o644)
            content = b""
            if not entry.is_dir():
                with file.open(entry) as stream:
                    content = _read_bounded(stream, largest)
            largest -= len(content)
            member.size = len(content)
            _check_count(number)
            yield member, content


def _from_tar(archive: bytes, largest: int) -> Iterator[_Member]:
    for magic, unpack in _DECOMPRESSORS.items():
        if archive.startswith(magic):
            with unpack(io.BytesIO(archive)) as stream:
                archive = _read_bounded(stream, largest)
    if len(archive) > largest:
        raise _too_large()
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as file:
        for number, member in enumerate(file):
            _check_count(number)
            if member.issparse() or not (member.isfile() or member.isdir() or member.issym()):
                raise DataError(f"{member.name!r} in the archive is neither a file, nor a folder, nor a symbolic link")
            content = file.extractfile(member) if member.isfile() else None
            yield member, content.read() if content else b""


def _read_bounded(stream: IO[bytes], largest: int) -> bytes:
    content = stream.read(largest + 1)
    if len(content) > largest:
        raise _too_large()
    return content


def _too_large() -> DataError:
    return DataError("the unpacked archive is larger than allowed")


def _check_count(number: int) -> None:
    if number >= MAX_MEMBERS:
        raise DataError(f"the archive has more than {MAX_MEMBERS} members")


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part for part in PurePosixPath(name).parts if part != ".")


def _check_member(member: tarfile.TarInfo, links: set[tuple[str, ...]]) -> None:
    """Raise unless a member and the target of a link lie inside, in whatever order members are unpacked."""
    parts = _parts(member.name)
    if PurePosixPath(member.name).is_absolute() or ".." in parts or "\0" in member.name:
        raise DataError(f"{member.name!r} in the archive leaves its directory")
    if any(parts[:end] in links for end in range(1, len(parts))):
        raise DataError(f"{member.name!r} in the archive goes through a link")
    if member.issym():
        at = list(parts[:-1])
        for part in _parts(member.linkname):
            if part == "/" or tuple(at) in links or (part == ".." and not at):
                raise DataError(f"the link {member.name!r} in the archive leads out of it, or through another link")
            at = at[:-1] if part == ".." else [*at, part]


def _strip_member(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member with only the attributes that are safe to keep."""
    plain = tarfile.TarInfo("/".join(_parts(member.name)) or ".")
    plain.type, plain.size, plain.linkname = member.type, member.size, member.linkname
    plain.mode, plain.mtime = member.mode & 0o777, member.mtime
    if not (plain.isdir() or plain.issym()):
        plain.type = tarfile.REGTYPE
    return plain

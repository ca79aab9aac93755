"""The packages of Mini-SWE and the instances: seeded faults in their modules.

The packages are stored in `data/` as published, each as a compressed tar with its licence, so any version of them, or none, may
be installed. An instance holds only the bytes that make its fault.
"""

import functools
import hashlib
import io
import lzma
import marshal
import struct
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from antiphon.core.errors import DataError
from antiphon.sandbox.sessions.config import WORK
from antiphon.tasks.splits import check_split, split_of

STORED = Path(__file__).with_name("instances.json")
DATA = Path(__file__).with_name("data")
VERSIONS = {"mpmath": "1.3.0", "networkx": "3.6.1"}  # of the stored packages
BUILD = "python -m antiphon_envs.mini_swe.build"
MODIFIED = 946_684_800  # modification time of every file, in seconds since 1970, so that times reveal no fault

Files = Mapping[str, bytes]  # path, beginning with the package's name -> content


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A fault in a package."""

    id: str
    package: str
    version: str
    sha256: str
    """Digest of the package's files, `Package.sha256`."""
    path: str
    """Path of the file with the fault."""
    start: int
    end: int
    """The replaced bytes: from `start` to `end`."""
    text: str
    """The text that replaces them."""
    tests: tuple[str, ...]
    """Files with its tests."""
    fail_to_pass: tuple[str, ...]
    """Tests that the fault makes fail."""
    passed: int
    """Tests that pass without the fault."""
    passed_sha256: str
    """Digest of their names, `names_sha256`."""

    def faulty(self, package: "Package") -> bytes:
        """Return the content of the file with the fault."""
        original = package.files[self.path]
        return original[: self.start] + self.text.encode() + original[self.end :]

    def solved_by(self, passed: Iterable[str]) -> bool:
        """Return True if exactly the tests that pass without the fault have passed."""
        return names_sha256(passed) == self.passed_sha256


def names_sha256(names: Iterable[str]) -> str:
    """Return the digest of a set of names."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


class Package:
    """All files of a package but compiled ones."""

    def __init__(self, name: str, version: str, files: Files) -> None:
        self.name, self.version = name, version
        self.files = {path: files[path] for path in sorted(files)}
        digests = (f"{path} {hashlib.sha256(content).hexdigest()}" for path, content in self.files.items())
        self.sha256 = names_sha256(digests)
        self._members = {path: _member(path, content) for path, content in self.files.items()}
        for path in self.sources:
            cached, content = bytecode(path, self.files[path])
            self._members[cached] = _member(cached, content)

    @property
    def sources(self) -> list[str]:
        """Paths of the modules without tests: a fault may be in them, and an attempt may change them."""
        return [path for path in self.files if path.endswith(".py") and not _is_test(PurePosixPath(path))]

    def tar(self, changed: Files, missing: Iterable[str] = ()) -> bytes:
        """Return a tar of all files, some of them `changed`, new or `missing`, all of one modification time.

        It has the bytecode of unchanged modules, which saves the time to compile them.
        """
        dropped = {*missing, *(cache_from_source(path) for path in [*changed, *missing] if path.endswith(".py"))}
        members = {path: member for path, member in self._members.items() if path not in dropped}
        members |= {path: _member(path, content) for path, content in changed.items()}
        return b"".join(members[path] for path in sorted(members)) + bytes(2 * tarfile.BLOCKSIZE)


def _is_test(path: PurePosixPath) -> bool:
    return "tests" in path.parts or path.name == "conftest.py" or path.name.startswith("test_")


def bytecode(path: str, content: bytes) -> tuple[str, bytes]:
    """Return the path and the content of a module's bytecode file (PEP 552). Not for untrusted text: compiling is not safe."""
    code = compile(content, f"{WORK}/{path}", "exec", dont_inherit=True)
    return cache_from_source(path), MAGIC_NUMBER + struct.pack("<III", 0, MODIFIED, len(content)) + marshal.dumps(code)


def _member(path: str, content: bytes) -> bytes:
    member = tarfile.TarInfo(path)
    member.size, member.mtime = len(content), MODIFIED
    return member.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


@functools.cache
def load_package(name: str) -> Package:
    """Return a stored package. `DataError` if there is none with this name, or its archive is damaged."""
    if name not in VERSIONS:
        raise DataError(f"Mini-SWE has no package {name!r}: valid are {', '.join(VERSIONS)}")
    archive = DATA / f"{name}-{VERSIONS[name]}.tar.xz"
    files = {}
    try:
        with tarfile.open(archive, "r:xz") as tar:
            for member in tar:
                if content := tar.extractfile(member):
                    files[member.name] = content.read()
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
        raise DataError(f"{archive} cannot be read: {error}", path=archive) from error
    return Package(name, VERSIONS[name], {path: text for path, text in files.items() if path.startswith(f"{name}/")})


def pack_package(directory: Path, licence: Path, archive: Path) -> None:
    """Store a package and its licence as the archive that `load_package` reads; the same files give the same bytes."""
    found = {f"{directory.name}/{path.relative_to(directory).as_posix()}": path for path in directory.rglob("*")}
    members = {path: file for path, file in found.items() if file.is_file() and file.suffix != ".pyc"}
    members["LICENSE"] = licence
    tar = io.BytesIO()
    for path in sorted(members):
        tar.write(_member(path, members[path].read_bytes()))
    tar.write(bytes(2 * tarfile.BLOCKSIZE))
    archive.write_bytes(lzma.compress(tar.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def package_of(instance: Instance) -> Package:
    """Return the package of an instance. `DataError` if the instance was made from another version of it."""
    package = load_package(instance.package)
    if (package.version, package.sha256) != (instance.version, instance.sha256):
        same = package.version == instance.version
        problem = "its files differ" if same else f"Mini-SWE has {package.version}"
        raise DataError(
            f"Mini-SWE instance {instance.id} needs {instance.package} {instance.version}, but {problem}: make instances again "
            f"with {BUILD} --out FILE"
        )
    return package


def instance_of(row: Any) -> Instance:
    """Return an instance from plain data; `DataError` if something is missing or wrong."""
    try:
        return msgspec.convert(row, Instance)
    except msgspec.ValidationError as error:
        raise DataError(f"this is not a Mini-SWE instance: {error}") from None


def read_instances(file: Path = STORED) -> list[Instance]:
    """Read stored instances; `DataError` if the file is missing or malformed."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[Instance])
    except (OSError, msgspec.DecodeError) as error:
        message = f"Mini-SWE instances in {file} cannot be read: {error}; {BUILD} --out FILE makes some"
        raise DataError(message, path=file) from None


def write_instances(instances: Iterable[Instance], file: Path = STORED) -> None:
    """Store instances; the same ones give the same bytes."""
    rows = sorted(instances, key=lambda instance: instance.id)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


def mini_swe(split: str, path: str = "") -> Iterator[dict[str, Any]]:
    """Yield prompts for the instances in the file `path`, by default the built-in ones.

    The path of the faulty file decides the split, so no file is in two splits.
    """
    check_split(split)
    for instance in read_instances(Path(path) if path else STORED):
        package_of(instance)
        if split_of(instance.path) == split:
            prompt = f"The Python package {instance.package} has a fault. Find it and mend it."
            yield {"prompt": prompt, "id": instance.id, "instance": msgspec.to_builtins(instance)}

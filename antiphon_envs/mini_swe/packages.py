"""What Mini-SWE is played with: packages that are installed here, and the faults that are stored for them.

Of a package's text an instance holds nothing but the bytes that make the fault. The rest is read from the installation, which
must be of the same version and the same to the last byte.
"""

import functools
import hashlib
import importlib.metadata
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
from antiphon.tasks.splits import SPLITS, split_of

STORED = Path(__file__).with_name("instances.json")
BUILD = "python -m antiphon_envs.mini_swe.build"
MODIFIED = 946_684_800  # when every file was modified, in seconds since 1970: times must not tell which one differs

Files = Mapping[str, bytes]  # path from the directory that the package lies in -> content


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One fault in one package."""

    id: str
    package: str
    version: str
    sha256: str
    """Of the package's files, as `Package` says."""
    path: str
    """Of the file with the fault."""
    start: int
    end: int
    """The bytes of it that are replaced, from and to."""
    text: str
    """By what."""
    tests: tuple[str, ...]
    """Files with tests of it."""
    fail_to_pass: tuple[str, ...]
    """The tests that the fault makes fail."""
    passed: int
    """Tests that pass without the fault."""
    passed_sha256: str
    """Of their names, as `names_sha256` says."""

    def faulty(self, package: "Package") -> bytes:
        """The file with the fault."""
        original = package.files[self.path]
        return original[: self.start] + self.text.encode() + original[self.end :]

    def solved_by(self, passed: Iterable[str]) -> bool:
        """Whether these are the tests that pass without the fault: all of them, and no other."""
        return names_sha256(passed) == self.passed_sha256


def names_sha256(names: Iterable[str]) -> str:
    """Digest of a set of names."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


class Package:
    """An installed package: all its files but what Python made of them."""

    def __init__(self, name: str, directory: Path) -> None:
        """`directory` is the package's own."""
        self.name = name
        found = {f"{name}/{path.relative_to(directory).as_posix()}": path for path in directory.rglob("*")}
        self.files: Files = {
            path: found[path].read_bytes()
            for path in sorted(found)
            if found[path].is_file() and found[path].suffix != ".pyc"
        }
        digests = (f"{path} {hashlib.sha256(content).hexdigest()}" for path, content in self.files.items())
        self.sha256 = names_sha256(digests)
        self._members = {path: _member(path, content) for path, content in self.files.items()}
        for path in self.sources:
            cached, content = bytecode(path, self.files[path])
            self._members[cached] = _member(cached, content)

    @property
    def sources(self) -> list[str]:
        """The files that a fault may be in, and that an attempt may change: its modules, but for tests."""
        return [path for path in self.files if path.endswith(".py") and not _is_test(PurePosixPath(path))]

    def tar(self, changed: Files, missing: Iterable[str] = ()) -> bytes:
        """All files in a tar, some of them `changed`, or new, or `missing`. All of one age. With the bytecode of modules that
        are as they were, so that nobody waits for that."""
        gone = {*missing, *(cache_from_source(path) for path in [*changed, *missing] if path.endswith(".py"))}
        members = {path: member for path, member in self._members.items() if path not in gone}
        members |= {path: _member(path, content) for path, content in changed.items()}
        return b"".join(members[path] for path in sorted(members)) + bytes(2 * tarfile.BLOCKSIZE)


def _is_test(path: PurePosixPath) -> bool:
    return "tests" in path.parts or path.name == "conftest.py" or path.name.startswith("test_")


def bytecode(path: str, content: bytes) -> tuple[str, bytes]:
    """What Python keeps of a module, and where (PEP 552). Not for text that is not ours: compiling is no safe thing."""
    code = compile(content, f"{WORK}/{path}", "exec", dont_inherit=True)
    return cache_from_source(path), MAGIC_NUMBER + struct.pack("<III", 0, MODIFIED, len(content)) + marshal.dumps(code)


def _member(path: str, content: bytes) -> bytes:
    member = tarfile.TarInfo(path)
    member.size, member.mtime = len(content), MODIFIED
    return member.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


@functools.cache
def installed(name: str) -> Package:
    """A package as it is installed here. `DataError` if it is not."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"Mini-SWE needs the package {name}, and it is not installed: pip install {name}") from None
    return Package(name, Path(str(distribution.locate_file(name))).resolve())


def package_of(instance: Instance) -> Package:
    """The package that an instance was made from. `DataError` if another version of it is installed, or it was changed."""
    package = installed(instance.package)
    version = importlib.metadata.version(instance.package)
    if (version, package.sha256) != (instance.version, instance.sha256):
        state = "its files are not those that were published" if version == instance.version else f"{version} is here"
        raise DataError(
            f"Mini-SWE instance {instance.id} needs {instance.package} {instance.version}, but {state}: install "
            f"{instance.package}=={instance.version}, or make instances for what is installed: {BUILD} --out FILE"
        )
    return package


def instance_of(row: Any) -> Instance:
    """An instance from plain data. `DataError` if something is missing or wrong in it."""
    try:
        return msgspec.convert(row, Instance)
    except msgspec.ValidationError as error:
        raise DataError(f"this is no Mini-SWE instance: {error}") from None


def read_instances(file: Path = STORED) -> list[Instance]:
    """The stored instances. `DataError` if the file is missing or is not one of ours."""
    try:
        rows = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"Mini-SWE instances cannot be read: {error or file}; {BUILD} --out FILE makes some") from None
    return [instance_of(row) for row in rows]


def write_instances(instances: Iterable[Instance], file: Path = STORED) -> None:
    """Store instances, the same ones always as the same bytes."""
    rows = sorted(instances, key=lambda instance: instance.id)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


def mini_swe(split: str, path: str = "") -> Iterator[dict[str, Any]]:
    """The prompts of the instances in `path`, by default those that come with Antiphon. The file with the fault decides the
    split, so that what is tested on was never trained on."""
    if split not in SPLITS:
        raise DataError(f"Mini-SWE has the splits {', '.join(SPLITS)}, not {split!r}")
    for instance in read_instances(Path(path) if path else STORED):
        package_of(instance)
        if split_of(instance.path) == split:
            prompt = f"The Python package {instance.package} has a fault. Find it and mend it."
            yield {"prompt": prompt, "id": instance.id, "instance": msgspec.to_builtins(instance)}

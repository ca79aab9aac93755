"""Containers of task images: start one, copy files in, and run what must not fail."""

import atexit
import functools
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import SandboxError
from antiphon.sandbox.base import Limits
from antiphon.sandbox.sessions.command import STDOUT
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.session import CommandResult, Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

TESTS = "/tests"  # where tasks of Terminal-Bench and Harbor find their tests
HAS_TESTS = f"{{ [ ! -e {TESTS} ] || echo yes; }}"  # script
COPY_SECONDS = 120.0
MOST_BYTES = 64 << 20  # of a log, or of what is read from a container
SHOWN = 2000  # characters of an output that an error shows

# A container of a published task may compile, serve and install: only memory and the number of processes bound it.
CPU_SECONDS, FILE_SIZE, SHARED_MEMORY, PROCESSES = 36_000.0, 64 << 30, 1 << 30, 2048


@functools.cache
def _runtime_dirs() -> RuntimeDirs:
    """Return the directories that all containers of this process share."""
    rooms = RuntimeDirs()
    atexit.register(rooms.close)
    return rooms


async def start_container(
    image: str, *, memory: int, variables: Mapping[str, str], network: tuple[str, ...] = ()
) -> ShellSandbox:
    """Start a container of a local image, with the image's own user and a root file system that can be written.

    Args:
        image: Name of the image.
        memory: MiB of all its processes together.
        variables: Environment variables beside those of the image.
        network: Hosts, each as `host:port`, that it reaches by HTTP and HTTPS.

    Raises:
        SandboxError: There is no such image on this machine, or the start failed.
        UnsupportedError: docker is missing.
    """
    limits = Limits(
        cpu_seconds=CPU_SECONDS,
        memory=memory << 20,
        file_size=FILE_SIZE,
        disk=SHARED_MEMORY,
        processes=PROCESSES,
    )
    config = ShellSandboxConfig(limits=limits, image=image, image_as_built=True, environment=variables, network=network)
    return await ShellSandbox.start(_runtime_dirs(), config, Deadlines())


async def run_checked(
    session: Session, script: str, *, what: str, stdin: bytes = b"", seconds: float = COPY_SECONDS
) -> bytes:
    """Run a script in a subshell and return its standard output; `SandboxError`, which names `what`, if it fails."""
    result = await session.run(f"(\n{script}\n)", stdin=stdin, seconds=seconds, output=MOST_BYTES)
    if result.exit_code != 0 or result.dropped:
        raise SandboxError(f"{what}: {result.stderr.strip()[-SHOWN:] or result.detail or result.status}")
    return result.raw(STDOUT)


async def copy_files(session: Session, files: Mapping[str, Path | bytes], directory: str) -> None:
    """Write files to a directory of a container, which is created if it is missing; files of the same names are replaced."""
    tar = pack_files(files)
    script = f"mkdir -p {directory} && tar --no-same-owner -xf - -C {directory}"
    await run_checked(session, script, what=f"copy files to {directory}", stdin=tar)


async def place_tests(session: Session, files: Mapping[str, Path | bytes], *, in_image: bool) -> None:
    """Copy tests into a container after an attempt.

    Their directory is removed first, unless the image has one: an attempt must not leave files, such as a conftest.py, that the
    tests would read.
    """
    if not in_image:
        await run_checked(session, f"rm -rf -- {TESTS}", what=f"remove {TESTS}")
    await copy_files(session, files, TESTS)


def pack_files(files: Mapping[str, Path | bytes]) -> bytes:
    """Return a tar of files by their names; a file of this machine keeps its mode, and owner and time are dropped."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, source in files.items():
            member = tarfile.TarInfo(name)
            content = source.read_bytes() if isinstance(source, Path) else source
            member.size = len(content)
            member.mode = source.stat().st_mode & 0o777 if isinstance(source, Path) else 0o644
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def files_below(directory: Path) -> dict[str, Path]:
    """Return all files below a directory, by their path from there; none if it is missing."""
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path for path in found}


def log_of(result: CommandResult) -> str:
    """Return everything that a command wrote, as text."""
    return result.raw().decode("utf-8", "replace")

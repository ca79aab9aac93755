"""Configuration of the sandbox service. Importing this module loads no implementation."""

import os

from pydantic import Field

from antiphon.core.config import Config
from antiphon.sandbox.config import SandboxConfig


def _memory_of_machine() -> int:
    return max(1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20)


class ServiceConfig(Config):
    """Address and quotas of the service."""

    host: str = "127.0.0.1"
    """Address to listen at. The token travels unencrypted: for access from other machines, use a TLS proxy or a tunnel."""
    port: int = Field(8080, ge=0, le=65535)
    """TCP port; 0 chooses a free one."""
    workers: int = Field(1, gt=0)
    """Number of processes that share the work behind one address. The quotas are divided among them."""
    warm: int = Field(2, ge=0)
    """Sandboxes kept started beyond those in use, so that a start takes milliseconds."""
    image: str = ""
    """Local docker image; if given, sandboxes are containers of it and have its commands."""
    python: SandboxConfig = SandboxConfig()
    """Sandbox of single programs that clients send, and the most that one may use."""

    sandboxes: int = Field(200, gt=0)
    """Maximum number that run at once."""
    memory: int = Field(default_factory=_memory_of_machine, gt=0)
    """MiB that all of them may use together; the default is the memory of the machine."""
    sandbox_memory: int = Field(2048, gt=0)
    """MiB that one sandbox gets at most, and by default."""
    sandbox_disk: int = Field(512, gt=0)
    """Maximum MiB of its work directory, and of its /tmp; both lie in memory."""
    processes: int = Field(256, gt=0)
    """Maximum number of processes in one sandbox."""
    sessions: int = Field(32, gt=0)
    """Maximum number of open sessions in one sandbox."""
    commands: int = Field(256, gt=0)
    """Maximum number under way at once in all sandboxes; also the maximum number of single programs."""
    sandbox_commands: int = Field(64, gt=0)
    """Maximum number under way at once in one sandbox."""
    environments: int = Field(64, gt=0)
    """Maximum number open at once; each is a process."""

    upload: int = Field(64, gt=0, le=64)
    """Maximum MiB of one request, and of one file that is read."""
    output: int = Field(1024, gt=0)
    """KiB of standard output kept in a command's answer, and as many of standard error."""
    request_seconds: float = Field(60.0, gt=0.0, allow_inf_nan=False)
    """Time for a request to arrive, headers and body. The connection of a slower one is closed."""
    command_seconds: float = Field(3600.0, gt=0.0, allow_inf_nan=False)
    """Time that a command gets at most, and by default."""
    start_seconds: float = Field(180.0, gt=0.0, allow_inf_nan=False)
    """Time for the start of a sandbox or of an environment."""
    environment_seconds: float = Field(120.0, gt=0.0, allow_inf_nan=False)
    """Time for a reset or a step of an environment."""
    idle_minutes: float = Field(360.0, gt=0.0, allow_inf_nan=False)
    """Time without a request after which a sandbox is stopped and an environment closed. A sandbox may ask for less."""
    stopped_minutes: float = Field(10.0, ge=0.0, allow_inf_nan=False)
    """Time that the work directory of a stopped sandbox is kept on disk for a restart, before it is deleted."""

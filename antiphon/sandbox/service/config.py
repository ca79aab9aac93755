"""Configuration of the sandbox service. Importing it imports no machinery."""

import os

from pydantic import Field

from antiphon.core.config import Config
from antiphon.sandbox.config import SandboxConfig


def _memory_of_machine() -> int:
    return max(1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20)


class ServiceConfig(Config):
    """Where the service is, and how much it gives."""

    host: str = "127.0.0.1"
    """Address to listen at. The token travels unencrypted: beyond this machine, put a TLS proxy or a tunnel before it."""
    port: int = Field(8080, ge=0, le=65535)
    """0 takes a free one."""
    workers: int = Field(1, gt=0)
    """Processes that share the work, each with its part of what there may be; one address stands before them."""
    warm: int = Field(2, ge=0)
    """Boxes started ahead, beyond those in use, so that a start takes milliseconds."""
    image: str = ""
    """A docker image of this machine: then sandboxes are containers of it, and have its commands."""
    python: SandboxConfig = SandboxConfig()
    """Where programs run that clients send to run by themselves, and what one may use at most."""

    sandboxes: int = Field(200, gt=0)
    """Most that run at once."""
    memory: int = Field(default_factory=_memory_of_machine, gt=0)
    """MiB that all of them may use together; the default is what the machine has."""
    sandbox_memory: int = Field(2048, gt=0)
    """MiB that one gets at most, and when it does not say."""
    sandbox_disk: int = Field(512, gt=0)
    """MiB of its work directory and of its /tmp, at most; they lie in memory."""
    processes: int = Field(256, gt=0)
    """Of one sandbox."""
    sessions: int = Field(32, gt=0)
    """Of one sandbox, open at once."""
    commands: int = Field(256, gt=0)
    """Under way at once, in all sandboxes; and as many programs."""
    sandbox_commands: int = Field(64, gt=0)
    """Under way at once, in one sandbox."""
    environments: int = Field(64, gt=0)
    """Open at once; each is a process."""

    upload: int = Field(64, gt=0, le=64)
    """MiB of one request, and of one file that is read."""
    output: int = Field(1024, gt=0)
    """KiB of standard output that a command's answer keeps, and as many of standard error."""
    request_seconds: float = Field(60.0, gt=0.0, allow_inf_nan=False)
    """That a request may take to arrive, headers and body; the connection of one that takes longer is closed."""
    command_seconds: float = Field(3600.0, gt=0.0, allow_inf_nan=False)
    """That a command has at most, and when it does not say."""
    start_seconds: float = Field(180.0, gt=0.0, allow_inf_nan=False)
    """That the start of a sandbox or of an environment may take."""
    environment_seconds: float = Field(120.0, gt=0.0, allow_inf_nan=False)
    """That an environment may take to reset or to step."""
    idle_minutes: float = Field(360.0, gt=0.0, allow_inf_nan=False)
    """After so long without a request a sandbox is stopped and an environment closed, if it does not ask for less."""
    stopped_minutes: float = Field(10.0, ge=0.0, allow_inf_nan=False)
    """So long the work directory of a stopped sandbox is kept on disk for a restart; then it is deleted."""

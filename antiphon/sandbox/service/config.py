"""Configuration of the sandbox service. Importing this module loads no implementation."""

import os
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from antiphon.core.config import Config
from antiphon.core.errors import ValidatorError
from antiphon.sandbox.config import SandboxConfig
from antiphon.sandbox.sessions.egress import parse_hosts

FRONT_OPTIONS = (  # those that a service with `hosts` uses
    *("host", "port", "hosts", "check_seconds", "sandboxes", "memory", "commands", "environments", "upload"),
    *("request_seconds", "command_seconds", "start_seconds", "environment_seconds"),
)


def _memory_of_machine() -> int:
    return max(1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20)


class ServiceConfig(Config):
    """Address and quotas of the service."""

    host: str = "127.0.0.1"
    """Address to listen at. The token travels unencrypted: for access from other machines, use a TLS proxy or a tunnel."""
    port: int = Field(8080, ge=0, le=65535)
    """TCP port; 0 chooses a free one."""
    workers: int = Field(1, gt=0)
    """Number of processes that share the work behind one address."""
    hosts: tuple[str, ...] = ()
    """Addresses of sandbox services, as in `[http://10.0.0.2:8080]`. If given, this service has no sandboxes of its own, but
    shares those of its clients over these services. By default, it has the sum of their quotas."""
    check_seconds: float = Field(10.0, gt=0.0, allow_inf_nan=False)
    """Time for a worker or host to report what it holds, every second. A slower one is unreachable until it does."""
    warm: int = Field(2, ge=0)
    """Sandboxes kept started beyond those in use, so that a start takes milliseconds."""
    images: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9]")], ...] = ()
    """Local docker images; if given, sandboxes are containers of the one that the client names, or of the first."""
    network: tuple[str, ...] = ()
    """Hosts, each as `host:port`, that programs in sandboxes can reach by HTTP and HTTPS through a proxy; no others."""
    commit_directory: Path | None = None
    """Where work directories are kept that clients commit; None keeps none. Services that share it have the same commits."""
    commits: int = Field(100, gt=0)
    """Maximum number of commits that are kept, each up to twice `sandbox_disk`."""
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

    @field_validator("network")
    @classmethod
    def _check_network(cls, network: tuple[str, ...]) -> tuple[str, ...]:
        parse_hosts(network)
        return network

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        mistakes = [("hosts", f"{url!r} {problem}") for url in self.hosts if (problem := _problem_of_address(url))]
        if len({*self.hosts}) < len(self.hosts):
            mistakes.append(("hosts", "must not name a service twice"))
        if self.hosts:
            unused = sorted(self.model_fields_set.difference(FRONT_OPTIONS))
            mistakes += [(name, "has no effect with hosts; set it for the service on each host") for name in unused]
        if mistakes:
            raise ValidatorError(mistakes)
        return self


def _problem_of_address(url: str) -> str:
    """Return what is wrong with the address of a service; an empty text if nothing is."""
    try:
        parts = urlsplit(url)
        is_valid = parts.hostname and parts.port != 0 and url == f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        is_valid = False
    if not is_valid or parts.scheme not in ("http", "https") or "@" in parts.netloc:
        return "is not an address of the form http://HOST:PORT or https://HOST:PORT"
    return ""

"""Limits of one sandbox and of all sandboxes together, from the service's configuration."""

from collections.abc import Collection

from antiphon.sandbox.base import Limits
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.records import Sandbox, SandboxRequest
from antiphon.sandbox.sessions.config import ShellSandboxConfig

MIN_MEMORY = 32 << 20  # bytes; bash does not start in much less
MIN_DISK = 1 << 20


def make_backend_config(config: ServiceConfig, request: SandboxRequest) -> ShellSandboxConfig:
    """Return what a sandbox gets: what was requested, up to what the service allows.

    Raises:
        RefusedError: The request asks for too little to start a sandbox.
    """
    for name, value, minimum in (("memory", request.memory, MIN_MEMORY), ("disk", request.disk, MIN_DISK)):
        if value is not None and value < minimum:
            raise RefusedError(
                Reason.INPUT, f"{name}: {value} bytes are too little; ask for at least {minimum >> 20} MiB"
            )
    memory, disk = config.sandbox_memory << 20, config.sandbox_disk << 20
    disk = min(disk, request.disk or disk)
    limits = Limits(
        seconds=config.command_seconds,
        cpu_seconds=config.command_seconds,
        memory=min(memory, request.memory or memory),
        file_size=disk,
        disk=disk,
        processes=config.processes,
        output=config.output << 10,
    )
    return ShellSandboxConfig(limits=limits, image=config.image)


def check_quota(config: ServiceConfig, live: Collection[Sandbox], wanted: ShellSandboxConfig) -> None:
    """Raise `RefusedError` if the service has no room for one more sandbox beside the `live` ones."""
    if len(live) >= config.sandboxes:
        raise RefusedError(
            Reason.QUOTA, f"{len(live)} sandboxes are open, which is the limit (sandboxes); stop one first"
        )
    free = (config.memory << 20) - sum(sandbox.backend_config.limits.memory for sandbox in live)
    if wanted.limits.memory > free:
        raise RefusedError(
            Reason.QUOTA,
            f"memory: {free >> 20} of the {config.memory} MiB for all sandboxes are free, but {wanted.limits.memory >> 20} are "
            "needed; ask for less, or stop a sandbox first",
        )

"""Limits of one sandbox and of all sandboxes together, from the service's configuration."""

from collections.abc import Collection, Sequence

from antiphon.sandbox.base import Limits
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.records import SandboxRequest
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
    image = choose_image(config.images, request.image)
    return ShellSandboxConfig(limits=limits, image=image, network=config.network)


def choose_image(images: Sequence[str], wanted: str | None) -> str:
    """Return the docker image of a sandbox; an empty text if the service has none, where `wanted` is only a label.

    Raises:
        RefusedError: `wanted` is not one of the images.
    """
    if not images or wanted is None:
        return images[0] if images else ""
    if wanted not in images:
        raise RefusedError(Reason.INPUT, f"image: {wanted[:200]!r} is not offered here; valid are {', '.join(images)}")
    return wanted


def check_sandboxes(most: int, most_memory: int, live: Collection[int], wanted: int) -> None:
    """Raise `RefusedError` if there is no room for one more sandbox.

    Args:
        most: Maximum number of sandboxes.
        most_memory: MiB that all of them may use together.
        live: Bytes that each of those may use that there are.
        wanted: Bytes that the new one may use.
    """
    if len(live) >= most:
        raise RefusedError(
            Reason.QUOTA, f"{len(live)} sandboxes are open, which is the limit (sandboxes); stop one first"
        )
    free = (most_memory << 20) - sum(live)
    if wanted > free:
        raise RefusedError(
            Reason.QUOTA,
            f"memory: {free >> 20} of the {most_memory} MiB for all sandboxes are free, but {wanted >> 20} are "
            "needed; ask for less, or stop a sandbox first",
        )


def check_environments(most: int, number: int) -> None:
    """Raise `RefusedError` if there is no room for one more environment."""
    if number >= most:
        raise RefusedError(
            Reason.QUOTA, f"{number} environments are open, which is the limit (environments); close one first"
        )


def check_under_way(what: str, number: int, most: int) -> None:
    """Raise `RefusedError` if so many commands, or programs, are under way that there is no room for one more."""
    if number >= most:
        raise RefusedError(
            Reason.QUOTA, f"{number} {what} are under way, which is the limit (commands); try again later"
        )

"""Configuration of sandboxes for untrusted code. Importing this module loads no implementation."""

from typing import Self

from pydantic import Field, model_validator

from antiphon.core.config import Config
from antiphon.sandbox.base import Level, Limits


class LimitsConfig(Config):
    """Resources that one program may use."""

    seconds: float = Field(10.0, gt=0.0)
    """Wall time."""
    cpu_seconds: float = Field(10.0, gt=0.0)
    """Processor time, rounded up to whole seconds."""
    memory: int = Field(512, gt=0)
    """MiB of all its processes together where the kernel can count them so, else of each process."""
    file_size: int = Field(16, gt=0)
    """Maximum MiB of one file that it writes."""
    disk: int = Field(64, gt=0)
    """Maximum MiB of all its files together. Only level 3 enforces it."""
    processes: int = Field(32, gt=0)
    output: int = Field(1024, gt=0)
    """KiB of standard output that it may write, and as many of standard error."""

    @property
    def limits(self) -> Limits:
        """The same limits in seconds and bytes."""
        return Limits(
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
            memory=self.memory << 20,
            file_size=self.file_size << 20,
            disk=self.disk << 20,
            processes=self.processes,
            output=self.output << 10,
        )


class SandboxConfig(Config):
    """Isolation of untrusted code."""

    minimum_level: Level = Level.ISOLATED
    """3: namespaces, Landlock, seccomp and limits; 2: without namespaces; 1: limits alone. A machine that cannot reach the
    minimum runs nothing; one that can do more uses its highest level."""
    packages: tuple[str, ...] = ()
    """Installed distributions that Python programs may import besides the standard library, such as `numpy`."""
    limits: LimitsConfig = LimitsConfig()
    image: str = ""
    """Local docker image. Each program runs in a container of it, with its `python3` and its packages."""
    service: str = ""
    """Address of an `antiphon sandbox serve`, such as `http://127.0.0.1:8080`. Programs run there, with its packages and within
    its limits. The token is read from the environment variable `ANTIPHON_SANDBOX_TOKEN`."""

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.image and self.service:
            raise ValueError("image and service both say where programs run: only one can be given")
        if self.packages and (self.image or self.service):
            raise ValueError(
                "packages applies to this machine only: a docker image and a service have their own packages"
            )
        return self

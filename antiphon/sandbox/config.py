"""Configuration of where untrusted code runs. Importing it imports no machinery."""

from typing import Self

from pydantic import Field, model_validator

from antiphon.core.config import Config
from antiphon.sandbox.base import Level, Limits


class LimitsConfig(Config):
    """What one program may use."""

    seconds: float = Field(10.0, gt=0.0)
    """Wall time."""
    cpu_seconds: float = Field(10.0, gt=0.0)
    """Processor time, rounded up to whole seconds."""
    memory: int = Field(512, gt=0)
    """MiB, of all its processes where the kernel can count them so, else of each."""
    file_size: int = Field(16, gt=0)
    """MiB of the largest file it may write."""
    disk: int = Field(64, gt=0)
    """MiB of all its files together; only level 3 bounds them."""
    processes: int = Field(32, gt=0)
    output: int = Field(1024, gt=0)
    """KiB of standard output that are kept, and as many of standard error."""

    @property
    def limits(self) -> Limits:
        """The same, as backends take it."""
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
    """How untrusted code is kept apart."""

    minimum_level: Level = Level.ISOLATED
    """3: namespaces, Landlock, seccomp and limits; 2: without namespaces; 1: limits alone. A machine that cannot give
    it refuses to run anything; where it can give more, it does."""
    packages: tuple[str, ...] = ()
    """Installed distributions that Python programs may import besides the standard library, as `numpy`."""
    limits: LimitsConfig = LimitsConfig()
    image: str = ""
    """A docker image of this machine: each program runs in a container of it, with its `python3` and its packages."""
    service: str = ""
    """Address of an `antiphon sandbox serve`, as `http://127.0.0.1:8080`: programs run there, with its packages and within its
    limits. Its token is read from the environment variable `ANTIPHON_SANDBOX_TOKEN`."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.image and self.service:
            raise ValueError("image and service name two places for programs to run: only one can be given")
        if self.packages and (self.image or self.service):
            raise ValueError("packages are of this machine: a docker image and a service have their own")
        return self

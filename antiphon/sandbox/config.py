"""Configuration of where untrusted code runs. Importing it imports no machinery."""

from pydantic import Field

from antiphon.config import Config
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

"""The interface of a task in an image, and the verdict on an attempt."""

import base64
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from antiphon.core.errors import DataError
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

# What a shell of a person begins with: images of SWE-bench activate their environment there.
LOGIN = "[ -f ~/.bashrc ] && . ~/.bashrc > /dev/null 2>&1"

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*")

StartContainer = Callable[[], Awaitable[ShellSandbox]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on an attempt."""

    reward: float
    """1 or 0, or what the task's own verifier gives."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Partial figures, by name."""


@dataclass(frozen=True, kw_only=True)
class Instance(ABC):
    """A task in an image of its own, as data: it can be sent and stored."""

    id: str
    image: str
    """Name of the docker image."""
    obtain: str
    """Command that gets the image: it pulls or builds it."""
    instruction: str
    """What the policy is asked to do."""

    def __post_init__(self) -> None:
        if not _IMAGE.fullmatch(self.image):
            raise DataError(f"task {self.id}: {self.image!r} is not the name of an image", column="image")

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables beside those of the image."""
        return {}

    @property
    def memory(self) -> int:
        """MiB that the task asks for; 0 if it does not say."""
        return 0

    @property
    @abstractmethod
    def test_seconds(self) -> float:
        """Time limit of the tests."""

    @property
    def login(self) -> str:
        """Script that a shell begins with."""
        return LOGIN

    async def prepare(self, session: Session) -> str:
        """Make a new container ready for an attempt; return what `grade` must know of its state."""
        return ""

    @abstractmethod
    async def grade(
        self, box: ShellSandbox, session: Session, state: str, start: StartContainer, seconds: float
    ) -> Verdict:
        """Run the hidden tests on what an attempt left.

        Args:
            box: The attempt's container.
            session: The attempt's shell.
            state: What `prepare` returned.
            start: Starts a new container of the same image.
            seconds: Time limit of the tests. If it is reached, the verdict is 0.

        Raises:
            SandboxError: A container was lost, or the tests gave no verdict. It is no verdict either.
        """

    @abstractmethod
    def solution(self) -> str:
        """Return a command that solves the task as published; `DataError` if no solution was published."""


def heredoc(command: str, text: str) -> str:
    """Return a command that gives `text` to another one as its standard input; it fits into a block of a response."""
    if "```" in text:
        return f"base64 -d <<< {base64.b64encode(text.encode()).decode()} | {command}"
    end = f"END_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return f"{command} <<'{end}'\n{text}{'' if text.endswith(chr(10)) else chr(10)}{end}"

"""Records of the service's sandboxes: the request, the state and its history, and the resources in use."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from antiphon.sandbox.service.commits import Commit
from antiphon.sandbox.service.terminals import Terminal
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.files import SandboxFiles
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

LONGEST_HISTORY = 100


class State(StrEnum):
    """State of a sandbox."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPED = "stopped"
    DELETED = "deleted"

    @property
    def live(self) -> bool:
        """True while a sandbox counts against the service's quotas."""
        return self in (State.PENDING, State.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRequest:
    """Properties that a client asks for. The service grants each up to its own limit."""

    sandbox_id: str | None = None
    image: str | None = None
    """One of the service's docker images, or only a label if it has none; None stands for its first."""
    memory: int | None = None
    """Bytes."""
    disk: int | None = None
    """Bytes."""
    idle_seconds: float | None = None
    """Time without a request after which it is stopped."""
    start_seconds: float | None = None
    keep_seconds: float | None = None
    """Time that its work directory is kept after it has been stopped."""
    cpus: float | None = None
    """Recorded only: sandboxes share the processors."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Recorded only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One line of a sandbox's history."""

    before: str
    after: State
    event: str
    at: float
    """Seconds since 1970."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sandbox:
    """One sandbox, and its resources while it runs."""

    id: str
    request: SandboxRequest
    backend_config: ShellSandboxConfig
    state: State = State.PENDING
    failure: str = ""
    """Reason that it did not start, or ended; empty if there is none."""
    history: list[Transition] = field(default_factory=list)
    used: float = 0.0
    """Time of the last request, by the clock of the event loop."""
    busy: int = 0
    """Number of commands under way."""
    commands: int = 0
    """Number of commands so far."""
    backend: ShellSandbox | None = None
    """The sandbox itself; None unless it runs."""
    files: SandboxFiles | None = None
    sessions: dict[str, Session] = field(default_factory=dict)
    terminals: dict[str, Terminal] = field(default_factory=dict)
    """Programs that run in a terminal, by the name of their session."""
    spare: list[Session] = field(default_factory=list)
    """Unnamed sessions, for commands without a session."""
    starting: "asyncio.Task[None] | None" = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is stopped, deleted or restarted."""
    commit: Commit | None = None
    """The commit that its work directory begins with."""
    committed: tuple[str, float, float] | None = None
    """The last commit made of it: its name, and when it began and ended, in seconds since 1970."""
    snapshot: Path | None = None
    """The saved work directory of a stopped sandbox."""

    @property
    def image(self) -> str | None:
        """The commit or the docker image that it was started with, or else the label that its client gave."""
        return self.commit.tag if self.commit else self.backend_config.image or self.request.image

    @property
    def live(self) -> bool:
        """True while it counts against the service's quotas."""
        return self.state.live

    def enter(self, state: State, event: str) -> None:
        """Change the state and record the transition."""
        line = Transition(
            before=self.history[-1].after if self.history else "", after=state, event=event, at=time.time()
        )
        self.history = [*self.history[1 - LONGEST_HISTORY :], line]
        self.state = state

    def since(self, state: State) -> float | None:
        """Return when it last entered this state, in seconds since 1970; None if never."""
        return next((line.at for line in reversed(self.history) if line.after is state), None)

"""One sandbox of the service: what was asked for, what it holds, and what became of it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.files import SandboxFiles
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

LONGEST_HISTORY = 100


class State(StrEnum):
    """Of a sandbox."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPED = "stopped"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a sandbox is to be. Of each it is given what the service allows, where that is less."""

    sandbox_id: str | None = None
    memory: int | None = None
    """Bytes."""
    disk: int | None = None
    """Bytes."""
    idle_seconds: float | None = None
    """After so long without a request it is stopped."""
    start_seconds: float | None = None
    keep_seconds: float | None = None
    """How long its work directory is kept after it has been stopped."""
    cpus: float | None = None
    """Noted only: sandboxes share the processors."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Noted only."""


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
    """One sandbox, and what it holds while it runs."""

    id: str
    wish: Wish
    box_config: ShellSandboxConfig
    state: State = State.PENDING
    failure: str = ""
    """Why it did not start, or ended."""
    history: list[Transition] = field(default_factory=list)
    used: float = 0.0
    """When it was last asked for something, by the clock of the event loop."""
    busy: int = 0
    """Commands under way."""
    commands: int = 0
    """So far."""
    box: ShellSandbox | None = None
    files: SandboxFiles | None = None
    sessions: dict[str, Session] = field(default_factory=dict)
    spare: list[Session] = field(default_factory=list)
    """Of no one, for commands without a session."""
    starting: "asyncio.Task[None] | None" = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever stops, deletes or restarts it."""
    snapshot: Path | None = None

    @property
    def live(self) -> bool:
        """Whether it counts against what there may be."""
        return self.state in (State.PENDING, State.RUNNING)

    def enter(self, state: State, event: str) -> None:
        """Change the state, and note it."""
        line = Transition(
            before=self.history[-1].after if self.history else "", after=state, event=event, at=time.time()
        )
        self.history = [*self.history[1 - LONGEST_HISTORY :], line]
        self.state = state

    def since(self, state: State) -> float | None:
        """When it last entered this state, in seconds since 1970; None if never."""
        return next((line.at for line in reversed(self.history) if line.after is state), None)

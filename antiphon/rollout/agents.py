"""Agents: programs of others that play an attempt, and ask the policy as they would ask any model.

An agent is told where the model is and what to do; of us it knows nothing. What it says is captured at the gateway. That
it crashes, or is late, is a `Failure` of the attempt, never a score.
"""

import asyncio
import inspect
import json
import os
import signal
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from antiphon.core.config import environment
from antiphon.core.deadlines import Deadlines, fail, succeed
from antiphon.core.errors import ConfigError, SandboxError, StallError, UnsupportedError
from antiphon.core.types import AttemptId, Failure, PolicyVersion, Prompt, Sampling
from antiphon.rollout.gateway.attempt_session import CapturedAttempt
from antiphon.rollout.gateway.server import Gateway
from antiphon.sandbox.base import Status
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon.tasks.base import Transcript

TASK_VARIABLE = "ANTIPHON_TASK"
KEPT = 1 << 16  # bytes of an agent's output that are kept, the last
LONGEST = 86_400.0  # seconds that a box gives a command; who plays the attempt is less patient
INHERITED = ("PATH", "HOME", "LANG", "TMPDIR")  # variables that a command gets of ours


@dataclass(frozen=True, slots=True)
class Access:
    """Where an agent finds the model, and with which key."""

    address: str
    key: str

    @property
    def base_url(self) -> str:
        """For clients of OpenAI's protocol, and of Anthropic's, see `Gateway.app`."""
        return f"{self.address}/v1"

    def environment(self, prompt: Prompt) -> Mapping[str, str]:
        """Variables that clients read by themselves, and the task. What only graders may know is not in it."""
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        task = {"id": prompt.id, "task": prompt.task, "messages": messages, "seed": prompt.seed}
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.address,
            "ANTHROPIC_API_KEY": self.key,
            TASK_VARIABLE: json.dumps(task),
        }


class Agent(Protocol):
    """Plays one attempt; returns whatever it comes to. `AgentError`, or any other exception, if it comes to nothing."""

    async def __call__(self, access: Access, prompt: Prompt) -> Any:
        """Play. Cancelling this ends the agent."""


class AgentError(Exception):
    """An agent says, or shows, that it has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt of an agent ended."""

    result: Any
    """What the agent returned, or wrote to stdout; None if it failed."""
    failure: Failure | None
    captured: CapturedAttempt
    seconds: float

    @property
    def transcript(self) -> Transcript:
        """What a reward sees: the conversation that was added to last, and the turns of all."""
        turns = [turn for segment in self.captured.segments for turn in segment.turns]
        return Transcript(self.captured.messages, turns, self.captured.truncated, self.result)

    @property
    def measures(self) -> dict[str, float]:
        """What the agent did with the conversation."""
        counts = self.captured.counts
        names = ("turns", "forks", "retries", "cancelled", "rerendered", "unreadable_calls")
        return {"samples": float(len(self.captured.segments))} | {name: float(getattr(counts, name)) for name in names}


async def run_agent(
    agent: Agent,
    gateway: Gateway,
    prompt: Prompt,
    attempt: AttemptId,
    started: PolicyVersion,
    sampling: Sampling,
    *,
    seconds: float,
    priority: int = 0,
    max_turns: int = 0,
) -> Outcome:
    """Let an agent play one attempt, for at most so many seconds and replies (0: any number). The named boundary at which its
    errors become data; those of the engines are raised."""
    loop = asyncio.get_running_loop()
    began, result, failure = loop.time(), None, None
    key = gateway.open_attempt(prompt, attempt, started, sampling, priority=priority, max_turns=max_turns)
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            result = await agent(Access(gateway.address, key), prompt)
    except (ConfigError, UnsupportedError):  # it can never work
        raise
    except (SandboxError, StallError) as error:
        failure = Failure(source="environment", message=str(error))
    except Exception as error:  # noqa: BLE001 - whatever an agent raises is data
        late = f"took more than {seconds:g} s" if limit.expired() else ""
        said = str(error) if isinstance(error, AgentError) else f"{type(error).__name__}: {error}"
        failure = Failure(source="agent", message=late or said)
    finally:
        captured = gateway.close_attempt(key)
    if captured.error is not None:
        raise captured.error
    if failure is None and not captured.segments:
        failure = Failure(source="agent", message="it ended without having asked the model")
    return Outcome(result=result, failure=failure, captured=captured, seconds=loop.time() - began)


# --- kinds of agents ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """A function `agent(base_url, api_key, prompt) -> result`, plain or `async`. A plain one gets a thread of its own, which
    nothing can end: when its time is up its key no longer works, and what it returns is dropped."""

    function: Callable[[str, str, Prompt], Any]

    async def __call__(self, access: Access, prompt: Prompt) -> Any:
        """See `Agent`."""
        if inspect.iscoroutinefunction(self.function):
            return await self.function(access.base_url, access.key, prompt)
        return await _in_thread(self.function, access.base_url, access.key, prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxedAgent:
    """A shell command in a box of its own, from which nothing but the gateway, and what `config` allows, can be reached.
    Its clients have to honour `http_proxy`, as all do by default."""

    command: str
    rooms: RuntimeDirs
    deadlines: Deadlines
    config: ShellSandboxConfig = field(default_factory=ShellSandboxConfig)

    async def __call__(self, access: Access, prompt: Prompt) -> str:
        """See `Agent`."""
        config = replace(
            self.config,
            network=(*self.config.network, urlsplit(access.address).netloc),
            environment={**self.config.environment, **access.environment(prompt)},
        )
        async with await ShellSandbox.start(self.rooms, config, self.deadlines) as box:
            session = Session(box)
            try:
                result = await session.run(self.command, seconds=LONGEST, output=KEPT)
            finally:
                session.close()
        if result.status is Status.REFUSED:
            raise SandboxError(result.detail)
        if result.status not in (Status.OK, Status.OUTPUT_LIMIT):
            raise AgentError(_ending(f"status {result.status}, exit code {result.exit_code}", result.stderr))
        return result.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class UnconfinedAgent:
    """A shell command of this machine, with all that its user may do: only for programs, and policies, that are trusted."""

    command: str

    async def __call__(self, access: Access, prompt: Prompt) -> str:
        """See `Agent`. When it ends, so does all that it started and that has not left its process group."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = await asyncio.create_subprocess_shell(
                self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**environment(*INHERITED), **access.environment(prompt)},
                start_new_session=True,
            )
            try:
                code = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if code:
                raise AgentError(_ending(f"exit code {code}", _last(err)))
            return _last(out)


def command_agent(
    command: str,
    *,
    rooms: RuntimeDirs | None = None,
    deadlines: Deadlines | None = None,
    config: ShellSandboxConfig | None = None,
    unconfined: bool = False,
) -> Agent:
    """An agent that is a shell command. `ConfigError` unless there are `rooms` for a box, or it may run `unconfined`."""
    if rooms is not None:
        return BoxedAgent(
            command=command, rooms=rooms, deadlines=deadlines or Deadlines(), config=config or ShellSandboxConfig()
        )
    if not unconfined:
        raise ConfigError(
            f"agent {command!r} would run on this machine with all that you may do; give it a sandbox, or say that it may "
            "run unconfined"
        )
    return UnconfinedAgent(command=command)


def _in_thread(function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
    """The result of a function that runs in a thread of its own: a pool would make agents wait for one another."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            tell, value = succeed, function(*args)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is told to who waits
            tell, value = fail, error  # type: ignore[assignment]
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, ended, value)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return ended


def _last(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - KEPT))
    return file.read().decode("utf-8", "replace")


def _ending(what: str, stderr: str) -> str:
    """How it ended, and the last line that it wrote of why."""
    lines = stderr.strip().splitlines()
    return f"{what}: {lines[-1][:500]}" if lines else what

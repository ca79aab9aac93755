"""Agents: programs that run an attempt, and call the policy as they would call any model.

An agent gets the address of the model and the task; it needs nothing of this library. The gateway records its conversation. A
crash or a time-out of the agent is a `Failure` of the attempt, never a score.
"""

import asyncio
import inspect
import json
import os
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
from antiphon.core.processes.child import start_child
from antiphon.core.types import Failure, Prompt
from antiphon.core.user_errors import describe_error
from antiphon.rollout.attempt import AttemptInputs
from antiphon.rollout.gateway.attempt_session import CapturedAttempt
from antiphon.rollout.gateway.server import Gateway
from antiphon.sandbox.base import Status
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon.tasks.base import Transcript

TASK_VARIABLE = "ANTIPHON_TASK"
MOST_OF_A_VARIABLE = 120_000  # characters: Linux starts no program with a variable of 128 KiB
MAX_OUTPUT = 1 << 16  # last bytes of an agent's output that are kept
MAX_SECONDS = 86_400.0  # time limit of a command in a box; that of the attempt is shorter
INHERITED = ("PATH", "HOME", "LANG", "TMPDIR")  # environment variables that a command inherits


@dataclass(frozen=True, slots=True)
class Access:
    """Address of the model and key for it."""

    address: str
    key: str

    @property
    def base_url(self) -> str:
        """Address for clients of OpenAI's protocol and of Anthropic's."""
        return f"{self.address}/v1"

    def environment(self, prompt: Prompt) -> Mapping[str, str]:
        """Return environment variables that clients read, and the task; `AgentError` if that is too long for a variable."""
        if len(task := describe_task(prompt)) > MOST_OF_A_VARIABLE:
            reason = f"the task has {len(task):,} characters, such as those of images"
            raise AgentError(f"{reason}; the variable of a command holds {MOST_OF_A_VARIABLE:,}")
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.address,
            "ANTHROPIC_API_KEY": self.key,
            TASK_VARIABLE: task,
        }


def describe_task(prompt: Prompt) -> str:
    """Return the task as JSON, without what only graders may know."""
    messages = [message.to_openai() for message in prompt.messages]
    return json.dumps({"id": prompt.id, "task": prompt.task, "messages": messages, "seed": prompt.seed})


class Agent(Protocol):
    """Runs one attempt and returns any result; raises `AgentError`, or any other exception, if it fails."""

    async def __call__(self, access: Access, prompt: Prompt) -> Any:
        """Run the attempt. Cancelling this ends the agent."""


class AgentError(Exception):
    """An agent has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of an agent's attempt."""

    result: Any
    """The agent's return value or stdout; None if it failed."""
    failure: Failure | None
    captured: CapturedAttempt
    seconds: float

    @property
    def transcript(self) -> Transcript:
        """The transcript for a reward: the conversation that was answered last, and the turns of all."""
        turns = [turn for segment in self.captured.segments for turn in segment.turns]
        return Transcript(self.captured.messages, turns, self.captured.truncated, self.result)

    @property
    def measures(self) -> dict[str, float]:
        """Counts of what the agent did with the conversation."""
        counts = self.captured.counts
        names = ("turns", "forks", "retries", "cancelled", "rerendered", "unreadable_calls")
        return {"samples": float(len(self.captured.segments))} | {name: float(getattr(counts, name)) for name in names}


async def run_agent(
    agent: Agent,
    gateway: Gateway,
    inputs: AttemptInputs,
    *,
    seconds: float,
    max_turns: int = 0,
) -> Outcome:
    """Let an agent run one attempt. This is the named boundary at which its errors become data; those of engines are raised.

    Args:
        agent: The agent.
        gateway: Serves the model to it.
        inputs: Inputs of the attempt.
        seconds: Time limit.
        max_turns: Most replies; 0 means no limit.
    """
    loop = asyncio.get_running_loop()
    began, result, failure = loop.time(), None, None
    key = gateway.open_attempt(inputs, max_turns=max_turns)
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            result = await agent(Access(gateway.address, key), inputs.prompt)
    except (ConfigError, UnsupportedError):  # it can never work
        raise
    except (SandboxError, StallError) as error:
        failure = Failure(source="environment", message=str(error))
    except Exception as error:  # noqa: BLE001 - whatever an agent raises is data
        late = f"took more than {seconds:g} s" if limit.expired() else ""
        said = str(error) if isinstance(error, AgentError) else describe_error(error, agent)
        failure = Failure(source="agent", message=late or said)
    finally:
        captured = gateway.close_attempt(key)
    if captured.error is not None:
        raise captured.error
    if failure is None and not captured.segments:
        failure = Failure(source="agent", message="it ended without a request to the model")
    return Outcome(result=result, failure=failure, captured=captured, seconds=loop.time() - began)


# --- kinds of agents ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """A function `agent(base_url, api_key, prompt) -> result`, plain or `async`.

    A plain function runs in a thread of its own, which cannot be ended: when its time is up its key no longer works, and its
    result is dropped.
    """

    function: Callable[[str, str, Prompt], Any]

    async def __call__(self, access: Access, prompt: Prompt) -> Any:
        """Run the attempt."""
        if inspect.iscoroutinefunction(self.function):
            return await self.function(access.base_url, access.key, prompt)
        return await _in_thread(self.function, access.base_url, access.key, prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxedAgent:
    """A shell command in a sandbox of its own that can reach the gateway, and what `config` allows, and nothing else.

    Its clients have to honour `http_proxy`, as all do by default.
    """

    command: str
    rooms: RuntimeDirs
    deadlines: Deadlines
    config: ShellSandboxConfig = field(default_factory=ShellSandboxConfig)

    async def __call__(self, access: Access, prompt: Prompt) -> str:
        """Run the attempt."""
        config = replace(
            self.config,
            network=(*self.config.network, urlsplit(access.address).netloc),
            environment={**self.config.environment, **access.environment(prompt)},
        )
        async with await ShellSandbox.start(self.rooms, config, self.deadlines) as box:
            session = Session(box)
            try:
                result = await session.run(self.command, seconds=MAX_SECONDS, output=MAX_OUTPUT)
            finally:
                session.close()
        if result.status is Status.REFUSED:
            raise SandboxError(result.detail)
        if result.status not in (Status.OK, Status.OUTPUT_LIMIT):
            raise AgentError(describe_end(f"status {result.status}, exit code {result.exit_code}", result.stderr))
        return result.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class UnconfinedAgent:
    """A shell command on this machine with all rights of its user: only for trusted programs and policies."""

    command: str

    async def __call__(self, access: Access, prompt: Prompt) -> str:
        """Run the command; when it ends, kill what is left of its process group."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = start_child(
                ["/bin/sh", "-c", self.command],
                environment={**environment(*INHERITED), **access.environment(prompt)},
                stdout=out,
                stderr=err,
                own_session=True,
            )
            try:
                await child.wait()
            finally:
                child.kill()
                await child.wait()
            if child.exit_code:
                raise AgentError(describe_end(f"exit code {child.exit_code}", _read_end(err)))
            return _read_end(out)


def command_agent(
    command: str,
    *,
    rooms: RuntimeDirs | None = None,
    deadlines: Deadlines | None = None,
    config: ShellSandboxConfig | None = None,
    unconfined: bool = False,
) -> Agent:
    """Return an agent that is a shell command.

    Raises:
        ConfigError: If there are no `rooms` for a sandbox, and it may not run `unconfined`.
    """
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
    """Run a function in a thread of its own: in a pool, agents would wait for one another."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            tell, value = succeed, function(*args)
        except BaseException as error:  # noqa: BLE001 - passed on to the awaiting task
            tell, value = fail, error  # type: ignore[assignment]
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, ended, value)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return ended


def _read_end(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT))
    return file.read().decode("utf-8", "replace")


def describe_end(what: str, stderr: str) -> str:
    """Describe how a command ended, with the last line of its stderr."""
    lines = stderr.strip().splitlines()
    return f"{what}: {lines[-1][:500]}" if lines else what

"""Terminals of a session: programs that a client talks to line by line, such as an interpreter or a debugger."""

import asyncio
import codecs
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import regex

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import SandboxError
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon.sandbox.sessions.streams import ProgramStream, run_in_terminal

SEARCH_SECONDS = 2.0  # for all searches of a request in what a program has said

# What moves a cursor or colours text, and other characters that a terminal does not show.
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f]")
_SEARCHES = ThreadPoolExecutor(2, "expect")  # of their own: a client's pattern may take long
_RUNNING: set["asyncio.Task[None]"] = set()  # the event loop itself would not keep them


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Output of a program in answer to a line."""

    output: str
    """The text before the match, or to the end of the program."""
    match: str | None = None
    """The text that a pattern has matched; None if the program has ended, or neither happened in time."""
    ended: bool = False
    """True if the program has ended."""
    exit_code: int | None = None
    """Of the program; None if it has not ended, or was killed."""


def compile_patterns(patterns: Sequence[str]) -> "regex.Pattern[str] | None":
    """Return a regular expression that finds what one of the patterns matches; None if there are none.

    Raises:
        RefusedError: One is not a regular expression, or is too large.
    """
    try:
        return regex.compile("|".join(f"(?:{pattern})" for pattern in patterns), regex.DOTALL) if patterns else None
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        reason = str(error) if isinstance(error, regex.error) else "it is too large"
        raise RefusedError(Reason.INPUT, f"expect: not a regular expression: {reason}") from error


def _search(wanted: "regex.Pattern[str]", text: str) -> "tuple[regex.Match[str] | None, float]":
    """Return what is found, and the seconds of processor time that it took."""
    began = time.thread_time()
    try:
        found = wanted.search(text, timeout=SEARCH_SECONDS, concurrent=True)
    except TimeoutError:
        return None, SEARCH_SECONDS
    return found, time.thread_time() - began


class Terminal:
    """A program that runs in a terminal. It takes the session until it ends, and ends with the session."""

    def __init__(self, sandbox: ShellSandbox, session: Session, command: str, seconds: float, keep: int) -> None:
        """Start a command.

        Args:
            sandbox: Where the session is.
            session: Has its directory and variables.
            command: A line for a shell.
            seconds: Its deadline.
            keep: Characters that are kept of what it has said since the last line.
        """
        self._line = command
        self._keep = keep
        self._said = ""
        self._changed = asyncio.Event()
        self._stream: asyncio.Future[ProgramStream] = asyncio.get_running_loop().create_future()
        self._exit_code: int | None = None
        self.ended = False
        task = asyncio.create_task(self._run(run_in_terminal(sandbox, session, command, seconds)))
        _RUNNING.add(task)
        task.add_done_callback(_RUNNING.discard)

    async def _run(self, opening: AbstractAsyncContextManager[ProgramStream]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            async with opening as stream:
                succeed(self._stream, stream)
                while content := await stream.receive():
                    self._said = (self._said + decoder.decode(content))[-self._keep :]
                    self._changed.set()
                self._exit_code = (await stream.running).exit_code
        except SandboxError as error:
            fail(self._stream, error)
        finally:
            fail(self._stream, SandboxError("the program in the terminal has ended"))
            self.ended = True
            self._changed.set()

    async def talk(self, line: str | None, wanted: "regex.Pattern[str] | None", seconds: float) -> Reply:
        """Send a line to the program, and wait until it has said what a pattern matches, or has ended.

        Args:
            line: The line; None for a program that has just been started. What the program has said before is forgotten.
            wanted: From `compile_patterns`.
            seconds: Time limit. When it is over, the program goes on.

        Raises:
            RefusedError: The searches take too long, or the program has ended before it could read the line.
            SandboxError: The session has ended.
        """
        try:
            async with asyncio.timeout(seconds):
                stream = await asyncio.shield(self._stream)
                if line is not None:
                    self._line, self._said = line, ""
                    await self._send(stream, f"{line}\n".encode())
                return await self._wait_for(wanted)
        except TimeoutError:
            return Reply(output=self._clean(self._said))

    async def _send(self, stream: ProgramStream, content: bytes) -> None:
        try:
            await stream.send(content)
        except ConnectionError as error:
            raise RefusedError(Reason.STATE, "the program in the terminal has ended") from error

    async def _wait_for(self, wanted: "regex.Pattern[str] | None") -> Reply:
        loop, left = asyncio.get_running_loop(), SEARCH_SECONDS
        while True:
            self._changed.clear()
            said, ended, found = self._said, self.ended, None
            if wanted is not None:
                found, used = await loop.run_in_executor(_SEARCHES, _search, wanted, said)
                left -= used
            if found is not None:
                return Reply(output=self._clean(said[: found.start()]), match=found[0])
            if ended:
                return Reply(output=self._clean(said), ended=True, exit_code=self._exit_code)
            if left <= 0:
                raise RefusedError(Reason.INPUT, f"expect: the searches take more than {SEARCH_SECONDS:g} s")
            await self._changed.wait()

    def _clean(self, text: str) -> str:
        """Return the text without what a terminal does not show, and without the line that it repeats."""
        text = _CONTROL.sub("", text.replace("\r\n", "\n")).strip()
        return text.removeprefix(self._line).strip()

"""Terminals of a session: programs that a client talks to line by line, such as an interpreter or a debugger."""

import asyncio
import codecs
import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import regex

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import SandboxError
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon.sandbox.sessions.streams import ProgramStream, run_in_terminal

SEARCH_SECONDS = 1.0  # for one search of a client's patterns in what a program has said

# What moves a cursor or colours text, and other characters that a terminal does not show.
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a program has said to a line."""

    output: str
    """The text before the match, or to the end of the program."""
    match: str | None
    """The text that a pattern has matched; empty if the program has ended, None if neither happened in time."""
    exit_code: int | None = None
    """Of the program, if it has ended."""


class Terminal:
    """A program that runs in a terminal. It takes the session until it ends."""

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
        self._task = asyncio.create_task(self._run(run_in_terminal(sandbox, session, command, seconds)))

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
            self.ended = True
            self._changed.set()

    async def send(self, line: str) -> None:
        """Send a line to the program, and forget what it has said before."""
        self._line, self._said = line, ""
        try:
            await (await asyncio.shield(self._stream)).send(f"{line}\n".encode())
        except ConnectionError as error:
            raise RefusedError(Reason.STATE, "the program in the terminal has ended") from error

    async def reply(self, patterns: Sequence[str], seconds: float) -> Reply:
        """Wait until the program has said what one of the patterns matches, or has ended.

        Args:
            patterns: Regular expressions.
            seconds: Time limit.

        Raises:
            RefusedError: A pattern is invalid, or takes too long.
        """
        try:
            wanted = regex.compile("|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)", regex.DOTALL)
        except regex.error as error:
            raise RefusedError(Reason.INPUT, f"expect: not a regular expression: {error}") from error
        try:
            async with asyncio.timeout(seconds):
                return await self._wait_for(wanted)
        except TimeoutError:
            return Reply(output=self._clean(self._said), match=None)

    async def _wait_for(self, wanted: "regex.Pattern[str]") -> Reply:
        await asyncio.shield(self._stream)
        while True:
            self._changed.clear()
            if (found := self._search(wanted)) is not None:
                return Reply(output=self._clean(self._said[: found.start()]), match=found[0])
            if self.ended:
                return Reply(output=self._clean(self._said), match="", exit_code=self._exit_code)
            await self._changed.wait()

    def _search(self, wanted: "regex.Pattern[str]") -> "regex.Match[str] | None":
        try:
            return wanted.search(self._said, timeout=SEARCH_SECONDS)
        except TimeoutError as error:
            raise RefusedError(Reason.INPUT, f"expect: the search takes more than {SEARCH_SECONDS:g} s") from error

    def _clean(self, text: str) -> str:
        """Return the text without what a terminal does not show, and without the line that it repeats."""
        text = _CONTROL.sub("", text.replace("\r\n", "\n")).strip()
        return text.removeprefix(self._line).strip()

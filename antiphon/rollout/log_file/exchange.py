"""The run's side of the log file: it reads requests in the sandbox, asks the gateway, and appends the responses.

    agent -- HTTP --> model service --> log file --> exchange -- HTTP --> gateway --> engines
                      (in the sandbox)               (here)

The agent may write anything to the file, and may replace the programs in its sandbox. All that comes from there is therefore
parsed as data of bounded size, and all that it can bring about is requests to the gateway with its own key: at most
`MOST_IN_FLIGHT` at once, and read at most once in `ROUND_SECONDS`.
"""

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from antiphon.core.errors import SandboxError, first_error
from antiphon.rollout.agents import Access, AgentError
from antiphon.rollout.log_file import model_service
from antiphon.rollout.log_file.model_service import CANCELLED, REQUEST, RESPONSE, SESSION_END, LineSplitter
from antiphon.sandbox.base import CommandSandbox, Execution

MOST_IN_FLIGHT = 32  # model calls that are under way, or whose responses are not written yet
ROUND_SECONDS = 0.05  # at least from one reading of the log file to the next
READ_SECONDS = 10.0  # that a reading waits for something to be appended
COMMAND_SECONDS = 60.0  # for a command of the program to end, beyond its wait


@dataclass(frozen=True, slots=True)
class LogFileSandbox:
    """The program `model_service` in a sandbox."""

    sandbox: CommandSandbox
    program: str
    """Its path in the sandbox."""
    directory: str
    """The directory of the log file."""

    async def run(self, command: str, *arguments: str, seconds: float = 0.0) -> Execution:
        """Run a command of the program that waits at most so many seconds."""
        line = ["python3", "-I", self.program, command, self.directory, *arguments]
        return await self.sandbox.execute(line, seconds + COMMAND_SECONDS)

    async def query(self, command: str, *arguments: str, seconds: float = 0.0) -> Mapping[str, Any]:
        """Run a command, and return what it prints.

        Raises:
            SandboxError: It prints no JSON object, or fails.
        """
        done = await self.run(command, *arguments, seconds=seconds)
        try:
            fields = json.loads(done.stdout)
        except (ValueError, RecursionError):
            fields = None
        if done.exit_code or not isinstance(fields, dict):
            raise SandboxError(
                f"the model service in the sandbox: {command}: {done.stderr[-500:] or done.stdout[:100]!r}"
            )
        return fields

    async def append(self, lines: str) -> None:
        """Append lines to the log file."""
        await self.sandbox.write(f"{self.directory}/responses", lines)
        done = await self.run("append", "responses")
        if done.exit_code:
            raise SandboxError(f"the model service in the sandbox: append: {done.stderr[-500:]}")


async def answer_requests(box: LogFileSandbox, access: Access) -> int:
    """Answer the model calls of an agent until it ends; return its exit code.

    Consumes the log file; waits for lines, for replies and for places among `MOST_IN_FLIGHT`; ends with the line in which the
    model service reports the end of the agent, and then cancels what is under way.

    Raises:
        AgentError: The model service has ended before the agent.
        SandboxError: The sandbox is lost.
    """
    async with httpx.AsyncClient(headers={"x-api-key": access.key}, timeout=None, trust_env=False) as client:
        exchange = _Exchange(box, client, f"{access.base_url}/chat/completions")
        try:
            async with asyncio.TaskGroup() as owner:
                return await exchange.run(owner)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors


class _Exchange:
    def __init__(self, box: LogFileSandbox, client: httpx.AsyncClient, address: str) -> None:
        self._box = box
        self._client = client
        self._address = address
        self._places = asyncio.Semaphore(MOST_IN_FLIGHT)
        self._calls: dict[int, asyncio.Task[None] | None] = {}  # None once it has ended: each index is answered once
        self._responses: asyncio.Queue[str] = asyncio.Queue()
        self._lines = LineSplitter()
        self._position = 0  # bytes of the log file that were read

    async def run(self, owner: asyncio.TaskGroup) -> int:
        """Read the log file until the agent has ended; return its exit code."""
        loop = asyncio.get_running_loop()
        writer = owner.create_task(self._write_responses())
        try:
            while True:
                begun = loop.time()
                content, running = await self._read()
                for line in self._lines.split(content):
                    if (code := model_service.parse_number(line, SESSION_END, "exit_code")) is not None:
                        return code
                    await self._handle(line, owner)
                if not content and not running:
                    raise AgentError(await self._describe_loss())
                await asyncio.sleep(begun + ROUND_SECONDS - loop.time())
        finally:
            for task in (writer, *self._calls.values()):
                if task is not None:
                    task.cancel()

    async def _read(self) -> tuple[bytes, bool]:
        """Return what was appended, and False if the model service runs no more."""
        arguments = (str(self._position), str(READ_SECONDS))
        fields = await self._box.query("read", *arguments, seconds=READ_SECONDS)
        match fields:
            case {"begin": int(begin), "content": str(text), "running": bool(running)} if begin in (0, self._position):
                content = _decode(text)
            case _:
                raise SandboxError(f"the model service in the sandbox reports no part of its log: {str(fields)[:100]}")
        if begin != self._position:  # ROCK's service starts, and begins a new file
            self._lines.clear()
            self._forget_calls()
        self._position = begin + len(content)
        return content, running

    def _forget_calls(self) -> None:
        for task in self._calls.values():
            if task is not None:
                task.cancel()
        self._calls.clear()

    async def _handle(self, line: str, owner: asyncio.TaskGroup) -> None:
        """Begin a call, or cancel one; ignore any other line."""
        if (number := model_service.parse_number(line, CANCELLED, "index")) is not None:
            if (task := self._calls.get(number)) is not None:
                task.cancel()
        elif (found := model_service.parse_line(REQUEST, line)) is not None and found[1] not in self._calls:
            await self._places.acquire()
            body, index, _ = found
            task = self._calls[index] = owner.create_task(self._answer(index, body))
            task.add_done_callback(lambda task: self._on_done(index, task))

    def _on_done(self, index: int, task: "asyncio.Task[None]") -> None:
        if self._calls.get(index) is task:
            self._calls[index] = None
        if task.cancelled():
            self._places.release()

    async def _answer(self, index: int, body: Any) -> None:
        """Have the gateway answer one request. Streams are for the model service to make, of the whole response."""
        try:
            content = json.dumps({**body, "stream": False})
        except (TypeError, ValueError, RecursionError):
            content = ""
        answer = await self._client.post(self._address, content=content.encode("ascii"))
        meta = {"timestamp": int(time.time() * 1000), "index": index, "status": answer.status_code}
        line = model_service.format_line(RESPONSE, answer.json(), meta)
        if len(line) > model_service.LONGEST_LINE:
            body = model_service.make_error(502, f"the response is larger than {model_service.LONGEST_LINE} bytes")
            line = model_service.format_line(RESPONSE, body, {**meta, "status": 502})
        self._responses.put_nowait(line)

    async def _write_responses(self) -> None:
        """Append responses, together those that have come while others were appended."""
        while True:
            lines = [await self._responses.get()]
            while not self._responses.empty():
                lines.append(self._responses.get_nowait())
            await self._box.append("".join(lines))
            for _ in lines:
                self._places.release()

    async def _describe_loss(self) -> str:
        errors = (await read_output(self._box))[model_service.ERRORS].strip().splitlines()
        return f"the model service in its sandbox has ended before it: {errors[-1][:500] if errors else 'killed'}"


async def read_output(box: LogFileSandbox) -> Mapping[str, str]:
    """Return the end of what the agent and the model service have written, by `STDOUT`, `STDERR` and `ERRORS`."""
    fields = await box.query("output")
    names = (model_service.STDOUT, model_service.STDERR, model_service.ERRORS)
    texts = {name: _decode(str(fields.get(name, ""))) for name in names}
    return {name: text[-model_service.MOST_OUTPUT :].decode("utf-8", "replace") for name, text in texts.items()}


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise SandboxError(f"the model service in the sandbox reports no base64: {error}") from error

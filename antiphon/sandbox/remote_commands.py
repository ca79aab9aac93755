"""A client that runs commands in a sandbox of a service: of `antiphon sandbox serve`, or of an admin of ROCK.

Both have the same routes, of which it uses those that start and stop a sandbox, run a command and write a file.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx

from antiphon.core.config import read_secret
from antiphon.core.errors import SandboxError
from antiphon.sandbox.base import TOKEN_VARIABLE, CommandSandbox, Execution

PATH = "/apis/envs/sandbox/v1"
IDLE_MINUTES = 5  # after which the service stops a sandbox whose client has died
START_SECONDS = 600.0  # for a sandbox to start, and for a place at the service to become free
START_PAUSES = 0.2, 5.0  # seconds between two questions whether it has started: at first, and at most
PATIENCE_SECONDS = 60.0  # for a request beyond what its command takes
LARGEST_ANSWER = 8 << 20  # bytes
BUSY = (429, 503)  # HTTP statuses of a service that may have a place later


class _BusyError(SandboxError):
    """The service has no place for a sandbox now."""


@asynccontextmanager
async def open_remote_sandbox(service: str, image: str = "") -> AsyncIterator[CommandSandbox]:
    """Open a sandbox of a service for as long as the block runs.

    Args:
        service: Address of the service, whose token is in the environment.
        image: Image of the sandbox, which ROCK needs; by default what the service chooses.

    Raises:
        ConfigError: There is no token.
        SandboxError: The sandbox does not start.
    """
    # Our service takes this header as well as the usual one, ROCK only this one.
    headers = {"XRL-Authorization": f"Bearer {read_secret(TOKEN_VARIABLE)}"}
    async with httpx.AsyncClient(base_url=f"{service.rstrip('/')}{PATH}", headers=headers, trust_env=False) as client:
        connection, name = _Connection(client, service), ""
        try:
            try:
                async with asyncio.timeout(START_SECONDS):
                    name = await connection.request_sandbox(image)
                    await connection.await_start(name)
            except TimeoutError:
                raise SandboxError(f"{service}: a sandbox does not start in {START_SECONDS:g} s") from None
            yield _RemoteCommands(connection, name)
        finally:
            if name:
                with suppress(SandboxError):  # else the service ends it after `IDLE_MINUTES`
                    await connection.post("stop", sandbox_id=name)


class _Connection:
    """Requests to a service."""

    def __init__(self, client: httpx.AsyncClient, service: str) -> None:
        self._client = client
        self._service = service

    async def request_sandbox(self, image: str) -> str:
        """Ask for a sandbox until the service has a place for one; return its id."""
        pause, most = START_PAUSES
        body: dict[str, Any] = {"auto_clear_time_minutes": IDLE_MINUTES, "auto_delete_seconds": 0}
        body |= {"image": image} if image else {}
        while True:
            try:
                result = await self.post("start_async", **body)
                return str(result["sandbox_id"])
            except _BusyError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, most)

    async def await_start(self, name: str) -> None:
        """Return once a sandbox runs; raise `SandboxError` if it does not start."""
        pause, most = START_PAUSES
        while True:
            status = await self._request("GET", f"get_status?sandbox_id={name}", PATIENCE_SECONDS)
            if status.get("is_alive"):
                return
            for stage in (status.get("status") or {}).values():
                if stage.get("status") in ("failed", "timeout", "stopped"):
                    raise SandboxError(f"{self._service}: the sandbox does not start: {stage.get('message')}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def post(self, route: str, seconds: float = 0.0, **body: Any) -> Mapping[str, Any]:
        """Return the result of a request that may take so long.

        Raises:
            SandboxError: The service does not answer or refuses the request.
        """
        return await self._request("POST", route, seconds + PATIENCE_SECONDS, body)

    async def _request(self, method: str, route: str, seconds: float, body: Any = None) -> Mapping[str, Any]:
        try:
            async with self._client.stream(method, f"/{route}", json=body, timeout=seconds) as answer:
                content = bytearray()
                async for part in answer.aiter_bytes():
                    content += part
                    if len(content) > LARGEST_ANSWER:
                        raise SandboxError(f"{self._service}: an answer is larger than {LARGEST_ANSWER} bytes")
            fields = json.loads(content)
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise SandboxError(f"{self._service}: {type(error).__name__}: {error}") from error
        if not isinstance(fields, Mapping) or fields.get("status") != "Success":
            reason = fields.get("error") or fields.get("message") if isinstance(fields, Mapping) else fields
            kind = _BusyError if answer.status_code in BUSY else SandboxError
            raise kind(f"{self._service}: {route}: {reason or answer.status_code}")
        result = fields.get("result")
        return result if isinstance(result, Mapping) else {}


class _RemoteCommands(CommandSandbox):
    def __init__(self, connection: _Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    async def execute(self, command: Sequence[str], seconds: float) -> Execution:
        result = await self._connection.post(
            "execute", seconds, sandbox_id=self._name, command=[*command], timeout=seconds
        )
        return Execution(exit_code=int(result["exit_code"]), stdout=result["stdout"], stderr=result["stderr"])

    async def write(self, path: str, content: str) -> None:
        await self._connection.post("write_file", sandbox_id=self._name, path=path, content=content)

"""The server of the run store: keys and queues in memory, for connections that prove that they know the secret."""

import asyncio
import hmac
import secrets
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.weights.store_protocol import CHALLENGE, HEAD, MAX_MESSAGE, PROOF_SECONDS, MessageAuthenticator

MAX_UNPROVEN = 128  # open connections that have proved nothing; the oldest gives way to a new one


class StoreServer:
    """Serves the store in a thread of its own for as long as the process lives."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._secret = secret
        self._keys = _Keys()
        self._unproven: dict[asyncio.StreamWriter, None] = {}
        threading.Thread(target=lambda: asyncio.run(self._live(listener)), name="store", daemon=True).start()

    async def _live(self, listener: socket.socket) -> None:
        async with await asyncio.start_server(self._serve, sock=listener) as server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection until it closes or sends anything else."""
        try:
            macs, request = await self._authenticate(reader, writer)
            while True:
                answer = msgspec.msgpack.encode(await self._keys.do(*msgspec.msgpack.decode(request)))
                writer.write(HEAD.pack(macs.next(answer), len(answer)) + answer)
                await writer.drain()
                request = await self._read_request(reader, macs)
        except (ConnectionError, EOFError, TimeoutError):
            pass  # it closed, or does not know the secret
        finally:
            writer.close()

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[MessageAuthenticator, bytes]:
        """Read the first request of a connection, which proves that it knows the secret."""
        self._unproven[writer] = None
        if len(self._unproven) > MAX_UNPROVEN:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                ours = secrets.token_bytes(CHALLENGE)
                writer.write(ours)
                macs = MessageAuthenticator(self._secret, ours + await reader.readexactly(CHALLENGE))
                return macs, await self._read_request(reader, macs)
        finally:
            self._unproven.pop(writer, None)

    @staticmethod
    async def _read_request(reader: asyncio.StreamReader, macs: MessageAuthenticator) -> bytes:
        """Read the next request; raise `ConnectionError` if its HMAC is wrong."""
        mac, length = HEAD.unpack(await reader.readexactly(HEAD.size))
        request = await reader.readexactly(length) if length <= MAX_MESSAGE else b""
        if not hmac.compare_digest(mac, macs.next(request)):
            raise ConnectionError("the HMAC of a request is wrong")
        return request


class _Keys:
    """The content of the store. `RunStore` has a method for each operation here."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = defaultdict(deque)
        self._changed = asyncio.Condition()

    async def do(self, operation: str, args: Sequence[Any], seconds: float) -> Any:
        """Run an operation and return its result; None if it would have to wait longer than `seconds`."""
        async with self._changed:
            if operation in ("get", "queue_pop"):
                ready, take = getattr(self, operation)(*args)
                try:
                    async with asyncio.timeout(seconds):
                        await self._changed.wait_for(ready)
                except TimeoutError:
                    return None
                return take()
            found = getattr(self, operation)(*args)
            self._changed.notify_all()
            return found

    def get(self, keys: list[str]) -> Any:
        return lambda: self.check(keys), lambda: [self._values[key] for key in keys]

    def queue_pop(self, key: str) -> Any:
        return lambda: self._queues[key], self._queues[key].popleft

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = b"%d" % total
        return total

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        if self._values.get(key, b"") == expected:
            self._values[key] = value
        return self._values.get(key, expected)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def queue_push(self, key: str, value: bytes) -> None:
        self._queues[key].append(value)

"""Where the processes of a run meet: a store like torch's `TCPStore`, which answers those alone who know its secret.

`TCPStore` serves whoever reaches its port, and on one machine that is every user: they can list its keys and put garbage there.
Here each request and each answer carries an HMAC over its number and the challenges of both ends, so that nobody else can make
one up, change or repeat it. All else that comes is ignored. The secret is part of the store's address, which workers get as
they get their calls: it is in no file, on no command line and in no message.
"""

import asyncio
import hmac
import secrets
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
from torch import distributed

from antiphon.core.errors import ConfigError

CHALLENGE = 32  # bytes, of the server's and of the client's
MAC = 32  # bytes
HEAD = struct.Struct(f"!{MAC}sI")  # of a request, and of an answer: the HMAC, the length
LONGEST = 4 << 20  # bytes of either
STRANGERS = 128  # connections that may be open without having proved anything; the oldest gives way to a new one
PROOF_SECONDS = 20.0  # for a connection to prove that it knows the secret
CONNECT_SECONDS = 2.0  # for a connection to be taken; strangers may crowd the others out, who then try again
TRY_SECONDS = 120.0


class RunStore(distributed.Store):
    """A client of the store. Each thread has a connection of its own, so what waits for a key holds up no other thread."""

    def __init__(self, address: str, timeout: timedelta) -> None:
        """`address` is what `open_store` returned; `get` and `wait` give up after `timeout`."""
        super().__init__()
        self.set_timeout(timeout)
        where, _, secret = address.rpartition("/")
        self._host, _, port = where.rpartition(":")
        self._port, self._secret = int(port), bytes.fromhex(secret)
        self._own = threading.local()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key as soon as it is set."""
        return self._wait_for([key], self.timeout)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return as soon as all keys are set."""
        self._wait_for(list(keys), timeout or self.timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set."""
        found: bool = self._ask("check", list(keys))
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key is set to, 0 if it is not set; return the sum."""
        total: int = self._ask("add", key, amount)
        return total

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set a key that has the expected value, or that is not set if "" is expected; return its value."""
        found: bytes = self._ask("compare_set", key, _bytes(expected), _bytes(value))
        return found

    def delete_key(self, key: str) -> bool:
        """Delete a key; return False if it was not set."""
        found: bool = self._ask("delete_key", key)
        return found

    def num_keys(self) -> int:
        """Return the number of keys."""
        count: int = self._ask("num_keys")
        return count

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self._ask("queue_push", key, _bytes(value))

    def queue_pop(self, key: str, timeout: timedelta) -> bytes | None:
        """Take the first value of a queue; None if none comes within `timeout`."""
        found: bytes | None = self._ask("queue_pop", key, seconds=timeout.total_seconds())
        return found

    def clone(self) -> "RunStore":
        """Return this store: threads do not wait for each other."""
        return self

    def _wait_for(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        values: list[bytes] | None = self._ask("get", keys, seconds=timeout.total_seconds())
        if values is None:
            raise distributed.DistStoreError(f"{keys} were not set within {timeout.total_seconds():g} s")
        return values

    def _ask(self, operation: str, *args: Any, seconds: float = 0.0) -> Any:
        """The answer to a request, which may take so many seconds."""
        connection = self._take_connection()
        request = msgspec.msgpack.encode((operation, args, seconds))
        try:
            answer = connection.ask(request, seconds + PROOF_SECONDS)
        except OSError as error:
            raise distributed.DistNetworkError(f"lost the store at {self._host}:{self._port}: {error}") from error
        self._own.connection = connection  # else it is not known what comes next on it
        return msgspec.msgpack.decode(answer)

    def own_host(self) -> str:
        """Return the address of this machine from which the store is reached."""
        self._own.connection = connection = self._take_connection()
        return connection.host

    def _take_connection(self) -> "_Connection":
        """This thread's, a new one if it has none."""
        if (connection := self._own.__dict__.pop("connection", None)) is not None:
            return connection
        until = time.monotonic() + TRY_SECONDS
        while True:
            try:
                return _Connection((self._host, self._port), self._secret)
            except OSError as error:
                if isinstance(error, ConnectionRefusedError) or time.monotonic() > until:
                    raise distributed.DistNetworkError(f"no store at {self._host}:{self._port}: {error}") from error


class _Connection:
    """A client's end of a connection, which has proved that it knows the secret."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._socket = socket.create_connection(address, CONNECT_SECONDS)
        self.host: str = self._socket.getsockname()[0]
        own = secrets.token_bytes(CHALLENGE)
        self._macs = _Macs(secret, _read(self._socket, CHALLENGE) + own)
        self._socket.sendall(own)
        self.ask(msgspec.msgpack.encode(("num_keys", (), 0.0)), CONNECT_SECONDS)

    def ask(self, request: bytes, seconds: float) -> bytes:
        """The answer to a request. `OSError` if none comes in so many seconds."""
        self._socket.settimeout(seconds)
        self._socket.sendall(HEAD.pack(self._macs.next(request), len(request)) + request)
        mac, length = HEAD.unpack(_read(self._socket, HEAD.size))
        answer = _read(self._socket, length)
        if not hmac.compare_digest(mac, self._macs.next(answer)):
            raise ConnectionError("the answer is not the store's")
        return answer

    def __del__(self) -> None:
        """Close it, when its thread has ended."""
        if hasattr(self, "_socket"):
            self._socket.close()


class _Macs:
    """The HMACs of what passes over a connection, one after another."""

    def __init__(self, secret: bytes, challenges: bytes) -> None:
        self._secret = secret
        self._challenges = challenges
        self._number = 0

    def next(self, content: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._secret, self._challenges + self._number.to_bytes(8, "big") + content, "sha256")


class _Server:
    """The store itself, which lives as long as its process, in a thread of its own."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._secret = secret
        self._keys = _Keys()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        threading.Thread(target=lambda: asyncio.run(self._live(listener)), name="store", daemon=True).start()

    async def _live(self, listener: socket.socket) -> None:
        async with await asyncio.start_server(self._serve, sock=listener) as server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, for as long as they are such."""
        try:
            macs, request = await self._meet(reader, writer)
            while True:
                answer = msgspec.msgpack.encode(await self._keys.do(*msgspec.msgpack.decode(request)))
                writer.write(HEAD.pack(macs.next(answer), len(answer)) + answer)
                await writer.drain()
                request = await self._read_request(reader, macs)
        except (ConnectionError, EOFError, TimeoutError):
            pass  # it is gone, or a stranger
        finally:
            writer.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[_Macs, bytes]:
        """The first request of a connection, which proves that it knows the secret."""
        self._strangers[writer] = None
        if len(self._strangers) > STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                ours = secrets.token_bytes(CHALLENGE)
                writer.write(ours)
                macs = _Macs(self._secret, ours + await reader.readexactly(CHALLENGE))
                return macs, await self._read_request(reader, macs)
        finally:
            self._strangers.pop(writer, None)

    @staticmethod
    async def _read_request(reader: asyncio.StreamReader, macs: _Macs) -> bytes:
        """The next request. `ConnectionError` if it is of one who does not know the secret."""
        mac, length = HEAD.unpack(await reader.readexactly(HEAD.size))
        request = await reader.readexactly(length) if length <= LONGEST else b""
        if not hmac.compare_digest(mac, macs.next(request)):
            raise ConnectionError("a stranger")
        return request


class _Keys:
    """What is in the store. Each operation is a method that `RunStore` has, too."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = defaultdict(deque)
        self._changed = asyncio.Condition()

    async def do(self, operation: str, args: Sequence[Any], seconds: float) -> Any:
        """Return what an operation comes to; None if it would have to wait for longer than so many seconds."""
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


def open_store(host: str, timeout: timedelta) -> tuple[RunStore, str]:
    """Open a store that listens on one address of this machine for as long as the process lives; return it, and its address for
    `RunStore` elsewhere, secret included."""
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise ConfigError(f"weights.host: {host!r} is no address of the learner's machine: {error}") from error
    secret = secrets.token_bytes(32)
    address = f"{host}:{listener.getsockname()[1]}/{secret.hex()}"
    _Server(listener, secret)
    return RunStore(address, timeout), address


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _read(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        if not (more := connection.recv(min(size - len(content), 1 << 20))):
            raise ConnectionResetError("the store has closed the connection")
        content += more
    return bytes(content)

"""The store at which the processes of a run meet: like torch's `TCPStore`, but only for those who know its secret.

`TCPStore` serves everybody who reaches its port, which on one machine is every user: they could list keys and write garbage.
Here each request and each answer carries an HMAC over its number and the challenges of both ends, so that nobody else can
forge, change or repeat one. Everything else is ignored. The secret is part of the store's address, which workers get with
their calls: it is in no file, on no command line and in no message.
"""

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
from torch import distributed

from antiphon.core.errors import ConfigError
from antiphon.weights.store_protocol import CHALLENGE, HEAD, PROOF_SECONDS, MessageAuthenticator
from antiphon.weights.store_server import StoreServer

CONNECT_SECONDS = 2.0  # for a connection to be accepted; unproven ones may crowd it out, and it is tried again
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
        """Return the answer to a request, which may wait up to `seconds`."""
        connection = self._take_connection()
        request = msgspec.msgpack.encode((operation, args, seconds))
        try:
            answer = connection.ask(request, seconds + PROOF_SECONDS)
        except OSError as error:
            raise distributed.DistNetworkError(f"lost the store at {self._host}:{self._port}: {error}") from error
        self._own.connection = connection  # after an error, an answer may still be on its way
        return msgspec.msgpack.decode(answer)

    def own_host(self) -> str:
        """Return the address of this machine from which the store is reached."""
        self._own.connection = connection = self._take_connection()
        return connection.host

    def _take_connection(self) -> "_Connection":
        """Take this thread's connection, or a new one if it has none."""
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
    """A client's end of a connection, which has proved that both ends know the secret."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._socket = socket.create_connection(address, CONNECT_SECONDS)
        self.host: str = self._socket.getsockname()[0]
        own = secrets.token_bytes(CHALLENGE)
        self._macs = MessageAuthenticator(secret, _read(self._socket, CHALLENGE) + own)
        self._socket.sendall(own)
        self.ask(msgspec.msgpack.encode(("num_keys", (), 0.0)), CONNECT_SECONDS)

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Return the answer to a request; raise `OSError` if none comes within `seconds`."""
        self._socket.settimeout(seconds)
        self._socket.sendall(HEAD.pack(self._macs.next(request), len(request)) + request)
        mac, length = HEAD.unpack(_read(self._socket, HEAD.size))
        answer = _read(self._socket, length)
        if not hmac.compare_digest(mac, self._macs.next(answer)):
            raise ConnectionError("the answer is not the store's")
        return answer

    def __del__(self) -> None:
        """Close the socket when the thread that owned it has ended."""
        if hasattr(self, "_socket"):
            self._socket.close()


def open_store(host: str, timeout: timedelta) -> tuple[RunStore, str]:
    """Open a store on one address of this machine for as long as the process lives.

    Returns:
        A client of the store, and its address for a `RunStore` elsewhere, which contains the secret.

    Raises:
        ConfigError: If this machine does not have the address.
    """
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        message = f"{host!r} is no address of the learner's machine: {error}"
        raise ConfigError(message, key="weights.host", value=host) from error
    secret = secrets.token_bytes(32)
    address = f"{host}:{listener.getsockname()[1]}/{secret.hex()}"
    StoreServer(listener, secret)
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

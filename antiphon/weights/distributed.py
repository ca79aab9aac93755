"""A weight channel over torch.distributed: each version is broadcast to the engines that request it, on any machine.

The learner keeps a copy and trains on. Engines request the copy between two of their steps. A thread of the learner waits until
all engines that had the last version have asked, at most `PATIENCE` seconds after the first, and broadcasts to the engines that
have asked. An engine that comes late, is new, or lost a broadcast because another one died, gets a broadcast of its own. The
process group is reused as long as its members stay the same. With the encoding `delta`, engines keep their copy. If all that
ask hold the previous version, the learner broadcasts the changes in place of the copy.

The ends meet at a store of the learner's (`weights.rendezvous`). The store and gloo, which carries the bytes without any
password, listen on the address of the context alone: use an address other than 127.0.0.1 on a private network only.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any
from uuid import uuid4

import torch
from torch import distributed
from typing_extensions import override

from antiphon.core.errors import WeightsError
from antiphon.core.failpoints import hit
from antiphon.core.types import WeightsUpdate
from antiphon.weights.base import TransferContext, WeightChannel
from antiphon.weights.listeners import ListeningSockets
from antiphon.weights.manifest import BUCKET_BYTES, Adapters, NamedTensors
from antiphon.weights.rendezvous import RunStore, open_store
from antiphon.weights.tensors import unpack_tensors
from antiphon.weights.versions import DELTA, KeptVersion, PackedVersion

PATIENCE = 1.0  # seconds that receivers wait for each other
TIMEOUT = timedelta(seconds=20)  # of each step of a broadcast
JOIN = timedelta(seconds=6)  # for a peer's address in the store; gloo waits five times as long for a connection to it
ANSWER = (
    5 * JOIN + 2 * TIMEOUT
)  # for an answer: a peer may die while the group is joined, and another one in a broadcast
IDLE = timedelta(hours=1)  # longest single wait for a request; none comes while a training step runs
TRIES = 4  # broadcasts of one version that a receiver takes part in before it gives up

REQUESTS = "asked"  # queue of requests: receiver, version, key of the answer, identity of the version that it has kept
TOO_LATE = b"-"  # answer: a newer version has replaced it
WHOLE = "whole"  # in an answer: all bytes come
BASE = "base"  # in an answer: all bytes come, and are to be kept. A number there: so many bytes of a difference come


class Distributed(WeightChannel):
    """The learner's end. It keeps a copy of the weights to broadcast."""

    def __init__(self, context: TransferContext) -> None:
        self._host, self._encoding = context.host, context.encoding
        self._store, self._location = open_store(context.host, ANSWER)
        self._copy_lock = threading.Lock()  # held while the copy is made or broadcast
        self.copy = PackedVersion(context)
        self._version = -1
        self._served: set[str] = set()  # receivers that have this version
        self._expected: set[str] = set()  # receivers that the next broadcast waits for
        threading.Thread(target=self._serve, name="weights", daemon=True).start()

    @override
    def send(self, named: NamedTensors, version: int, adapters: Adapters | None = None) -> WeightsUpdate:
        with self._copy_lock:
            manifest = self.copy.pack(named, adapters)
            self._version, self._expected, self._served = version, self._served, set()
        return WeightsUpdate(version=version, location=self._location, manifest=manifest, sent=self.copy.sent)

    @staticmethod
    @override
    def receive(update: WeightsUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            receiver = _receiver(update.location, threading.get_ident())
            content = receiver.fetch(update)
        except distributed.DistError as error:  # the sender is gone
            message = f"weights of version {update.version} did not arrive: {error}"
            raise WeightsError(message, version=update.version) from error
        try:
            yield from unpack_tensors(update, content)
        except WeightsError:
            receiver.kept.forget()
            raise

    def _serve(self) -> None:
        group: Any = None
        members: list[str] = []
        for number in itertools.count():
            keys, held = self._gather()
            change = self.copy.difference  # once: `send` may replace it now
            delta = change[1] if change and held == {change[0]} else None
            sends = WHOLE if self._encoding != DELTA else f"{len(delta)}" if delta is not None else BASE
            if group is None or members != sorted(keys):
                group, name, members = None, f"group-{number}", sorted(keys)
            for rank, member in enumerate(members, 1):
                self._store.set(keys[member], f"{name} {rank} {len(keys) + 1} {sends}")
            try:
                group = group or _join(self._store, name, 0, len(keys) + 1, self._host)
                if delta is not None:
                    _broadcast(group, torch.frombuffer(bytearray(delta), dtype=torch.uint8))
                else:
                    with self._copy_lock:
                        _broadcast(group, self.copy.content)
            except RuntimeError:  # a receiver is gone; the others ask again
                group, self._expected = None, set(members)
            else:
                self._expected = set()  # a late receiver gets a broadcast of its own
                self._served |= keys.keys()

    def _gather(self) -> tuple[dict[str, str], set[str]]:
        """Return the receivers of the next broadcast, with the key at which each waits for its answer, and what they have."""
        keys: dict[str, str] = {}
        held: dict[str, str] = {}
        until = 0.0
        while True:
            missing = self._expected - keys.keys()
            left = timedelta(seconds=max(0.0, until - time.monotonic()) if missing else 0) if keys else IDLE
            if (request := self._store.queue_pop(REQUESTS, left)) is None:
                if keys:
                    return keys, set(held.values())
                continue
            member, version, key, has = request.decode().split()
            if int(version) != self._version:
                self._store.set(key, TOO_LATE)
                continue
            until = until or time.monotonic() + PATIENCE
            keys[member], held[member] = key, has


class _Receiver:
    """An engine's end."""

    def __init__(self, location: str) -> None:
        self._store = RunStore(location, ANSWER)
        self._host = self._store.own_host()
        self._name = uuid4().hex
        self._asked = itertools.count()
        self._group: tuple[str, Any] = "", None  # the last, with its name
        self.kept = KeptVersion()

    def fetch(self, update: WeightsUpdate) -> torch.Tensor:
        """Return the bytes of an update, uint8 [size]."""
        for _ in range(TRIES):
            key = f"{self._name}/{next(self._asked)}"
            self._store.queue_push(REQUESTS, f"{self._name} {update.version} {key} {self.kept.identity}")
            if (answer := self._store.get(key)) == TOO_LATE:
                raise WeightsError(
                    f"weights of version {update.version} are no longer broadcast: a newer version has replaced them",
                    version=update.version,
                )
            self._store.delete_key(key)
            name, rank, size, sends = answer.decode().split()
            whole = sends in (WHOLE, BASE)
            copy = torch.empty(update.manifest.size if whole else int(sends), dtype=torch.uint8)
            try:
                if self._group[0] != name:
                    self._group = name, _join(self._store, name, int(rank), int(size), self._host)
                _broadcast(self._group[1], copy)
            except RuntimeError:  # a member of the group is gone
                self._group = "", None
                continue
            if sends == WHOLE:
                return copy
            if whole:
                return self.kept.keep(copy, update.manifest)
            return self.kept.change(copy.numpy().tobytes(), update.manifest)
        message = f"weights of version {update.version} did not arrive in {TRIES} broadcasts"
        raise WeightsError(message, version=update.version)


@cache
def _receiver(location: str, thread: int) -> _Receiver:
    """Return the receiver of an engine; with `cluster.debug` engines are threads of one process."""
    return _Receiver(location)


_devices: deque[Any] = deque(maxlen=2)  # a device must outlive messages in flight when its group ends


def _join(store: RunStore, name: str, rank: int, size: int, host: str) -> Any:
    """Join a group; return it once all others have joined, when its sockets refuse further connections."""
    options, listeners = distributed.ProcessGroupGloo._Options(), ListeningSockets()
    with listeners.track():
        device = distributed.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
    _devices.append(device)
    options._timeout = JOIN
    options._devices = [device]
    try:
        return distributed.ProcessGroupGloo(distributed.PrefixStore(name, store), rank, size, options)
    finally:
        listeners.refuse_connections()


def _broadcast(group: Any, copy: torch.Tensor) -> None:
    options = distributed.BroadcastOptions()
    options.timeout = TIMEOUT
    for bucket in copy.split(BUCKET_BYTES):
        hit("weights.bucket")
        group.broadcast([bucket], options).wait()

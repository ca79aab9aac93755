"""Weights by torch.distributed: each version is broadcast to the engines that ask for it, wherever they run.

The learner keeps a copy and trains on. Engines ask for it when they have a moment; a thread of the learner waits until all are
there that have the version before, `PATIENCE` seconds at most after the first, and broadcasts to those who are. Who comes late,
is new, or was torn away because another died, has a broadcast of its own. The group of those who take part is kept for as long
as it is always the same.

They find each other at a store of the learner's, see `weights.rendezvous`. It listens on the address of the exchange alone, as
does gloo, which carries the bytes and asks for no password: give another address than 127.0.0.1 on a network of your own only.
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

from antiphon.core.errors import WeightsError
from antiphon.core.failpoints import hit
from antiphon.core.types import WeightsUpdate
from antiphon.weights.base import TransferContext
from antiphon.weights.listeners import ListeningSockets
from antiphon.weights.manifest import BUCKET_BYTES, Adapters, NamedTensors
from antiphon.weights.rendezvous import RunStore, open_store
from antiphon.weights.tensors import HostBuffer, pack_tensors, unpack_tensors

PATIENCE = 1.0  # seconds that receivers wait for each other
TIMEOUT = timedelta(seconds=20)  # of each step of a broadcast
IDLE = timedelta(hours=1)  # that one wait for a request takes; nobody asks while a step is made
TRIES = 4  # broadcasts that a receiver has a part in, for one version, before it gives up

ASKED = "asked"  # the queue of those who ask: name, version, key of the answer
TOO_LATE = b"-"  # an answer: the version is another by now


class Distributed:
    """The learner's end. It keeps a copy of the weights, which is what is broadcast."""

    def __init__(self, context: TransferContext) -> None:
        self._host = context.host
        # Who is served before may die when it is joined, and once more in a broadcast.
        self._store, self._location = open_store(context.host, 3 * TIMEOUT)
        self._held = threading.Lock()  # the copy, while it is made or broadcast
        self.copy = HostBuffer()
        self._version = -1
        self._served: set[str] = set()  # receivers, with this version
        self._expected: set[str] = set()  # those who are waited for
        threading.Thread(target=self._serve, name="weights", daemon=True).start()

    def send(self, named: NamedTensors, version: int, adapters: Adapters | None = None) -> WeightsUpdate:
        """See `WeightChannel.send`."""
        with self._held:
            manifest = pack_tensors(named, self.copy, adapters)
            self._version, self._expected, self._served = version, self._served, set()
        return WeightsUpdate(version=version, location=self._location, manifest=manifest)

    @staticmethod
    def receive(update: WeightsUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightChannel.receive`."""
        yield from unpack_tensors(update, _receiver(update.location, threading.get_ident()).fetch(update))

    def _serve(self) -> None:
        group: Any = None
        members: list[str] = []
        for number in itertools.count():
            keys = self._gather()
            if group is None or members != sorted(keys):
                group, name, members = None, f"group-{number}", sorted(keys)
            for rank, member in enumerate(members, 1):
                self._store.set(keys[member], f"{name} {rank} {len(keys) + 1}")
            try:
                group = group or _join(self._store, name, 0, len(keys) + 1, self._host)
                with self._held:
                    _broadcast(group, self.copy.content)
            except RuntimeError:  # somebody is gone; the others ask again
                group, self._expected = None, set(members)
            else:
                self._expected = set()  # who comes now is alone, and the next time with the others
                self._served |= keys.keys()

    def _gather(self) -> dict[str, str]:
        """Who has the next broadcast, and where each waits for the answer."""
        keys: dict[str, str] = {}
        until = 0.0
        while not keys or self._expected - keys.keys():
            left = timedelta(seconds=max(0.0, until - time.monotonic())) if keys else IDLE
            if (request := self._store.queue_pop(ASKED, left)) is None:
                if keys:
                    break
                continue
            member, version, key = request.decode().split()
            if int(version) != self._version:
                self._store.set(key, TOO_LATE)
                continue
            until = until or time.monotonic() + PATIENCE
            keys[member] = key
        return keys


class _Receiver:
    """An engine's end."""

    def __init__(self, location: str) -> None:
        self._store = RunStore(location, 3 * TIMEOUT)
        self._host = self._store.own_host()
        self._name = uuid4().hex
        self._asked = itertools.count()
        self._group: tuple[str, Any] = "", None  # the last, with its name

    def fetch(self, update: WeightsUpdate) -> torch.Tensor:
        """The bytes of an update, uint8 [size]."""
        copy = torch.empty(update.manifest.size, dtype=torch.uint8)
        for _ in range(TRIES):
            key = f"{self._name}/{next(self._asked)}"
            self._store.queue_push(ASKED, f"{self._name} {update.version} {key}")
            if (answer := self._store.get(key)) == TOO_LATE:
                raise WeightsError(
                    f"weights of version {update.version} are broadcast no more: there are others by now"
                )
            self._store.delete_key(key)
            name, rank, size = answer.decode().split()
            try:
                if self._group[0] != name:
                    self._group = name, _join(self._store, name, int(rank), int(size), self._host)
                _broadcast(self._group[1], copy)
            except RuntimeError:  # somebody who took part is gone
                self._group = "", None
                continue
            return copy
        raise WeightsError(f"weights of version {update.version} did not arrive in {TRIES} broadcasts")


@cache
def _receiver(location: str, thread: int) -> _Receiver:
    """One an engine: with `cluster.debug` they are threads of one process."""
    return _Receiver(location)


_devices: deque[Any] = deque(maxlen=2)  # a device must outlive what is on its way when its group ends


def _join(store: RunStore, name: str, rank: int, size: int, host: str) -> Any:
    """The group of that name, once all others have joined it. What it listens with is shut then."""
    options, listeners = distributed.ProcessGroupGloo._Options(), ListeningSockets()
    with listeners.track():
        device = distributed.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
    _devices.append(device)
    options._timeout = TIMEOUT
    options._devices = [device]
    try:
        return distributed.ProcessGroupGloo(distributed.PrefixStore(name, store), rank, size, options)
    finally:
        listeners.refuse_connections()


def _broadcast(group: Any, copy: torch.Tensor) -> None:
    for bucket in copy.split(BUCKET_BYTES):
        hit("weights.bucket")
        group.broadcast(bucket, 0).wait()

"""The store of a run: what torch's own does, for those who know the secret."""

import hmac
import os
import socket
import struct
import threading
from datetime import timedelta

import msgspec
import pytest
from torch import distributed

from antiphon.sandbox.isolation import kernel
from antiphon.weights.listeners import ListeningSockets
from antiphon.weights.rendezvous import RunStore, open_store
from antiphon.weights.store_server import MAX_UNPROVEN

SECOND = timedelta(seconds=1)
LONG = timedelta(seconds=60)


@pytest.fixture
def opened():
    return open_store("127.0.0.1", LONG)


def operate(store):
    """What a store answers to one request after another."""
    store.set("a", "1")
    yield store.get("a")
    yield store.add("count", 3), store.add("count", -1), store.get("count")
    yield store.check(["a"]), store.check(["a", "b"])
    yield store.compare_set("a", "1", "2"), store.compare_set("a", "1", "3"), store.get("a")
    yield store.compare_set("new", "", "4"), store.get("new")
    yield store.num_keys()
    yield store.delete_key("a"), store.delete_key("a"), store.check(["a"])
    prefixed = distributed.PrefixStore("p", store)  # in C++, which calls what it is given
    prefixed.set("b", bytes(range(256)))
    prefixed.wait(["b"], SECOND)
    yield prefixed.get("b"), store.get("p/b")


def test_it_does_what_the_store_of_torch_does(opened):
    assert list(operate(opened[0])) == list(operate(distributed.HashStore()))


def test_what_waits_is_woken_and_holds_up_nobody(opened):
    store, address = opened
    found = []
    waiting = threading.Thread(target=lambda: found.append(RunStore(address, LONG).get("late")))
    waiting.start()
    store.queue_push("queue", "first")
    store.queue_push("queue", "second")
    assert [store.queue_pop("queue", LONG), store.queue_pop("queue", LONG)] == [b"first", b"second"]
    store.set("late", "here")
    waiting.join()
    assert found == [b"here"]


def test_what_never_comes_is_an_error(opened):
    store, _ = opened
    assert store.queue_pop("queue", timedelta(milliseconds=1)) is None
    with pytest.raises(distributed.DistStoreError):
        store.wait(["never"], timedelta(milliseconds=1))


def connect(address):
    host, port = address.partition("/")[0].split(":")
    return socket.create_connection((host, int(port)), 60)


def exchange(way, secret, request):
    """Ask as a client does, written down from the protocol; returns what is sent, and what comes back first."""
    theirs, own = way.recv(32, socket.MSG_WAITALL), os.urandom(32)
    mac = hmac.digest(secret, theirs + own + (1).to_bytes(8, "big") + request, "sha256")
    sent = own + mac + struct.pack("!I", len(request)) + request
    way.sendall(sent)
    return sent, way.recv(32, socket.MSG_WAITALL)


def test_requests_of_strangers_are_ignored(opened):
    store, address = opened
    request = msgspec.msgpack.encode(("set", ("a", b"garbage"), 0.0))
    with connect(address) as way:
        assert exchange(way, b"no secret" * 4, request)[1] == b""
    assert not store.check(["a"])
    with connect(address) as way:
        sent, answer = exchange(way, bytes.fromhex(address.partition("/")[2]), request)
        assert len(answer) == 32
    assert store.get("a") == b"garbage"
    store.set("a", "good")
    with connect(address) as way:  # who has heard it says it again
        way.recv(32, socket.MSG_WAITALL)
        way.sendall(sent)
        assert way.recv(32, socket.MSG_WAITALL) == b""
    assert store.get("a") == b"good"


def test_strangers_who_say_nothing_crowd_nobody_out(opened):
    store, address = opened
    silent = [connect(address) for _ in range(2 * MAX_UNPROVEN)]
    for way in silent[:MAX_UNPROVEN]:  # given up for those who came after them
        with pytest.raises(ConnectionError):
            while way.recv(64):
                pass
            raise ConnectionError("closed")
    RunStore(address, LONG).set("a", "1")
    assert store.get("a") == b"1"
    for way in silent:
        way.close()


def test_a_listener_of_an_ordinary_user_is_shut_too():
    """In a process that is opaque, and cannot list its own descriptors; some kernels also deny filters to such a user."""
    "127.0.0.1".encode("idna")  # the child may not read what sockets import when they are first used
    child = os.fork()
    if not child:
        status = 1
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            kernel.make_opaque()
            test_a_listener_that_is_shut_admits_nobody_else()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_listener_that_is_shut_admits_nobody_else():
    listeners = ListeningSockets()
    with listeners.track():
        listener = socket.create_server(("127.0.0.1", 0))
    other = socket.create_server(("127.0.0.1", 0))
    with listener, other, socket.create_connection(listener.getsockname(), 60) as known:
        end, _ = listener.accept()
        listeners.refuse_connections()
        with pytest.raises(TimeoutError):
            socket.create_connection(listener.getsockname(), 0.2)
        socket.create_connection(other.getsockname(), 60).close()
        with end:
            known.sendall(b"goes on")
            assert end.recv(7, socket.MSG_WAITALL) == b"goes on"

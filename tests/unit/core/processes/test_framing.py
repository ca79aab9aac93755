"""Frames over real sockets. The header is written out here, as another implementation would write it."""

import asyncio
import os
import socket
import struct
import threading

import pytest

from antiphon.core.processes.framing import FrameConnection, read_frame, write_frame


def exchange(body, limit=None):
    """Run `body(connection, other end, frames)`; return the frames that arrived, None at the end."""

    async def main():
        ours, theirs = socket.socketpair()
        frames, ended = [], asyncio.Event()

        def on_end():
            frames.append(None)
            ended.set()

        with theirs:
            connection = FrameConnection(ours, frames.append, on_end, limit)
            await asyncio.to_thread(body, asyncio.get_running_loop(), connection, theirs)
        await asyncio.wait_for(ended.wait(), 60)
        return frames

    return asyncio.run(main())


def packed(content):
    return struct.pack("!Q", len(content)) + content


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
def test_frames_may_arrive_in_any_pieces(size):
    sent = [b"", b"a", b"bc" * 300, bytes(10)]

    def body(loop, connection, theirs):
        content = b"".join(map(packed, sent))
        for at in range(0, len(content), size):
            theirs.sendall(content[at : at + size])

    assert exchange(body) == [*sent, None]


@pytest.mark.parametrize("size", [0, 1, 100, 5_000_000])
def test_blocking_and_waiting_ends_agree(size):
    def body(loop, connection, theirs):
        for _ in range(2):
            loop.call_soon_threadsafe(connection.send, os.urandom(size))
        for _ in range(2):
            write_frame(theirs, bytes(read_frame(theirs)))

    assert [frame if frame is None else len(frame) for frame in exchange(body)] == [size, size, None]


def test_a_frame_that_is_cut_off_is_none():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(packed(b"whole") + packed(b"only a part")[:-1])
        assert read_frame(ours) == b"whole" and read_frame(ours) is None
    assert exchange(lambda loop, connection, theirs: theirs.sendall(packed(b"whole") + b"\0\0\0")) == [b"whole", None]


def test_too_long_a_frame_is_the_end():
    def body(loop, connection, theirs):
        theirs.sendall(packed(b"four") + packed(b"more.") + packed(b"four"))

    assert exchange(body, limit=4) == [b"four", None]
    assert exchange(lambda loop, connection, theirs: theirs.sendall(b"\xff" * 8), limit=4) == [None]


def test_an_end_that_does_not_read_holds_nothing_up():
    def body(loop, connection, theirs):
        told = threading.Event()
        loop.call_soon_threadsafe(lambda: (connection.send(bytes(50_000_000)), connection.send(b"last"), told.set()))
        assert told.wait(60)  # although nothing has been read
        assert len(read_frame(theirs)) == 50_000_000 and read_frame(theirs) == b"last"

    assert exchange(body) == [None]


def test_last_words_survive_a_failed_send():
    """The other end has closed: what is sent fails, but its reason lies in the socket."""

    def body(loop, connection, theirs):
        told = threading.Event()

        def close_then_send():  # on the loop, so that nothing is read in between
            theirs.sendall(packed(b"why"))
            theirs.close()
            connection.send(bytes(1000))
            told.set()

        loop.call_soon_threadsafe(close_then_send)
        assert told.wait(60)

    assert exchange(body) == [b"why", None]


def test_an_error_of_a_callback_loses_no_frame():
    async def main():
        ours, theirs = socket.socketpair()
        frames, errors, ended = [], [], asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))

        def on_frame(content):
            frames.append(content)
            if content == b"bad":
                raise ZeroDivisionError

        with theirs:
            FrameConnection(ours, on_frame, ended.set)
            theirs.sendall(b"".join(map(packed, [b"good", b"bad", b"bad"])))
        await asyncio.wait_for(ended.wait(), 60)
        return frames, [type(error) for error in errors]

    assert asyncio.run(main()) == ([b"good", b"bad", b"bad"], [ZeroDivisionError] * 2)


def test_after_close_nothing_is_passed_on():
    async def main():
        ours, theirs = socket.socketpair()
        frames = []

        def on_frame(content):
            frames.append(content)
            connection.close()

        with theirs:
            connection = FrameConnection(ours, on_frame, lambda: frames.append(None))
            theirs.sendall(packed(b"first") + packed(b"second"))
            while not frames:
                await asyncio.sleep(0)
            connection.send(b"nothing")
            connection.close()
            assert theirs.recv(100) == b""
        return frames

    assert asyncio.run(main()) == [b"first"]

"""Coroutines that are run from code that is not asynchronous, inside and outside of an event loop."""

import asyncio
import os
import signal
import sys
import threading

import pytest

from antiphon.core import blocking
from antiphon.core.blocking import LoopThread, run_blocking


async def answer():
    return threading.current_thread() is threading.main_thread()


def test_outside_of_a_loop_it_runs_in_this_thread():
    assert run_blocking(answer()) is True


def test_inside_of_a_loop_it_has_a_thread():
    async def cell():
        return run_blocking(answer())

    threads = set(threading.enumerate())  # those of earlier tests may end meanwhile
    assert asyncio.run(cell()) is False
    assert set(threading.enumerate()) <= threads


def test_errors_are_raised_where_it_is_called():
    async def fail():
        raise KeyError("column")

    async def cell():
        run_blocking(fail())

    with pytest.raises(KeyError, match="column"):
        asyncio.run(cell())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_exit_in_the_thread_does_not_end_its_loop(error):
    async def leave():
        raise error

    with LoopThread() as thread:
        with pytest.raises(error):
            thread.run(leave())
        assert thread.run(answer()) is False


@pytest.fixture
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("handled", [True, False])
def test_an_interrupt_reaches_the_handler_in_the_thread(handled):
    async def wait():
        told = asyncio.Event()
        if handled:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, told.set)
        os.kill(os.getpid(), signal.SIGINT)
        await told.wait()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        return "told"

    async def cell():
        return run_blocking(wait())

    loop = asyncio.new_event_loop()  # asyncio.run would handle the signal itself
    for _ in range(500):  # the signal comes now before, now after the caller has begun to wait
        if handled:
            assert loop.run_until_complete(cell()) == "told"
        else:
            with pytest.raises(KeyboardInterrupt):
                loop.run_until_complete(cell())
    loop.close()


@pytest.mark.parametrize("line", range(1, 31))
def test_an_interrupt_at_any_line_of_the_wait_ends_it(line):
    """Ctrl-C may come while the caller holds a lock that the thread needs: then nothing may be left locked."""
    with pytest.raises(KeyboardInterrupt):
        run_interrupted(asyncio.Event().wait(), line)


def test_an_interrupt_beside_the_result_is_not_lost():
    """At whatever line of the wait it comes, until the wait has no more lines."""
    line, seen = 0, True
    while seen:
        line += 1
        try:
            seen = run_interrupted(answer(), line)
        except KeyboardInterrupt:
            continue
        assert not seen, f"the interrupt at line {line} was lost"
    assert line > 5


def run_interrupted(work, line):
    """Run a coroutine in a thread, with a Ctrl-C at a line of the wait for its result; return True if there was such a line."""
    lines = 0

    async def cell():
        return run_blocking(work)

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == line:
            signal.raise_signal(signal.SIGINT)
        return count

    def trace(frame, event, argument):
        return count if waits(frame) else None

    loop, before = asyncio.new_event_loop(), sys.gettrace()
    sys.settrace(trace)
    try:
        loop.run_until_complete(cell())
    finally:
        sys.settrace(before)
        loop.close()
    return lines >= line


def waits(frame):
    """Whether the frame is the thread's wait for a result, or is called by it at whatever depth."""
    while frame:
        if frame.f_code is blocking._wait.__code__:
            return True
        frame = frame.f_back
    return False

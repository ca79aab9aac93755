"""The thread of a run that is trained step by step from code that is not asynchronous."""

import asyncio
import os
import signal
import sys
import threading
from contextlib import asynccontextmanager

import pytest

from antiphon.run.stepping import RunSession


def test_ctrl_c_while_a_run_starts_ends_it():
    seen = []

    @asynccontextmanager
    async def start():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
            yield
        finally:
            seen.append("ended")

    # Threads of earlier tests may end meanwhile: only new ones count.
    before, interval = set(threading.enumerate()), sys.getswitchinterval()
    sys.setswitchinterval(1e-7)  # so that the signal comes at many places
    try:
        for _ in range(500):
            seen.clear()
            with pytest.raises(KeyboardInterrupt), RunSession(start()):
                raise AssertionError("the run has started")
            assert seen == ["ended"] and set(threading.enumerate()) <= before
    finally:
        sys.setswitchinterval(interval)

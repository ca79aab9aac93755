"""Worker processes of a service, with real ones that are really killed."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial

import psutil
import pytest

from antiphon.core.errors import SandboxError
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.workers import Workers
from tests.unit.sandbox.small_service import end, serve

CONFIG = ServiceConfig(workers=2, sandboxes=10, warm=3)
SERVE = partial(serve, "the token")


async def ask(workers: Workers, index: int) -> list[int]:
    """The process id of a worker, and its numbers of sandboxes, and of those started in advance."""
    return [int(word) for word in (await workers.clients[index].get("/")).text.split()]


def gone(*pids: int) -> bool:
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(left, timeout=30)[1]


def test_a_killed_worker_is_replaced_and_leaving_ends_all():
    async def main():
        async with Workers(CONFIG, SERVE) as workers:
            (first, quota, warm), (other, *_) = [await ask(workers, index) for index in (0, 1)]
            assert (quota, warm) == (10, 2) and len({first, other, os.getpid()}) == 3
            os.kill(first, signal.SIGKILL)
            assert gone(first)
            again, *_ = await asyncio.wait_for(ask(workers, 0), 60)  # it waits in the socket
            assert again != first and (await ask(workers, 1))[0] == other
            return again, other

    assert gone(*asyncio.run(main()))


def test_a_worker_that_ends_before_it_answers_is_an_error():
    async def main():
        async with Workers(CONFIG, end):
            pass

    with pytest.raises(SandboxError, match="ended before it was ready"):
        asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's")
def test_workers_do_not_outlive_a_killed_service():
    program = """
import asyncio, os
from antiphon.sandbox.service.workers import Workers
from tests.unit.sandbox.test_service_workers import CONFIG, SERVE, ask

async def main():
    async with Workers(CONFIG, SERVE) as workers:
        for index in (0, 1):
            print(*await ask(workers, index), flush=True)
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=120)
    pids = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert done.returncode == -9 and len(pids) == 2 and gone(*pids)

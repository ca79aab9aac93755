"""Workers in real processes and threads: calls, events, errors, deaths."""

import asyncio
import os
import signal
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

from antiphon.cluster.local import LocalCluster
from antiphon.errors import ConfigError, DataError, UnsupportedError, WorkerDied

HERE = str(Path(__file__).parent)
COUNTER = "workers_for_tests:Counter"


@pytest.fixture(autouse=True)
def importable():
    sys.path.insert(0, HERE)
    yield
    sys.path.remove(HERE)


def run(main, *, debug=False, logs=None):
    async def body():
        cluster = LocalCluster(debug=debug, logs=logs)
        try:
            return await asyncio.wait_for(main(cluster), 60)
        finally:
            await cluster.close()

    return asyncio.run(body())


@pytest.mark.parametrize("debug", [False, True])
def test_calls_events_and_errors(debug):
    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        counted, done = [], asyncio.Event()
        worker.on_event(lambda event: (counted.append(event), event or done.set()))
        array = np.arange(1 << 18)
        answers = await asyncio.gather(*(worker.call("echo", i) for i in range(50)), worker.call("echo", array))
        assert answers[:50] == list(range(50))
        np.testing.assert_array_equal(answers[50], array)
        assert (await worker.call("pid") == os.getpid()) == debug
        worker.send("begin", 5)
        await done.wait()
        assert counted == [4, 3, 2, 1, 0]
        with pytest.raises(DataError, match="there is no such thing"):
            await worker.call("refuse")
        assert await worker.call("echo", "still here") == "still here"

    run(main, debug=debug)


@pytest.mark.parametrize("debug", [False, True])
def test_a_bug_in_a_worker_reaches_every_waiting_call_with_its_traceback(debug, tmp_path):
    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        watcher = asyncio.ensure_future(worker.died())
        calls = [worker.call("fail"), worker.call("echo", 1)]
        results = await asyncio.gather(*calls, watcher, return_exceptions=True)
        for result in results:
            assert isinstance(result, WorkerDied)
            assert "ZeroDivisionError: a bug" in str(result) and "in fail" in str(result)
        with pytest.raises(WorkerDied):
            await worker.call("echo", 2)

    run(main, debug=debug, logs=tmp_path)


def test_a_killed_worker_is_noticed(tmp_path):
    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        pid = await worker.call("pid")
        assert pid == worker.pid
        waiting = asyncio.ensure_future(worker.died())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"worker counter was killed by SIGKILL; its output is in .*counter\.log"):
            await waiting

    run(main, logs=tmp_path)


def test_a_worker_that_kills_itself_in_a_call(tmp_path):
    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        with pytest.raises(WorkerDied, match="killed by SIGKILL"):
            await worker.call("kill_itself")

    run(main, logs=tmp_path)


def test_a_worker_that_cannot_be_built_says_why():
    async def main(cluster):
        with pytest.raises(DataError, match="model 'x' is missing"):
            await cluster.spawn("broken", "workers_for_tests:Unbuildable").call("echo", 1)

    run(main)


def test_closing_leaves_no_process():
    async def main(cluster):
        workers = [cluster.spawn(f"w{i}", COUNTER) for i in range(2)]
        return [await worker.call("pid") for worker in workers]

    for pid in run(main):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_of_another_environment_has_that_one_s_packages(tmp_path):
    venv.create(tmp_path / "other", symlinks=True)
    python = str(tmp_path / "other" / "bin" / "python")

    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER, python=python)
        assert await worker.call("echo", [1, 2]) == [1, 2]
        return await worker.call("interpreter")

    prefix, path = run(main, logs=tmp_path)
    assert Path(prefix) == tmp_path / "other"
    installed = [Path(folder) for folder in path if Path(folder).name == "site-packages"]
    assert installed and all(folder.is_relative_to(tmp_path) for folder in installed)


def test_another_interpreter_must_be_there_and_needs_a_process(tmp_path):
    async def main(cluster):
        cluster.spawn("counter", COUNTER, python="nowhere/python")

    with pytest.raises(ConfigError, match=r"'nowhere/python' cannot be run: No such file"):
        run(main)
    with pytest.raises(
        UnsupportedError, match=r"counter needs another interpreter, nowhere/python: with cluster.debug"
    ):
        run(main, debug=True)

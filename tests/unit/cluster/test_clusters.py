"""Workers in real processes, threads and Ray actors: calls, events, errors, deaths. One contract, whatever runs them."""

import asyncio
import os
import pickle
import re
import signal
import socket
import sys
import venv
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from antiphon.cluster.base import CLUSTERS
from antiphon.cluster.config import ClusterConfig
from antiphon.core.errors import ConfigError, DataError, UnsupportedError, WeightsError, WorkerDiedError
from tests.raising import raises_with

HERE = str(Path(__file__).parent)
COUNTER = "workers_for_tests:Counter"

# Found, not imported: what it reads from the environment at its import, the cluster sets before.
NO_RAY = find_spec("ray") is None
WHY_RAY = "Ray is optional: pip install -e '.[ray]'"

PROCESSES = ClusterConfig(fork=False)
FORKS = ClusterConfig()
THREADS = ClusterConfig(debug=True)
RAY = ClusterConfig(kind="ray")


@pytest.fixture(autouse=True)
def importable():
    sys.path.insert(0, HERE)
    yield
    sys.path.remove(HERE)


@pytest.fixture(scope="module")
def a_ray():
    """One Ray for all tests: it takes seconds to start. What a test builds finds this process connected."""
    if NO_RAY:
        pytest.skip(WHY_RAY)
    cluster = CLUSTERS.resolve("ray")(RAY)
    yield
    asyncio.run(cluster.close())


def worlds(*configs):
    """Run the test with each of these clusters."""
    params = [
        pytest.param(config, id="thread" if config.debug else "fork" if config.fork else "process")
        if config.kind == "local"
        else pytest.param(config, id="ray", marks=pytest.mark.ray)
        for config in configs
    ]
    return pytest.mark.parametrize("config", params)


@pytest.fixture
def run(request, config, tmp_path):
    """Give `main` a cluster, for a minute at most."""
    if config.kind == "ray":
        request.getfixturevalue("a_ray")

    def run(main):
        async def body():
            cluster = CLUSTERS.resolve(config.kind)(config, tmp_path)
            try:
                return await asyncio.wait_for(main(cluster), 60)
            finally:
                await cluster.close()

        return asyncio.run(body())

    return run


@worlds(PROCESSES, FORKS, THREADS, RAY)
def test_calls_events_and_errors(run, config):
    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        counted, done = [], asyncio.Event()
        worker.on_event(lambda event: (counted.append(event), event or done.set()))
        array = np.arange(1 << 18)
        answers = await asyncio.gather(*(worker.call("echo", i) for i in range(50)), worker.call("echo", array))
        assert answers[:50] == list(range(50))
        np.testing.assert_array_equal(answers[50], array)
        assert answers[50].flags.writeable
        assert (await worker.call("pid") == os.getpid()) == config.debug
        worker.send("begin", 5)
        await done.wait()
        assert counted == [4, 3, 2, 1, 0]
        with raises_with(DataError, path="thing.json"):
            await worker.call("refuse")
        assert await worker.call("echo", "still here") == "still here"

    run(main)


@worlds(*(config.model_copy(update={"env": {"OF_THE_RUN": "given"}}) for config in (PROCESSES, FORKS, RAY)))
def test_workers_have_the_variables_of_the_run(run, config, monkeypatch):
    monkeypatch.setenv("OF_THE_SHELL", "there")

    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        return [await worker.call("environment", name) for name in ("OF_THE_RUN", "OF_THE_SHELL")]

    assert run(main)[0] == "given" and "OF_THE_RUN" not in os.environ
    if config.kind == "local":
        assert run(main) == ["given", "there"], "beside those that the controller has"


@worlds(THREADS)
def test_threads_are_built_one_at_a_time(run, config):
    """What is set for the whole process while one is built holds for that one alone, and is put back."""

    async def main(cluster):
        workers = [cluster.spawn(name, "workers_for_tests:Setter", name) for name in "abcd"]
        assert all(await asyncio.gather(*(worker.call("undisturbed") for worker in workers)))

    run(main)


@worlds(PROCESSES, RAY)
def test_what_is_sent_is_done_in_order_small_or_large(run):
    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        for i in range(200):
            worker.send("note", i, bytes(300_000 if i % 50 == 0 else 0))
        assert await worker.call("noted") == list(range(200))

    run(main)


@worlds(PROCESSES, THREADS, RAY)
def test_an_error_in_a_callback_takes_no_later_event_along(run):
    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        complaints, done = [], asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["exception"]))
        worker.on_event(lambda event: 1 / (event - 3) if event else done.set())
        worker.send("begin", 5)
        await done.wait()
        assert [type(complaint) for complaint in complaints] == [ZeroDivisionError]
        assert await worker.call("echo", 1) == 1

    run(main)


@worlds(PROCESSES, THREADS, RAY)
def test_worker_bug_reaches_every_waiting_call(run):
    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        watcher, told = asyncio.ensure_future(worker.died()), asyncio.get_running_loop().create_future()
        worker.on_death(told.set_result)
        calls = [worker.call("fail"), worker.call("echo", 1)]
        results = await asyncio.gather(*calls, watcher, return_exceptions=True)
        for result in [*results, await told]:
            assert isinstance(result, WorkerDiedError)
            assert "ZeroDivisionError: a bug" in str(result) and "in fail" in str(result)
        with pytest.raises(WorkerDiedError):
            await worker.call("echo", 2)

    run(main)


@worlds(PROCESSES, THREADS, RAY)
def test_a_worker_that_sends_more_than_data_is_ended(run, tmp_path):
    """A process that a model's output has taken over may send any bytes; none of them is called where they are read."""

    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        waiting = asyncio.ensure_future(worker.call("echo", 1))
        with pytest.raises(WorkerDiedError, match=r"worker counter sent a message that is not data: .*open"):
            await asyncio.gather(waiting, worker.call("send_a_call", str(tmp_path / "touched")))
        assert waiting.result() == 1
        with pytest.raises(WorkerDiedError):
            await worker.call("echo", 2)

    run(main)
    assert not (tmp_path / "touched").exists()


@worlds(FORKS)
def test_messages_of_no_call_end_their_worker(run):
    """Only errors of ours are raised to who called, so that no message ends the controller."""
    messages = [("error", 0, SystemExit(0)), ("result", 7, 1), ("result", None, 1), ("died", None, 3), ([], 0, 1), (1,)]

    async def main(cluster):
        for number, message in enumerate(messages):
            worker = cluster.spawn(f"counter-{number}", COUNTER)
            with pytest.raises(WorkerDiedError, match="not data"):
                await worker.call("send_raw", pickle.dumps(message))

    run(main)


KILLED = {"local": "was killed by SIGKILL", "ray": "died: .*process has died"}


@worlds(PROCESSES, FORKS, RAY)
def test_a_killed_worker_is_noticed(run, config):
    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        pid = await worker.call("pid")
        waiting = asyncio.ensure_future(worker.died())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            WorkerDiedError, match=rf"worker counter {KILLED[config.kind]}.*; its output is in .*counter\.log"
        ):
            await waiting

    run(main)


@worlds(PROCESSES, RAY)
def test_a_worker_that_kills_itself_in_a_call(run, config):
    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        with pytest.raises(WorkerDiedError, match=KILLED[config.kind]):
            await worker.call("kill_itself")

    run(main)


@worlds(PROCESSES, FORKS, RAY)
def test_a_worker_that_hangs_can_be_killed(run):
    async def main(cluster):
        worker = cluster.spawn("counter", COUNTER)
        pid = await worker.call("pid")
        os.kill(pid, signal.SIGSTOP)
        call = asyncio.ensure_future(worker.call("echo", 1))
        worker.kill()
        with pytest.raises(WorkerDiedError):
            await call
        return pid

    assert gone([run(main)])


@worlds(PROCESSES, THREADS, RAY)
def test_a_worker_that_cannot_be_built_says_why(run):
    async def main(cluster):
        with raises_with(DataError, path="x"):
            await cluster.spawn("broken", "workers_for_tests:Unbuildable").call("echo", 1)

    run(main)


@worlds(PROCESSES, FORKS, RAY)
def test_what_a_worker_prints_is_in_its_log(run, tmp_path):
    async def main(cluster):
        await cluster.spawn("counter", COUNTER).call("say", "hello from the worker")

    run(main)
    assert "hello from the worker" in (tmp_path / "counter.log").read_text()


@worlds(PROCESSES, FORKS, RAY)
def test_closing_leaves_no_process(run, config):
    async def main(cluster):
        workers = [cluster.spawn(f"w{i}", COUNTER) for i in range(2)]
        return [await worker.call("pid") for worker in workers]

    assert gone(run(main))


@worlds(FORKS)
def test_forked_worker_is_preloaded_and_outlives_its_server(run):
    async def main(cluster):
        first = cluster.spawn("first", COUNTER)
        assert await first.call("imported", "torch")
        nursery = await first.call("parent")
        assert nursery != os.getpid()
        os.kill(nursery, signal.SIGKILL)
        assert gone([nursery])
        second = cluster.spawn("second", COUNTER)  # while there is none
        assert [await worker.call("echo", 1) for worker in (first, second)] == [1, 1]
        assert await second.call("parent") == os.getpid()
        third = cluster.spawn("third", COUNTER)
        assert await third.call("parent") not in (nursery, os.getpid())
        return [await third.call("parent")]

    assert gone(run(main))


def test_without_ray_the_way_to_get_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with raises_with(ConfigError, match=r"\[ray\]", key="cluster.kind", value="ray"):
        CLUSTERS.resolve("ray")(RAY)


@pytest.mark.ray
@pytest.mark.skipif(NO_RAY, reason=WHY_RAY)
def test_an_address_where_nobody_is_at_home(monkeypatch):
    """It is refused at once; Ray itself would try for minutes. `auto` may be one, of a head that was killed."""
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with raises_with(ConfigError, key="cluster.address", value=address):
            CLUSTERS.resolve("ray")(ClusterConfig(kind="ray", address=address))
        monkeypatch.setenv("RAY_ADDRESS", address)
        with raises_with(ConfigError, match=address, key="cluster.address", value="auto"):
            CLUSTERS.resolve("ray")(ClusterConfig(kind="ray", address="auto"))


@pytest.mark.ray
def test_what_is_started_listens_to_this_machine_only(a_ray):
    """And only for itself: none of its processes has a socket that another machine could reach."""
    listening = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # some of Ray's workers end by themselves
            listening += [end.laddr.ip for end in process.net_connections("tcp") if end.status == psutil.CONN_LISTEN]
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def gone(pids):
    """Whether none of these processes lives on."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(processes, timeout=30)[1]


def test_worker_of_another_environment_has_its_packages(tmp_path):
    venv.create(tmp_path / "other", symlinks=True)
    python = str(tmp_path / "other" / "bin" / "python")

    async def main():
        cluster = CLUSTERS.resolve("local")(PROCESSES, tmp_path)
        try:
            worker = cluster.spawn("counter", COUNTER, python=python)
            assert await worker.call("echo", [1, 2]) == [1, 2]
            return await worker.call("interpreter")
        finally:
            await cluster.close()

    prefix, path = asyncio.run(main())
    assert Path(prefix) == tmp_path / "other"
    installed = [Path(folder) for folder in path if Path(folder).name == "site-packages"]
    assert installed and all(folder.is_relative_to(tmp_path) for folder in installed)


def test_another_interpreter_must_be_there_and_needs_a_process():
    local = CLUSTERS.resolve("local")
    with raises_with(ConfigError, value="nowhere/python"):
        local(PROCESSES).spawn("counter", COUNTER, python="nowhere/python")
    with raises_with(UnsupportedError, key="cluster.debug", value=True):
        local(THREADS).spawn("counter", COUNTER, python="nowhere/python")


@pytest.mark.ray
def test_weights_go_through_the_object_store(a_ray):
    async def main():
        cluster = CLUSTERS.resolve("ray")(RAY)
        try:
            learner, *engines = [
                cluster.spawn(name, "workers_for_tests:Weights") for name in ("learner", "one", "other")
            ]
            for version, length in ((1, 3), (2, 3), (3, 5)):
                update = await learner.call("send", version, length)
                loaded = await asyncio.gather(*(engine.call("load", update) for engine in engines))
                assert loaded == [[float(version)] * length] * 2
        finally:
            await cluster.close()

    asyncio.run(main())


@pytest.mark.ray
def test_differences_go_through_the_object_store_to_those_that_have_the_version_before(a_ray):
    async def main():
        cluster = CLUSTERS.resolve("ray")(RAY)
        try:
            learner, early, late = [
                cluster.spawn(name, "workers_for_tests:Weights", "delta") for name in ("learner", "early", "late")
            ]
            size = 1024
            for version in (1, 2, 3):
                update = await learner.call("send", version, size)
                assert await early.call("load", update) == [float(version)] * size
                assert (update.sent < size) is (version > 1)
            update = await learner.call("send", 4, size)
            await learner.call("spoil")
            assert await early.call("load", update) == [4.0] * size, "it needs the difference alone"
            with raises_with(WeightsError, version=4):
                await late.call("load", update)
            update = await learner.call("send", 5, size)
            assert await asyncio.gather(*(each.call("load", update) for each in (early, late))) == [[5.0] * size] * 2
            update = await learner.call("send", 6, 7)  # of another size: whole
            assert await asyncio.gather(*(each.call("load", update) for each in (early, late))) == [[6.0] * 7] * 2
        finally:
            await cluster.close()

    asyncio.run(main())


@pytest.mark.ray
@pytest.mark.parametrize("config", [RAY])
def test_actors_are_called_as_their_workers(run, config):
    async def main(cluster):
        names = ["engine-0", "engine-1", "learner"]
        workers = [cluster.spawn(name, COUNTER) for name in names]
        pids = [await worker.call("pid") for worker in workers]
        titles = [psutil.Process(pid).cmdline()[0] for pid in pids]
        assert [re.match(r"ray::([\w-]+)", title)[1] for title in titles] == names

    run(main)


@pytest.mark.ray
def test_ray_runs_its_own_interpreter(a_ray):
    async def main():
        CLUSTERS.resolve("ray")(RAY).spawn("counter", COUNTER, python="nowhere/python")

    with raises_with(UnsupportedError, key="cluster.kind", value="ray"):
        asyncio.run(main())

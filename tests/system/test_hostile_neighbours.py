"""Another process of the machine that does to the ports of a run what it likes, without knowing the run's secrets."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.system

STEPS = 40
FLOOD = r"""
import os, socket, sys, time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from threading import Thread

import psutil
from torch import distributed

os.nice(10)
print("ready", flush=True)
run, done, known = psutil.Process(int(input())), Counter(), set()


def ports():
    for process in [run, *run.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or closed itself to ordinary users
            yield from (each.laddr[:2] for each in process.net_connections("tcp") if each.status == "LISTEN")


def spoil(address):
    # What a stranger can do to a store of torch's: put garbage into its queues and at its keys.
    for _ in range(3):
        done["stores"] += 1
        with suppress(RuntimeError):
            store = distributed.TCPStore(*address, is_master=False, timeout=timedelta(seconds=1))
            while True:
                for key in ("asked", *store.list_keys()):
                    store.queue_push(key, "garbage")
                    store.set(key, "garbage")


def flood(address):
    held = []  # connections that say nothing
    while True:
        for garbage in (b"", b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", os.urandom(512)):
            with suppress(OSError):
                way = socket.create_connection(address, 0.1)
                way.sendall(garbage)
                done["garbage"] += 1
                held = [*held[-100:], way]


with suppress(psutil.NoSuchProcess):
    while run.is_running() and run.status() != psutil.STATUS_ZOMBIE:
        for address in {*ports()} - known:
            known.add(address)
            for attack in (spoil, flood):
                Thread(target=attack, args=(address,), daemon=True).start()
        time.sleep(0.02)
print(done["garbage"], done["stores"], flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "mesh", [pytest.param({}, marks=pytest.mark.long), {"shard": 2}], ids=["one_rank", "two_ranks"]
)
def test_garbage_in_its_ports_does_not_end_a_run(project, mesh):
    learner = {"mesh": mesh, "optimizer": {"learning_rate": 1e-2}}
    path = project.config(weights={"channel": "distributed"}, engine={"replicas": 2, "slots": 8}, learner=learner)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    flood = subprocess.Popen([sys.executable, "-c", FLOOD], text=True, **pipes)
    assert flood.stdout.readline() == "ready\n"
    run = project.start("train", path, f"steps={STEPS}")
    print(run.pid, file=flood.stdin, flush=True)
    try:
        out, err = run.communicate(timeout=240)
        told, complaints = flood.communicate(timeout=60)
    finally:
        for process in (run, flood):
            process.kill()
    assert run.returncode == 0, out + err
    assert project.summary()["steps"] == STEPS
    assert flood.returncode == 0, complaints
    assert all(int(count) > 0 for count in told.split()), told

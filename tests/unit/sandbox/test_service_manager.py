"""The records of a service's sandboxes, without any sandbox."""

import asyncio
import time

import pytest

from antiphon.sandbox.service import manager
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.manager import Sandboxes
from antiphon.sandbox.service.metrics import Metrics
from antiphon.sandbox.service.quotas import make_backend_config
from antiphon.sandbox.service.records import Sandbox, SandboxRequest, State, Transition

CONFIG = ServiceConfig(stopped_minutes=1.0)


def make(name="a", ends=(), kept=False, path=None):
    """A sandbox that entered these states so many seconds ago."""
    box = Sandbox(id=name, request=SandboxRequest(), backend_config=make_backend_config(CONFIG, SandboxRequest()))
    for state, ago in ends:
        box.history.append(Transition(before="", after=state, event="", at=time.time() - ago))
        box.state = state
    box.snapshot = path / name if kept else None
    return box


def test_a_start_that_fails_leaves_a_newer_one_known():
    async def main():
        service, box = Sandboxes(CONFIG, Metrics()), make()
        closing, begun = asyncio.Event(), asyncio.Event()

        async def fail(_):
            if begun.is_set():
                await asyncio.sleep(0.1)
            raise OSError("no room")

        async def close(_):
            await closing.wait()

        service._provision, service._close = fail, close
        async with service._tasks:
            service._begin_start(box, "start")
            older = box.starting
            while box.state is State.PENDING:
                await asyncio.sleep(0)
            begun.set()
            service._begin_start(box, "restart")  # while the sandbox of the older one is still being closed
            newer = box.starting
            closing.set()
            await older
            assert box.starting is newer is not older
            await newer
            assert box.starting is None

    asyncio.run(asyncio.wait_for(main(), 30))


STOPPED, DELETED = State.STOPPED, State.DELETED


@pytest.mark.parametrize(
    ("boxes", "left"),
    [
        ({"a": [(STOPPED, 500)], "b": [(STOPPED, 400), (DELETED, 100)], "c": [(STOPPED, 300)]}, "ac"),  # deleted first
        ({"a": [(STOPPED, 100)], "b": [(STOPPED, 500)], "c": [(STOPPED, 300)]}, "ac"),  # then by the time of the end
        ({"+a": [(STOPPED, 30)], "+b": [(STOPPED, 20)], "+c": [(STOPPED, 10)]}, "+a+b+c"),  # its files are kept
        ({"+a": [(STOPPED, 30)], "b": [(STOPPED, 20)], "+c": [(STOPPED, 100)]}, "+ab"),
        ({"a": [(STOPPED, 500)], "b": [], "c": [(STOPPED, 300)]}, "abc"),  # one is live
    ],
)
def test_which_sandboxes_are_forgotten(tmp_path, monkeypatch, boxes, left):
    monkeypatch.setattr(manager, "MAX_ENDED", 2)
    service = Sandboxes(CONFIG, Metrics())
    service._all = {name: make(name, ends, "+" in name, tmp_path) for name, ends in boxes.items()}
    service._forget_old()
    assert "".join(service._all) == left

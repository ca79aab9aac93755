"""Pages that are open at the same time share what is read for them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from antiphon.dashboard import live
from antiphon.dashboard.cards import KeptByRun
from antiphon.dashboard.live import Changes
from antiphon.dashboard.site import Site
from tests.unit.dashboard.sites import copy_run


@pytest.fixture
def run(runs, tmp_path):
    return copy_run(runs / "simulated", tmp_path / "runs", "alive")


def add_a_step(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{}\n")


def test_requests_that_come_together_read_once(run):
    kept, together, reads, too_many, expected = KeptByRun(), threading.Barrier(4), [], threading.Event(), 1

    def read():
        reads.append(1)
        if len(reads) > expected:
            too_many.set()
        too_many.wait(0.2)  # so long would another one have to begin
        return len(reads)

    def ask(_):
        together.wait()
        return kept.read(run, read)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [1] * 4
        add_a_step(run)
        expected = 2
        assert list(pool.map(ask, range(4))) == [2] * 4


def test_error_while_reading_is_not_kept(run):
    kept = KeptByRun()
    with pytest.raises(ZeroDivisionError):
        kept.read(run, lambda: 1 / 0)
    assert run not in kept and kept.read(run, lambda: "read") == "read"


def test_pages_of_a_run_are_told_together_and_end_when_the_server_does(run, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "INTERVAL", 0.01)

    async def main():
        changes = Changes(Site.make(tmp_path / "runs", tmp_path / "cache"))
        pages = [changes.watch("alive") for _ in range(3)]
        assert [await anext(page) for page in pages] == ["retry: 5000\n\n"] * 3
        waiting = [asyncio.ensure_future(anext(page)) for page in pages]
        await asyncio.sleep(0)
        looks = [task for task in asyncio.all_tasks() if "_follow" in repr(task.get_coro())]
        assert len(looks) == 1, "one looks at the files for all"
        add_a_step(run)
        events = await asyncio.gather(*waiting)
        assert "metrics.jsonl" in events[0] and len(set(events)) == 1
        waiting = [asyncio.ensure_future(anext(page, None)) for page in pages]
        await asyncio.sleep(0)
        changes.close()
        assert await asyncio.gather(*waiting) == [None] * 3
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody looks at a run that no page watches"

    asyncio.run(main())


def test_a_page_that_is_closed_leaves_the_others(run, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "INTERVAL", 0.01)

    async def main():
        changes = Changes(Site.make(tmp_path / "runs", tmp_path / "cache"))
        first, second = changes.watch("alive"), changes.watch("alive")
        await anext(first), await anext(second)
        await first.aclose()
        add_a_step(run)
        assert "metrics.jsonl" in await anext(second)
        await second.aclose()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_page_that_opens_while_the_server_ends_is_not_waited_for(run, tmp_path):
    async def main():
        changes = Changes(Site.make(tmp_path / "runs", tmp_path / "cache"))
        page = changes.watch("alive")
        changes.close()
        assert [each async for each in page] == ["retry: 5000\n\n"]

    asyncio.run(main())

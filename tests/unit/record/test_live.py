"""What a person sees of a run."""

import asyncio
import io
import re

import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.record.live import LiveView, NotebookView, PlainView, make_view

METRICS = {
    "reward/mean": 0.5,
    "evaluation/accuracy": 0.875,
    "step/seconds": 1.25,
    "step/wait_groups_share": 0.4,
    "age/mean": 0.5,
    "age/max": 1,
    "tokens/per_second": 1234.5,
    "groups/live": 12,
}


def test_a_pipe_gets_one_line_a_step():
    stream = io.StringIO()
    view = make_view("auto", stream)
    assert isinstance(view, PlainView)
    view.start("demo", "synchronous")
    view.step(7, 100, METRICS, Deadlines())
    view.step(8, 100, {}, Deadlines())
    view.message("saved [bold]")
    view.close()
    assert stream.getvalue().splitlines() == [
        "demo: synchronous",
        "step   7/100  reward 0.500  accuracy 0.875  age 0.50  live 12  tok/s 1234  waited 40%  s 1.25",
        "step   8/100  ",
        "saved [bold]",
    ]


def test_the_mode_decides_where_the_stream_does_not():
    assert isinstance(make_view("on", io.StringIO()), LiveView)
    assert isinstance(make_view("off", io.StringIO()), PlainView)


def test_the_panel_shows_numbers_and_who_waits_for_whom():
    stream = io.StringIO()

    async def run():
        view, deadlines = make_view("on", stream), Deadlines()
        view.start("demo", "groups alive 12")
        never = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            waiting = [
                tasks.create_task(
                    deadlines.wait(never.wait(), name="tokens", owner=f"episode {i}", on="engine", deadline=1e6)
                )
                for i in range(3)
            ]
            await asyncio.sleep(0)
            view.step(7, 100, METRICS, deadlines)
            view.step(8, 100, {**METRICS, "reward/mean": 0.75}, deadlines)
            view.message("saved [bold]")
            view.close()  # draws once more
            for task in waiting:
                task.cancel()

    asyncio.run(run())
    drawn = stream.getvalue()
    for part in ("demo", "8/100", "0.750", "▁█", "0.875", "episode → engine ×3", "1234", "40%", "saved [bold]"):
        assert part in drawn


def test_a_panel_before_the_first_step_is_whole():
    stream = io.StringIO()
    view = make_view("on", stream)
    view.start("demo")
    view.close()
    assert "nobody" in stream.getvalue() and "step 0/?" in stream.getvalue()


def test_a_notebook_gets_one_panel_that_is_redrawn():
    shown = []

    class Handle:
        def update(self, panel):
            shown.append(panel._repr_mimebundle_([], [])["text/plain"])

    def display(panel, display_id):
        assert display_id
        shown.append(panel._repr_mimebundle_([], [])["text/plain"])
        return Handle()

    view = NotebookView(io.StringIO(), display)
    view.start("demo", "synchronous")
    view.step(7, 100, METRICS, Deadlines())
    view.message("saved [bold]")
    view.close()
    assert len(shown) == 4 and "demo" in shown[0] and "step 7/100" in shown[1]
    assert "saved [bold]" in shown[2] and "step 7/100" in shown[3]


@pytest.mark.parametrize(("parties", "rest"), [(0, "nobody"), (4, None), (5, "and 1 more"), (7, "and 3 more")])
def test_the_panel_names_four_and_counts_the_others(parties, rest):
    stream = io.StringIO()

    async def run():
        view, deadlines = make_view("on", stream), Deadlines()
        view.start("demo")
        never = asyncio.Event()
        waits = [
            asyncio.ensure_future(
                deadlines.wait(never.wait(), name="tokens", owner="run", on=f"party {number}", deadline=1e6)
            )
            for number in range(parties)
        ]
        await asyncio.sleep(0)
        view.step(7, 100, METRICS, deadlines)
        view.close()
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    asyncio.run(run())
    shown = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[│\s]+", " ", stream.getvalue()).split())
    assert {number for number in range(parties) if f"party {number}" in shown} == {*range(min(parties, 4))}
    assert rest in shown if rest else "more" not in shown

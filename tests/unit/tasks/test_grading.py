"""The grading pool, with real processes that are really killed."""

import asyncio
import contextlib
import os
import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, DataError, WorkerDiedError
from antiphon.core.types import Message, Prompt, Score, ScoreStatus
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import GradingConfig
from antiphon.tasks.grading.pool import GradingPool
from antiphon.tasks.grading.worker_process import PoolSettings
from tests.raising import raises_with

OBEY: tuple[str, dict[str, Any]] = ("tests.unit.tasks.hostile_rewards:obey", {})
EMPTY = Transcript([])
Rewards = dict[str, tuple[str, dict[str, Any]]]


def pool(workers: int = 1, deadline: float = 2.0, rewards: Rewards | None = None) -> GradingPool:
    config = GradingConfig(workers=workers, deadline=deadline)
    return GradingPool(PoolSettings(rewards=rewards or {"obey": OBEY}, config=config), Deadlines())


def prompt(payload: Any, task: str = "obey") -> Prompt:
    return Prompt(id=f"{task}/{payload}", task=task, messages=(), payload=payload)


def graded(grading: GradingPool, *payloads: Any) -> list[Score]:
    """The scores of prompts that are all put in at once."""

    async def body(grading: GradingPool) -> list[Score]:
        return await asyncio.gather(*(grading.score(prompt(payload), EMPTY) for payload in payloads))

    scores: list[Score] = with_pool(grading, body)
    return scores


def with_pool(grading: GradingPool, body: Callable[[GradingPool], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with grading:
            return await body(grading)

    return asyncio.run(run())


def children() -> set[int]:
    """Process ids of the graders among our child processes; other tests leave fork servers and trackers behind."""
    found = psutil.Process().children()
    return {child.pid for child in found if "antiphon.tasks.grading.worker" in " ".join(_command(child))}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # it has just ended
        return []


def test_scores_come_back_to_their_callers() -> None:
    assert [score.value for score in graded(pool(workers=2), *range(500))] == [float(n) for n in range(500)]


def test_one_hanging_grading_costs_the_others_nothing() -> None:
    grading = pool()
    scores = graded(grading, *range(10), "spin", *range(10))
    assert scores[10] == Score.ungraded("timed out after 2 s")
    assert [score.value for score in scores[:10] + scores[11:]] == [*map(float, range(10))] * 2
    assert (grading.stats.timed_out, grading.stats.processes, grading.stats.scored) == (1, 2, 20)


def test_a_reward_that_raises_leaves_its_grading_ungraded() -> None:
    grading = pool()
    scores = graded(grading, "raise", "sys.exit", "text", "nan", 1)
    assert [score.status for score in scores[:4]] == [ScoreStatus.UNGRADED] * 4
    assert re.fullmatch(r"LookupError: no such thing \(.*hostile_rewards\.py:\d+\)", scores[0].detail)
    assert scores[1].detail.startswith("SystemExit: bye (")
    assert [score.raised for score in scores] == [True] * 4 + [False]
    assert "returned str, expected a float or a Score" in scores[2].detail
    assert "nan" in scores[3].detail
    assert scores[4].value == 1.0
    assert (grading.stats.raised, grading.stats.processes) == (4, 1)


@pytest.mark.parametrize("death, ending", [("exit", "exit code 7"), ("kill", "signal 9"), ("segfault", "signal 11")])
def test_two_worker_deaths_on_one_item_are_infrastructure(death: str, ending: str) -> None:
    grading = pool()
    before, dead, after = graded(grading, 1, death, 2)
    assert dead.status is ScoreStatus.INFRASTRUCTURE and ending in dead.detail
    assert (before.value, after.value) == (1.0, 2.0)
    assert (grading.stats.died, grading.stats.processes) == (1, 3)


def test_what_a_dead_worker_started_is_ended_too() -> None:
    async def body(grading: GradingPool) -> tuple[Score, Score]:
        return await asyncio.gather(grading.score(prompt("daemon"), EMPTY), grading.score(prompt(3), EMPTY))

    dead, after = with_pool(pool(deadline=0.5), body)
    assert dead.status is ScoreStatus.INFRASTRUCTURE and after.value == 3.0


def test_many_failures_at_once_lose_no_grading() -> None:
    kinds: dict[Any, ScoreStatus] = {
        "spin": ScoreStatus.UNGRADED,
        "raise": ScoreStatus.UNGRADED,
        "exit": ScoreStatus.INFRASTRUCTURE,
        "kill": ScoreStatus.INFRASTRUCTURE,
    }
    payloads = [*kinds, "raise", "exit", *range(120)]
    payloads = [payloads[place * 37 % len(payloads)] for place in range(len(payloads))]
    scores = graded(pool(workers=2), *payloads)
    for payload, score in zip(payloads, scores, strict=True):
        assert score.status is kinds.get(payload, ScoreStatus.SCORED), (payload, score)
        assert score.value == (None if payload in kinds else float(payload))


class Planted:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("sent", ["pickle", "garbage", "type", "length", "score", "bool"])
def test_what_is_no_verdict_ends_its_worker_alone(sent: str, tmp_path: Path) -> None:
    """Each speaks the worker's own socket before its verdict: nothing of it is executed, and nothing is made a verdict."""
    body = {
        "pickle": pickle.dumps(Planted(tmp_path / "mark")),
        "garbage": b"\x91" * 100_000,
        "type": msgspec.msgpack.encode({"type": "Ready"}),
        "score": msgspec.msgpack.encode(
            {"type": "Graded", "number": 1, "score": {"status": "scored", "value": float("nan")}}
        ),
        "bool": msgspec.msgpack.encode({"type": "Graded", "number": 1, "score": {"status": "scored", "value": True}}),
        "length": b"",
    }[sent]
    length = len(body) if body else 0xFFFFFFFFFFFFFFFF
    scores = graded(pool(), 1, ("sends", struct.pack("!Q", length) + body), 2, 3)
    assert [score.value for score in scores] == [1.0, None, 2.0, 3.0]
    assert scores[1].status is ScoreStatus.INFRASTRUCTURE
    assert not (tmp_path / "mark").exists()


def test_a_verdict_on_another_grading_ends_its_worker() -> None:
    """Else the true verdict on one would be taken for that on the next."""
    sent = [
        msgspec.msgpack.encode({"type": "Graded", "score": {"status": "scored", "value": 5.0}, "number": number})
        for number in (7, 0)
    ]

    async def body(grading: GradingPool) -> list[float | None]:
        frames = [struct.pack("!Q", len(each)) + each for each in sent]
        judged = [await grading.score(prompt(("sends", each)), EMPTY) for each in frames]
        assert [score.value for score in judged] == [None, None]
        return [(await grading.score(prompt(number), EMPTY)).value for number in range(20)]

    assert with_pool(pool(), body) == list(map(float, range(20)))


def profiled(grading: GradingPool, folder: Path, *payloads: Any) -> dict[str, int]:
    """Calls of the reward in the file of each process: of gradings that are under way when they are asked for."""

    async def body(grading: GradingPool) -> None:
        await asyncio.gather(*(grading.score(prompt(0), EMPTY) for _ in range(4)))
        await grading.start_profile(False)
        scores = [asyncio.ensure_future(grading.score(prompt(payload), EMPTY)) for payload in payloads]
        await asyncio.wait(scores, timeout=0)
        async with asyncio.timeout(60):
            await grading.write_profile(folder, "of-")
        await asyncio.gather(*scores)
        assert (await grading.score(prompt(1), EMPTY)).value == 1.0
        await grading.write_profile(folder, "again-")  # nothing, because none has begun

    with_pool(grading, body)
    found = {}
    for file in folder.glob("*"):
        calls = re.search(r"^ *(\d+) .*hostile_rewards\.py:\d+\(obey\)$", file.read_text(), re.MULTILINE)
        found[file.name] = int(calls[1]) if calls else 0
    return found


def test_profiles_have_the_gradings_of_their_time(tmp_path: Path) -> None:
    found = profiled(pool(workers=2), tmp_path / "step", 1, 2)
    assert found == {"of-process-1.txt": 1, "of-process-2.txt": 1}


@pytest.mark.parametrize("last", ["exit", "spin", "raise"])
def test_a_grader_that_dies_or_hangs_holds_up_no_profile(tmp_path: Path, last: str) -> None:
    found = profiled(pool(deadline=1.0), tmp_path / "step", last)
    assert found == ({"of-process-1.txt": 1} if last == "raise" else {})


def test_a_profile_that_nobody_asked_for_ends_its_worker(tmp_path: Path) -> None:
    sent = msgspec.msgpack.encode({"type": "Profiled", "text": "of a model's own"})
    frame = struct.pack("!Q", len(sent)) + sent
    scores = graded(pool(), 1, ("sends", frame), 2)
    assert [score.value for score in scores] == [1.0, None, 2.0]
    assert scores[1].status is ScoreStatus.INFRASTRUCTURE


def test_large_transcripts_and_large_verdicts_pass() -> None:
    async def body(grading: GradingPool) -> Score:
        return await grading.score(prompt("huge"), Transcript([Message("user", "y" * 3_000_000)]))

    assert len(with_pool(pool(), body).detail) == 3_000_000


def test_a_verdict_may_be_a_score() -> None:
    assert graded(pool(), "ungraded") == [Score.ungraded("cannot say")]


def test_cancelled_callers_are_forgotten() -> None:
    async def body(grading: GradingPool) -> Score:
        sent, queued, left = (asyncio.ensure_future(grading.score(prompt(n), EMPTY)) for n in ("spin", 1, 2))
        await asyncio.wait({sent}, timeout=0)  # all three have put in their work
        queued.cancel()
        await asyncio.wait({queued})
        first = await left
        sent.cancel()
        return first

    assert with_pool(pool(), body).value == 2.0


def test_each_task_has_its_reward_and_options() -> None:
    async def body(grading: GradingPool) -> list[Score]:
        return await asyncio.gather(*(grading.score(prompt(3, task), EMPTY) for task in ("plain", "scaled", "offset")))

    rewards: Rewards = {
        "plain": OBEY,
        "scaled": ("tests.unit.tasks.hostile_rewards:Scaled", {"factor": 2.0}),
        "offset": ("tests.unit.tasks.hostile_rewards:offset", {"by": 0.5}),
    }
    assert [score.value for score in with_pool(pool(rewards=rewards), body)] == [3.0, 6.0, 3.5]


@pytest.mark.parametrize(
    "reward, options, word",
    [
        ("no_such_module:grade", {}, "'no_such_module'"),
        ("tests.unit.tasks.hostile_rewards:obye", {}, "'obey'"),
        ("tests.unit.tasks.hostile_rewards:Unbuildable", {}, "OSError: the judge's key is missing"),
        ("tests.unit.tasks.hostile_rewards:Scaled", {"factr": 2.0}, "'factr'"),
        ("tests.unit.tasks.hostile_rewards:offset", {"b": 2.0}, "'b'"),
    ],
)
def test_a_reward_that_cannot_be_built_ends_the_run_at_once(reward: str, options: dict[str, Any], word: str) -> None:
    with raises_with(ConfigError, match=word, value=reward):
        graded(pool(workers=2, rewards={"bad": (reward, options)}))
    assert not children()


def test_an_unknown_name_is_refused_before_anything_starts() -> None:
    with raises_with(ConfigError, value="maths", suggestions=("math",)):
        pool(rewards={"task": ("maths", {})})


def test_a_worker_that_cannot_start_ends_the_run() -> None:
    with pytest.raises(WorkerDiedError, match="exit code 3 before it was ready"):
        graded(pool(rewards={"bad": ("tests.unit.tasks.hostile_rewards:Dying", {})}))


def test_closing_leaves_no_process_and_no_waiting_caller() -> None:
    async def run() -> list[Any]:
        async with pool(deadline=60.0) as grading:
            calls = [asyncio.ensure_future(grading.score(prompt(payload), EMPTY)) for payload in (0, "spin", 1)]
            await calls[0]  # so the worker is at the next one now
        return await asyncio.gather(*calls, return_exceptions=True)

    scored, hanging, behind = asyncio.run(run())
    assert scored.value == 0.0 and isinstance(hanging, WorkerDiedError) and isinstance(behind, WorkerDiedError)
    assert not children()


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(DataError, match="obey/"):
        graded(pool(), lambda: None)


def test_workers_do_not_import_torch_and_are_other_processes() -> None:
    modules, pid = graded(pool(), "modules", "pid")
    assert "torch" not in modules.detail.split(",")
    assert pid.value != os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's")
def test_a_hanging_worker_does_not_outlive_a_killed_run() -> None:
    program = """
import asyncio, os, signal
from tests.unit.tasks.test_grading import EMPTY, pool, prompt

async def run():
    async with pool(deadline=600.0) as grading:
        calls = [asyncio.ensure_future(grading.score(prompt(payload), EMPTY)) for payload in (0, "spin")]
        await calls[0]
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(run())
"""
    # The worker holds the pipe of the standard output too: reading it ends when the worker has.
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=120)
    assert done.returncode == -9


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 6, 8, 12, 20, 40])
def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing(turns: int) -> None:
    async def run() -> None:
        start = asyncio.ensure_future(pool(workers=2).__aenter__())
        for _ in range(turns):
            await asyncio.wait({start}, timeout=0)  # one turn of the event loop
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # unless it was faster
            await (await start).close()

    asyncio.run(run())
    assert not children()


HERE = "(its place)"


@pytest.mark.parametrize(
    "payload, values, status, detail",
    [
        (None, [2.0, 0.0, 1.0], "scored", ""),
        ("few", [None] * 3, "ungraded", f"ValueError: the group reward gave 1 scores to 3 siblings {HERE}"),
        ("half", [None] * 3, "ungraded", "cannot tell"),
        ("alone", [None] * 3, "ungraded", f"LookupError: no others {HERE}"),
        ("hang", [None] * 3, "ungraded", "timed out after 1 s"),
    ],
)
def test_a_group_is_judged_whole_or_not_at_all(payload: Any, values: list[Any], status: str, detail: str) -> None:
    together = {"obey": ("tests.unit.tasks.hostile_rewards:places", {})}
    grading = GradingPool(
        PoolSettings(rewards={"obey": OBEY}, group_rewards=together, config=GradingConfig(workers=1, deadline=1.0)),
        Deadlines(),
    )
    alone = [Score.of(value) for value in (0.9, 0.1, 0.5)]

    async def body(grading: GradingPool) -> Any:
        return await grading.score_group(prompt(payload), [EMPTY] * 3, alone)

    scores = with_pool(grading, body)
    assert [score.value for score in scores] == values
    assert {str(score.status) for score in scores} == {status}
    assert {re.sub(r"\(\S*hostile_rewards.py:\d+\)", HERE, score.detail) for score in scores} == {detail}


def test_group_reward_that_cannot_be_built_ends_the_run() -> None:
    together = {"obey": ("duplicates", {"penalt": 1.0})}
    with raises_with(ConfigError, match="'penalt'", value="duplicates"):
        graded(
            GradingPool(
                PoolSettings(rewards={"obey": OBEY}, group_rewards=together, config=GradingConfig()), Deadlines()
            )
        )
    with raises_with(ConfigError, value="duplicate", suggestions=("duplicates",)):
        GradingPool(
            PoolSettings(rewards={"obey": OBEY}, group_rewards={"obey": ("duplicate", {})}, config=GradingConfig()),
            Deadlines(),
        )


def in_one_batch(tmp_path: Any, *payloads: str) -> tuple[list[Score], list[str]]:
    """The verdicts on what is sent to a worker together, and what it was asked, in order; none may take three seconds."""
    path = tmp_path / "asked"
    rewards: Rewards = {"obey": ("tests.unit.tasks.hostile_rewards:writes_down", {"path": str(path)})}

    async def body(grading: GradingPool) -> list[Score]:
        await asyncio.gather(
            *(grading.score(prompt("quick"), EMPTY) for _ in range(50))
        )  # such are sent many at a time
        path.unlink()
        return await asyncio.gather(*(grading.score(prompt(payload), EMPTY) for payload in payloads))

    scores: list[Score] = with_pool(pool(deadline=3.0, rewards=rewards), body)
    return scores, path.read_text().split()


def test_after_a_death_the_others_are_graded_in_their_order(tmp_path: Any) -> None:
    scores, asked = in_one_batch(tmp_path, "kill", "a", "b", "c", "d")
    assert [score.value for score in scores] == [None, 1.0, 1.0, 1.0, 1.0]
    assert asked == ["kill", "kill", "a", "b", "c", "d"]


def test_the_deadline_is_of_each_grading_not_of_its_batch(tmp_path: Any) -> None:
    scores, asked = in_one_batch(tmp_path, *["slow"] * 6)
    assert [score.value for score in scores] == [1.0] * 6 and len(asked) == 6


def test_what_broke_a_pool_first_is_what_is_told() -> None:
    async def body(grading: GradingPool) -> None:
        for name in ("the first", "the second"):
            grading._fail(WorkerDiedError(name))
        with pytest.raises(WorkerDiedError, match="the first"):
            await grading.score(prompt(1), EMPTY)

    with_pool(pool(), body)

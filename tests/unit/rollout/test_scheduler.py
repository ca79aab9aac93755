"""The scheduler drives attempts; here they are futures that the test resolves in the order it likes."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import RolloutError, StallError
from antiphon.core.types import (
    AttemptStatus,
    Failure,
    GroupOutcome,
    Message,
    PolicyVersion,
    Prompt,
    Score,
    ScoreStatus,
    Trajectory,
    TrajectoryMeta,
)
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger, run_synchronously
from antiphon.record.store import LedgerStore
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.filters import spread
from antiphon.rollout.group_hooks import GroupHooks
from antiphon.rollout.scheduler import Scheduler


@pytest.fixture(autouse=True)
def place(tmp_path):
    Stage.place, Stage.stores = tmp_path, []
    yield
    for store in Stage.stores:
        store.close()


class Stage:
    """Attempts that wait for the test, and what became of them."""

    place: Path
    stores: ClassVar[list[LedgerStore]]

    def __init__(self, **config):
        defaults = {"groups_per_step": 2, "group_size": 2, "async_ratio": 1.0, "sampling": {"max_tokens": 8}}
        self.config = RolloutConfig(**{**defaults, **config})
        self.running: dict[object, asyncio.Future] = {}
        self.cancelled: list[object] = []
        self.prompts = 0

    def prompt(self):
        self.prompts += 1
        return Prompt(id=str(self.prompts - 1), task="t", messages=(Message("user", "?"),))

    async def run(self, prompt, attempt, started):
        self.running[attempt] = asyncio.get_running_loop().create_future()
        try:
            score = await self.running[attempt]
        except asyncio.CancelledError:
            self.cancelled.append(attempt)
            raise
        finally:
            del self.running[attempt]
        verdict = (
            score if isinstance(score, Score) else Score.ungraded("it broke") if score is None else Score.of(score)
        )
        failure = None if verdict.status.is_verdict else Failure(source="environment", message="it broke")
        return Trajectory(
            meta=TrajectoryMeta(
                id=attempt,
                prompt_id=prompt.id,
                task="t",
                started=started,
                newest=started,
                status=AttemptStatus.FAILED if failure else AttemptStatus.FINISHED,
                score=verdict,
                failure=failure,
            ),
            payload=(),
        )

    def scheduler(self, keep=None):
        store = LedgerStore(Path(mkdtemp(dir=Stage.place)))
        Stage.stores.append(store)
        return Scheduler(
            config=self.config,
            version=PolicyVersion(0, 0),
            next_prompt=self.prompt,
            episodes=self,
            hooks=GroupHooks(filter=keep),
            deadlines=Deadlines(),
            ledger=Ledger(store, Events(), run=run_synchronously),
        )

    async def end(self, group, score=1.0):
        """Let the running attempts of a group end."""
        for attempt in [attempt for attempt in self.running if attempt.group == group]:
            if attempt in self.running and not self.running[attempt].done():
                self.running[attempt].set_result(score)
                await settle()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def run(main):
    async def body():
        async with asyncio.TaskGroup() as owner:
            await asyncio.wait_for(main(owner), 30)

    asyncio.run(body())


def test_groups_flow_and_slots_come_back():
    async def main(owner):
        stage = Stage()
        scheduler = stage.scheduler()
        scheduler.start(owner)
        await settle()
        assert stage.prompts == 4 and len(stage.running) == 8
        for group in (1, 0, 2):
            await stage.end(group)
        groups = await scheduler.next_step()
        assert [group.id for group in groups] == [0, 1]
        assert all(len(group.trajectories) == 2 for group in groups)
        assert stage.prompts == 4, "slots are held while a step trains"
        scheduler.publish(scheduler.admission.version.next())
        assert scheduler.admission.version.n == 1
        scheduler.admit()
        assert stage.prompts == 6
        scheduler.stop()
        await settle()
        assert not stage.running

    run(main)


def test_what_a_step_trains_on_is_in_the_ledger_before():
    """Also what came last, and though what came first was committed long ago."""

    async def main(owner):
        stage = Stage()
        scheduler = stage.scheduler()
        scheduler.start(owner)
        await settle()
        await stage.end(0)
        await scheduler._ledger.commit()
        await stage.end(1)
        groups = await scheduler.next_step()
        await scheduler.wait_durable()
        wanted = {(each.meta.id.group, each.meta.id.sibling) for group in groups for each in group.trajectories}
        (path,) = Stage.place.glob("*/ledger.db")
        with closing(sqlite3.connect(path)) as db:
            found = set(db.execute("SELECT grp, sibling FROM attempts WHERE score IS NOT NULL"))
        assert wanted == {(0, 0), (0, 1), (1, 0), (1, 1)} <= found
        scheduler.stop()

    run(main)


def test_redundant_siblings_are_cancelled():
    async def main(owner):
        stage = Stage(redundancy=1)
        scheduler = stage.scheduler()
        scheduler.start(owner)
        await settle()
        first, second, third = [a for a in stage.running if a.group == 0]
        for attempt in (third, first):
            stage.running[attempt].set_result(1.0)
        await settle()
        assert stage.cancelled == [second]
        scheduler.stop()

    run(main)


def test_a_failed_attempt_is_tried_again():
    async def main(owner):
        stage = Stage()
        scheduler = stage.scheduler()
        scheduler.start(owner)
        await settle()
        victim = next(iter(stage.running))
        stage.running[victim].set_result(None)
        await settle()
        assert any(a.sibling == victim.sibling and a.attempt == 1 for a in stage.running if a.group == 0)
        assert scheduler.progress.failures == {"environment": 1}
        scheduler.stop()

    run(main)


def test_filtered_groups_are_replaced():
    async def main(owner):
        stage = Stage()
        scheduler = stage.scheduler(keep=spread)
        scheduler.start(owner)
        await settle()
        await stage.end(0, 1.0)
        assert scheduler.groups_ended[GroupOutcome.FILTERED] == 1
        assert stage.prompts == 5
        one, two = [a for a in stage.running if a.group == 1]
        stage.running[one].set_result(1.0)
        stage.running[two].set_result(0.0)
        await settle()
        assert scheduler.admission.state(1) is not None
        scheduler.stop()

    run(main)


@pytest.mark.parametrize("keep", [None, lambda group: True])
def test_dropped_groups_are_filtered_and_replaced(keep):
    async def main(owner):
        stage = Stage()
        scheduler = stage.scheduler(keep=keep)
        scheduler.start(owner)
        await settle()
        await stage.end(0, Score(status=ScoreStatus.DROPPED))
        assert scheduler.groups_ended == {GroupOutcome.FILTERED: 1}
        assert +scheduler.admission.ended == {AttemptStatus.FILTERED: 2}
        assert stage.prompts == 5 and not scheduler.progress.failures
        assert scheduler.reward_monitor.check()[0]["reward/ungraded"] == 0.0
        scheduler.stop()

    run(main)


def test_when_everything_fails_the_run_ends_with_the_reason():
    async def main(owner):
        stage = Stage(max_attempts=1)
        scheduler = stage.scheduler()
        scheduler.start(owner)
        await settle()
        for group in range(2):
            await stage.end(group, None)

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert caught.group_contains(RolloutError, match="the last 2 groups failed: it broke")


@pytest.mark.parametrize(
    ("ends", "told"),
    [  # of groups, one after another: X fails, f is filtered out, k is kept; with 4 groups a step
        ("fffX", None),
        ("XXXX", "the last 4 groups failed: it broke"),
        ("XXXfXXX", None),
        ("XXXkXXX", None),
        ("XXfXXXX", "the last 4 groups failed: it broke"),
        ("f" * 998 + "Xf", None),
        ("f" * 999 + "Xf", "the last 1000 complete groups were filtered out"),
        ("f" * 999 + "kf", None),
    ],
    ids=lambda value: value if len(str(value)) < 9 else "long",
)
def test_failed_and_filtered_groups_are_counted_apart(ends, told):
    scores = {"X": None, "f": 1.0, "k": 0.5}

    async def main(owner):
        stage = Stage(max_attempts=1, groups_per_step=4, group_size=1, async_ratio=0)
        scheduler = stage.scheduler(keep=lambda group: group.trajectories[0].meta.score.value < 1)
        scheduler.start(owner)
        await settle()
        for end in ends:
            await stage.end(groups_of(stage)[0], scores[end])
        scheduler.stop()

    if told is None:
        run(main)
    else:
        with pytest.raises(ExceptionGroup) as caught:
            run(main)
        assert caught.group_contains(RolloutError, match=told)


def test_waiting_for_groups_has_a_named_deadline():
    async def main(owner):
        scheduler = Stage(timeout=0.05).scheduler()
        scheduler.start(owner)
        with pytest.raises(StallError, match=r"learner waited more than 0\.05 s for groups to complete"):
            await scheduler.next_step()
        scheduler.stop()

    run(main)


def groups_of(stage):
    """Groups that have running attempts."""
    return sorted({attempt.group for attempt in stage.running})


def test_a_round_begins_when_all_of_the_one_before_have_ended():
    async def main(owner):
        stage = Stage(policy="batch", async_ratio=0)
        scheduler = stage.scheduler(keep=spread)
        scheduler.start(owner)
        await settle()
        await stage.end(0, 1.0)
        assert groups_of(stage) == [1], "the group that was filtered out is not replaced while another runs"
        first = next(iter(stage.running))
        stage.running[first].set_result(0.0)
        await settle()
        await stage.end(1)
        assert groups_of(stage) == [2], "one group is kept, one more is needed"
        scheduler.stop()

    run(main)


def test_one_step_off_generates_while_the_last_round_trains():
    async def main(owner):
        stage = Stage(policy="one_step_off")
        scheduler = stage.scheduler()
        scheduler.start(owner)
        await settle()
        assert groups_of(stage) == [0, 1], "half of what the ratio allows"
        await stage.end(0)
        assert groups_of(stage) == [1]
        await stage.end(1)
        assert groups_of(stage) == [2, 3]
        assert [group.id for group in await scheduler.next_step()] == [0, 1]
        await stage.end(2)
        await stage.end(3)
        assert groups_of(stage) == [], "no slot before a version is published"
        scheduler.publish(scheduler.admission.version.next())
        scheduler.admit()
        await settle()
        assert groups_of(stage) == [4, 5]
        scheduler.stop()

    run(main)


def test_tail_batching_gives_slow_prompts_a_round_of_their_own():
    async def main(owner):
        stage = Stage(policy="tail_batching", async_ratio=0, order="ready", extra_groups=1, redundancy=1)
        scheduler = stage.scheduler()
        scheduler.start(owner)
        trained = []
        for _ in range(3):
            await settle()
            for group in groups_of(stage)[-2:]:
                await stage.end(group)
            trained.append([group.prompt.id for group in await scheduler.next_step()])
            await settle()
            assert not stage.running, "the others are not waited for"
            scheduler.publish(scheduler.admission.version.next())
            scheduler.admit()
        await settle()
        assert trained == [["1", "2"], ["4", "5"], ["0", "3"]]
        assert len(stage.running) == 3 * 3, "short rounds have more groups and more siblings"
        scheduler.stop()

    run(main)


def test_too_old_attempts_end_as_the_step_begins():
    async def main(owner):
        stage = Stage(async_ratio=0, order="ready", extra_groups=1)
        scheduler = stage.scheduler()
        scheduler.start(owner)
        await settle()
        await stage.end(1)
        await stage.end(2)
        await scheduler.next_step()
        await settle()
        assert not stage.running and {attempt.group for attempt in stage.cancelled} == {0}
        assert scheduler.admission.live == 3
        scheduler.publish(scheduler.admission.version.next())
        scheduler.admit()
        await settle()
        assert groups_of(stage) == [3, 4, 5]
        metrics = scheduler.bias_meter.metrics()
        assert metrics["drops/stale"] == 2 and metrics["bias/prompts_never_trained"] == 4 / 6
        scheduler.stop()

    run(main)

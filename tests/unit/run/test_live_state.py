"""What a run says of itself while it goes on: the groups alive and who waits for whom."""

import asyncio
import math

from antiphon.core.deadlines import Deadlines
from antiphon.core.types import PolicyVersion
from antiphon.rollout.admission import Admission
from antiphon.rollout.config import RolloutConfig
from antiphon.run.live_state import MOST_GROUPS, count_waits, describe_window

CONFIG = {"groups_per_step": 2, "group_size": 2, "async_ratio": 1.0, "sampling": {"max_tokens": 8}}


def test_window_has_state_age_and_progress_of_each_group():
    admission = Admission(RolloutConfig(**CONFIG))
    attempts = [admission.admit()[1] for _ in range(4)]
    for attempt in (*attempts[0], *attempts[1], attempts[2][0]):
        admission.finish(attempt, True)
    assert admission.take() is not None
    found = describe_window(admission)
    assert found["groups"] == [[0, 0, "taken", 2], [1, 0, "taken", 2], [2, 0, "running", 1], [3, 0, "running", 0]]
    assert (found["groups_alive"], found["attempts"]) == (4, 3)
    admission.publish(PolicyVersion(0, 1))
    admission.finish(attempts[2][1], True)
    admission.admit()
    assert describe_window(admission)["groups"] == [[2, 1, "complete", 2], [3, 1, "running", 0], [4, 0, "running", 0]]


def test_window_before_the_first_group_is_empty():
    assert describe_window(None) == {"groups": [], "groups_alive": 0, "attempts": 0}


def test_large_window_lists_the_oldest_and_counts_all():
    groups = MOST_GROUPS
    admission = Admission(RolloutConfig(**CONFIG | {"groups_per_step": groups}))
    while admission.room:
        admission.admit()
    found = describe_window(admission)
    assert [group[0] for group in found["groups"]] == list(range(MOST_GROUPS))
    assert (found["groups_alive"], found["attempts"]) == (2 * groups, 4 * groups)


def test_waits_of_one_kind_are_counted_and_the_oldest_is_named():
    async def main():
        deadlines, loop = Deadlines(), asyncio.get_running_loop()
        never = loop.create_future()

        def begin(owner, name, on, deadline):
            waiting = deadlines.wait(asyncio.shield(never), name=name, owner=owner, on=on, deadline=deadline)
            return asyncio.create_task(waiting)

        tasks = [
            begin("attempt 0.0.0", "grade", "the grade of a", 5),
            begin("attempt 0.1.0", "grade", "the grade of b", 7),
            begin("learner", "groups", "groups to complete", 9),
        ]
        await asyncio.sleep(0)
        first = min(wait.since for wait in deadlines.open())
        found = count_waits(deadlines.open(), first + 2.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found, count_waits(deadlines.open(), loop.time())

    found, afterwards = asyncio.run(main())
    assert [(row["owner"], row["name"], row["on"], row["count"], row["deadline"]) for row in found] == [
        ("attempt 0.0.0", "grade", "the grade of a", 2, 5),
        ("learner", "groups", "groups to complete", 1, 9),
    ]
    assert math.isclose(found[0]["seconds"], 2.5)
    assert afterwards == []

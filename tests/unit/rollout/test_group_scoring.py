"""Siblings that are judged together: who waits for whom, who is judged with whom, and what is left behind."""

import asyncio

import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import StallError
from antiphon.core.types import AttemptId, AttemptStatus, Message, PolicyVersion, Prompt, Score
from antiphon.rollout.group_scoring import GroupScoring
from tests.unit.rollout.test_episode import Countdown, episodes_of

NOW = PolicyVersion(0, 0)
PROMPT = Prompt(id="p", task="t", messages=(Message("user", "ab"),), seed=3)


class Together:
    """Siblings in groups of three, whose own score is 1, and the rounds in which they were judged."""

    def __init__(self, *, tasks=("t",), world=None, timeout=60.0, verdicts=()):
        self.rounds = []
        self.verdicts = list(verdicts)
        self.gate = asyncio.Event()
        self.gate.set()
        self.siblings = GroupScoring(
            episodes_of(world=world, max_turns=4), self.judge, frozenset(tasks), 3, Deadlines(), timeout
        )

    async def judge(self, prompt, transcripts, scores):
        self.rounds.append([score.value for score in scores])
        await self.gate.wait()
        if self.verdicts:
            return [self.verdicts.pop(0)] * len(scores)
        return [Score.of(place) for place in range(len(scores))]

    def start(self, *attempts, group=0):
        return [
            asyncio.ensure_future(self.siblings.run(PROMPT, AttemptId(group, sibling, attempt), NOW))
            for sibling, attempt in attempts
        ]

    @property
    def left(self):
        return self.siblings._groups


def values(trajectories):
    return [trajectory.meta.score.value for trajectory in trajectories]


def test_first_finished_siblings_are_scored_in_sibling_order():
    async def run():
        stage = Together()
        late = stage.start((2, 0), (0, 0))
        while len(stage.left.get(0, ())) < 2:
            await asyncio.sleep(0)
        assert not stage.rounds
        return values(await asyncio.gather(*late, *stage.start((1, 0)))), stage

    found, stage = asyncio.run(run())
    assert found == [2.0, 0.0, 1.0]
    assert stage.rounds == [[1.0, 1.0, 1.0]] and not stage.left


def test_groups_do_not_mix():
    async def run():
        stage = Together()
        both = [*stage.start((0, 0), (1, 0), (2, 0), group=4), *stage.start((0, 0), (1, 0), (2, 0), group=5)]
        return values(await asyncio.gather(*both)), stage

    found, stage = asyncio.run(run())
    assert found == [0.0, 1.0, 2.0] * 2 and len(stage.rounds) == 2


def test_other_tasks_wait_for_nobody():
    async def run():
        stage = Together(tasks=("other",))
        return values(await asyncio.gather(*stage.start((0, 0)))), stage

    found, stage = asyncio.run(run())
    assert found == [1.0] and not stage.rounds


def test_failed_attempt_is_not_scored_with_its_group():
    async def run():
        stage = Together(world=lambda _: Countdown(broken=True))
        return await asyncio.gather(*stage.start((0, 0))), stage

    (failed,), stage = asyncio.run(run())
    assert failed.meta.status is AttemptStatus.FAILED and not stage.rounds and not stage.left


def test_without_a_verdict_all_fail_and_retries_wait_together():
    async def run():
        stage = Together(verdicts=[Score.ungraded("cannot tell")])
        stage.gate.clear()
        first = stage.start((0, 0), (1, 0), (2, 0))
        while not stage.rounds:
            await asyncio.sleep(0)
        redundant = stage.start((3, 0))
        stage.gate.set()
        failed = await asyncio.gather(*first)
        again = await asyncio.gather(*stage.start((0, 1), (1, 1)), *redundant)
        return failed, again, stage

    failed, again, stage = asyncio.run(run())
    assert {trajectory.meta.status for trajectory in failed} == {AttemptStatus.FAILED}
    assert failed[0].meta.failure.source == "reward" and failed[0].meta.failure.message == "cannot tell"
    assert values(again) == [0.0, 1.0, 2.0] and len(stage.rounds) == 2 and not stage.left


def test_an_aborted_attempt_is_forgotten():
    async def run():
        stage = Together()
        gone, stays = stage.start((0, 0), (1, 0))
        while len(stage.left.get(0, ())) < 2:
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        found = values(await asyncio.gather(stays, *stage.start((2, 0), (0, 1))))
        for other in (last := stage.start((0, 0), group=1)):
            while 1 not in stage.left:
                await asyncio.sleep(0)
            other.cancel()
        await asyncio.wait(last)
        return found, stage

    found, stage = asyncio.run(run())
    assert found == [1.0, 2.0, 0.0] and not stage.left


def test_nobody_waits_for_ever():
    async def run():
        await asyncio.gather(*Together(timeout=0.05).start((0, 0)))

    with pytest.raises(StallError, match=r"the siblings of attempt 0\.0\.0"):
        asyncio.run(run())

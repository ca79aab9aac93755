"""Graders of several nodes as one: what hosts counted is kept when another takes the place of one that died."""

import asyncio

from antiphon.core.deadlines import Deadlines
from antiphon.simulate.clock import run
from antiphon.tasks.grading.host import GradingHost, GradingHosts
from antiphon.tasks.grading.pool import GradingStats
from tests.unit.core.test_worker_set import PATIENCE, SILENCE, Handle


class CountingHandle(Handle):
    """Its replies count one process, and as many scores as its number says."""

    def __init__(self, number):
        super().__init__(f"host {number}")
        self.stats = GradingStats(scored=number, processes=1)

    def reply(self, reply):
        super().reply(reply._replace(state=self.stats))


def test_what_the_dead_counted_is_kept():
    started = []

    async def start(number):
        started.append(CountingHandle(10 ** len(started)))
        return GradingHost(started[-1])

    async def main():
        async with GradingHosts(start, 2, Deadlines(), lambda message: None, SILENCE) as hosts:
            await asyncio.sleep(1)
            assert hosts.stats == GradingStats(scored=11, processes=2)
            for dead in range(2):
                started[dead].kill()
                assert hosts.stats.scored == int("1" * len(started)), "before another takes its place"
                await asyncio.sleep(PATIENCE)
            assert hosts.stats == GradingStats(scored=1111, processes=4)

    run(main())

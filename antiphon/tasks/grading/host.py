"""A worker of the cluster that grades on its node, and the graders of several nodes as one.

The host grades nothing itself: it has the pools, whose processes it starts, grows, shrinks and replaces where it is. A
transcript goes to the host with the fewest open gradings. If a host dies, its gradings go to others, and another host takes its
place.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from antiphon.cluster.base import Place
from antiphon.cluster.devices import with_visible_gpus
from antiphon.core.deadlines import Deadlines
from antiphon.core.rpc import AsyncWorker, Client, Reply, handlers_of
from antiphon.core.types import Prompt, Score
from antiphon.core.worker_set import WorkerSet
from antiphon.core.workers import WorkerHandle
from antiphon.tasks.base import Transcript
from antiphon.tasks.grading.pool import GradingStats
from antiphon.tasks.grading.pools import GradingPools
from antiphon.tasks.grading.worker_process import START_SECONDS, PoolSettings


class GradingHostWorker(AsyncWorker):
    """The pools of one node."""

    def __init__(self, settings: Sequence[PoolSettings], place: Place, where: str) -> None:
        """Prepare to start pools.

        Args:
            settings: Settings of each pool.
            place: Node and devices of this worker; without GPUs its processes see none.
            where: Name of this worker and of its node, for the records of verdicts.
        """
        self._settings = settings
        self._gpus = with_visible_gpus(place, place.gpus).gpus
        self._where = where
        self._pools: GradingPools | None = None
        super().__init__()

    @override
    def _state(self) -> GradingStats:
        return self._pools.stats if self._pools else GradingStats()

    @override
    async def _live(self) -> None:
        pools = GradingPools(self._settings, Deadlines(), gpus=self._gpus, where=f" of {self._where}")
        async with pools, asyncio.TaskGroup() as owner:
            self._pools = pools
            await self._serve(owner, handlers_of(pools) | {"health": _stay_healthy})


async def _stay_healthy() -> None:
    """Answer that the worker's event loop runs."""


LONGEST_SECONDS = 86_400.0  # of a grading: far more than a host's pool lets one take


class GradingHost(Client):
    """A host as the controller sees it."""

    def __init__(self, handle: WorkerHandle) -> None:
        self.stats = GradingStats()
        super().__init__(handle)

    @override
    def _on_reply(self, reply: Reply) -> None:
        self.stats = reply.state
        super()._on_reply(reply)


class GradingHosts:
    """The hosts of a run as one grader. Use as `async with`."""

    def __init__(
        self,
        start: Callable[[int], Awaitable[GradingHost]],
        count: int,
        deadlines: Deadlines,
        report: Callable[[str], None],
        silence: float,
    ) -> None:
        """Prepare to start hosts.

        Args:
            start: Starts the host of a number; `WorkerDiedError` if it cannot be started now.
            count: Number of hosts.
            deadlines: Bounds all waits.
            report: Receives a message about each host that was lost.
            silence: Seconds without an answer after which a host is killed.
        """
        self._deadlines = deadlines
        self._replaced = GradingStats()  # sums of hosts whose place another one took
        self._hosts: WorkerSet[GradingHost] = WorkerSet(
            "graders",
            start,
            count,
            deadlines,
            report,
            silence=silence,
            patience=START_SECONDS,
            on_replaced=self._add_lost,
        )

    @property
    def stats(self) -> GradingStats:
        """Sums of the statistics of all hosts, the dead included."""
        return GradingStats.sum([self._replaced, *(host.stats for host in self._hosts.latest)])

    def _add_lost(self, host: GradingHost, lost: GradingHost) -> None:
        self._replaced = GradingStats.sum([self._replaced, lost.stats])

    async def __aenter__(self) -> "GradingHosts":
        """Start all hosts; `ConfigError` if a reward cannot be built."""
        await self._hosts.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._hosts.close()

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Return the score by the task's reward, or the reason why there is none."""
        score: Score = await self._wait(self._hosts.call("score", prompt, transcript), prompt)
        return score

    async def score_group(
        self, prompt: Prompt, transcripts: Sequence[Transcript], scores: Sequence[Score]
    ) -> tuple[Score, ...]:
        """Return the final scores of siblings by the task's group reward: of all siblings, or of none."""
        judging = self._hosts.call("score_group", prompt, transcripts, scores)
        judged: tuple[Score, ...] = await self._wait(judging, prompt)
        return judged

    async def start_profile(self, memory: bool) -> None:
        """Begin to profile the processes of all hosts."""
        await self._call_all("start_profile", memory)

    async def write_profile(self, folder: Path, prefix: str) -> None:
        """Write these profiles."""
        await self._call_all("write_profile", folder, prefix)

    async def _call_all(self, method: str, *args: Any) -> None:
        hosts = self._hosts
        await asyncio.gather(*(hosts.unless_dead(each, each.call(method, *args)) for each in hosts.alive))

    async def _wait(self, grading: Awaitable[Any], prompt: Prompt) -> Any:
        """Await a grading as a wait that others see; the host's own pool ends it in time."""
        on = f"the grade of prompt {prompt.id}"
        return await self._deadlines.wait(grading, name="grade", owner="attempt", on=on, deadline=LONGEST_SECONDS)

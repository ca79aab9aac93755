"""The grading pools of one machine, as one grader of many tasks."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from antiphon.core.deadlines import Deadlines
from antiphon.core.profiles import Profiled
from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.grading.gpus import GpuAssigner
from antiphon.tasks.grading.pool import GradingPool, GradingStats
from antiphon.tasks.grading.worker_process import PoolSettings


class Grader(Protocol):
    """Runs rewards. Use as `async with`."""

    @property
    def stats(self) -> GradingStats:
        """Gradings so far, and processes started."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Return the score by the task's reward, or the reason why there is none."""


class Pools(Grader, Profiled, Protocol):
    """Runs rewards of transcripts and of groups, in processes."""

    async def score_group(
        self, prompt: Prompt, transcripts: Sequence[Transcript], scores: Sequence[Score]
    ) -> tuple[Score, ...]:
        """Return the final scores of siblings by the task's group reward: of all siblings, or of none."""


async def start_together(graders: Iterable[Grader]) -> Callable[[], Awaitable[None]]:
    """Enter all graders at once, or none; return the function that leaves them.

    Raises:
        ConfigError: A reward cannot be built.
    """
    exits = AsyncExitStack()
    starts = [asyncio.ensure_future(exits.enter_async_context(each)) for each in graders]
    try:
        await asyncio.gather(*starts)
    except BaseException:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        await exits.aclose()
        raise
    return exits.aclose


class GradingPools:
    """Pools of processes on this machine. Use as `async with`; leaving it leaves no process behind."""

    def __init__(
        self,
        settings: Sequence[PoolSettings],
        deadlines: Deadlines,
        cores: Sequence[int] = (),
        gpus: Sequence[str] | None = None,
        where: str = "",
    ) -> None:
        """Create the pools.

        Args:
            settings: Settings of each pool; no two have a reward for the same task.
            deadlines: Bounds all waits.
            cores: CPU cores that processes are held to; empty is all.
            gpus: GPUs of which each process sees one; empty hides all GPUs, None leaves them as they are.
            where: Where this machine is, for the records of verdicts.
        """
        shared = None if gpus is None else GpuAssigner(gpus)  # by all pools
        self._pools = [GradingPool(each, deadlines, cores, shared, where) for each in settings]
        pools = list(zip(settings, self._pools, strict=True))
        self._of = {task: pool for each, pool in pools for task in each.rewards}
        self._together = {task: pool for each, pool in pools for task in each.group_rewards}
        self._stop: Callable[[], Awaitable[None]] | None = None

    @property
    def stats(self) -> GradingStats:
        """Sums of the statistics of all pools."""
        return GradingStats.sum(pool.stats for pool in self._pools)

    async def __aenter__(self) -> Self:
        """Start all processes; `ConfigError` if a reward cannot be built."""
        self._stop = await start_together(self._pools)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stop is not None:
            await self._stop()

    async def start_profile(self, memory: bool) -> None:
        """Begin to profile all processes; see `core.profiles.Profiled`."""
        await asyncio.gather(*(pool.start_profile(memory) for pool in self._pools))

    async def write_profile(self, folder: Path, prefix: str) -> None:
        """Write these profiles."""
        writes = (pool.write_profile(folder, f"{prefix}grading-{n}-") for n, pool in enumerate(self._pools))
        await asyncio.gather(*writes)

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Return the score by the task's reward, or the reason why there is none."""
        return await self._of[prompt.task].score(prompt, transcript)

    async def score_group(
        self, prompt: Prompt, transcripts: Sequence[Transcript], scores: Sequence[Score]
    ) -> tuple[Score, ...]:
        """Return the final scores of siblings by the task's group reward: of all siblings, or of none."""
        return await self._together[prompt.task].score_group(prompt, transcripts, scores)

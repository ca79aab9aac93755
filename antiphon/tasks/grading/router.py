"""Each task's transcripts go to what runs its reward.

Tasks share the processes of the run's `grading`; one with a `grading` of its own has its own processes, so a slow reward
never holds up the others. A reward that is `async def` waits for someone else to judge: it runs here, many at a time.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import AntiphonError, BudgetError, ConfigError, StallError, WorkerDiedError
from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.core.user_errors import describe_error
from antiphon.tasks.base import FLAG_PREFIX, AsyncReward, Generate, Transcript, UnreachableError, as_score
from antiphon.tasks.config import GradingConfig, TaskConfig
from antiphon.tasks.grading.pool import GradingStats
from antiphon.tasks.grading.pools import Grader, GradingPools, Pools, start_together
from antiphon.tasks.grading.worker import marked
from antiphon.tasks.grading.worker_process import PoolSettings
from antiphon.tasks.rewards import COMPOSED, build_reward, is_asynchronous, reads_only_text
from antiphon.tasks.rewards.composed import Composition
from antiphon.tasks.rewards.judge_options import remote_judge_key, without_remote
from antiphon.tasks.rewards.reward_model import ClassifierOptions, Classify, iterate_classifiers


class _Pool(NamedTuple):
    """Whose rewards share processes."""

    task: str  # the only one, or none: those without a `grading` of their own
    confined: bool


def _confined(reward: str, options: Mapping[str, Any], settings: GradingConfig) -> bool:
    return settings.confine == "all" or (settings.confine == "built_in" and reads_only_text(reward, options))


class AsyncGrader:
    """Runs one `async def` reward in the event loop, `config.concurrency` gradings at a time."""

    def __init__(
        self, task: str, name: str, options: Mapping[str, Any], config: GradingConfig, deadlines: Deadlines
    ) -> None:
        self.stats = GradingStats()
        self._deadlines = deadlines
        self._where = f"task {task!r}, reward {name!r}"
        self._name, self._options = name, options
        self._config = config
        self._seats = asyncio.Semaphore(config.concurrency)
        self._reward: AsyncReward | None = None

    async def __aenter__(self) -> Self:
        """Build the reward; `ConfigError` if that cannot be done."""
        try:
            self._reward = build_reward(self._name, self._options)
        except AntiphonError:
            raise
        except Exception as error:  # named boundary: user code; it ends the run with this message
            raise ConfigError(f"{self._where}: {describe_error(error)}", value=self._name) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close = getattr(self._reward, "close", None)
        self._reward = None
        if close is not None and inspect.isawaitable(closing := close()):
            await closing

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Return the score by the reward; a time-out counts as failed infrastructure, since the response did not cause it.

        Raises:
            WorkerDiedError: It was closed, or what the reward asks is gone.
            StallError: What the reward asks did not come.
            BudgetError: What the reward asks has cost its budget.
        """
        if self._reward is None:
            raise WorkerDiedError(f"{self._where}: was closed")
        async with self._seats:
            limit = asyncio.timeout(self._config.deadline)
            try:
                async with limit:
                    verdict = await self._wait(self._reward(prompt, transcript), prompt)
                score = replace(marked(as_score(verdict), prompt, transcript), grader="the run's process")
            except (WorkerDiedError, StallError, BudgetError):
                raise
            except Exception as error:  # noqa: BLE001 - named boundary: user code
                return self._failed(error, limit.expired())
        if score.status is ScoreStatus.SCORED:
            self.stats.scored += 1
        else:
            self.stats.ungraded += 1
        return score

    async def _wait(self, verdict: Awaitable[Any], prompt: Prompt) -> Any:
        """Await a verdict as a wait that others see; `score` ends it in time."""
        on, deadline = f"the grade of prompt {prompt.id}", 2 * self._config.deadline
        return await self._deadlines.wait(verdict, name="grade", owner="attempt", on=on, deadline=deadline)

    def _failed(self, error: Exception, late: bool) -> Score:
        if late:
            self.stats.timed_out += 1
            return Score(status=ScoreStatus.INFRASTRUCTURE, detail=f"timed out after {self._config.deadline:g} s")
        if isinstance(error, UnreachableError):
            self.stats.died += 1
            return Score(status=ScoreStatus.INFRASTRUCTURE, detail=str(error))
        self.stats.raised += 1
        return Score.ungraded(describe_error(error, self._reward), raised=True)


class RewardRouter:
    """All that grades in a run. Use as `async with`; leaving it leaves no process behind."""

    def __init__(
        self,
        tasks: Sequence[TaskConfig],
        config: GradingConfig,
        deadlines: Deadlines,
        generate: Mapping[str, Generate] | None = None,
        classify: Mapping[ClassifierOptions, Classify] | None = None,
        remote: Mapping[str, Generate] | None = None,
        make_pools: Callable[[Sequence[PoolSettings]], Pools] | None = None,
    ) -> None:
        """Set up the pools and graders of all tasks.

        Args:
            tasks: Tasks to grade.
            config: The run's settings, for tasks without `grading` of their own.
            deadlines: Deadlines of all waits.
            generate: For each task with a judge, the callable that queries it.
            classify: For each reward model, the callable that queries it.
            remote: For each remote judge, by `remote_judge_key`, the callable that queries it. Else rewards have their own.
            make_pools: Makes the pools of processes; by default they are on this machine, and see its devices.
        """
        self._of: dict[str, Grader] = {}
        self._ranges = {task.name: task.reward_range for task in tasks if task.reward_range}
        self._compositions: dict[str, Composition] = {}
        self._stop: Callable[[], Awaitable[None]] | None = None
        alone: dict[_Pool, dict[str, Any]] = {}
        together: dict[_Pool, dict[str, Any]] = {}
        for task in (each for each in tasks if not each.route):
            own, grading = (task.name, task.grading) if task.grading else ("", config)
            for name, (reward, options) in self._apart(task).items():
                if is_asynchronous(reward):
                    asking: dict[str, Any] = {}
                    if generate and task.name in generate:
                        asking["generate"] = generate[task.name]
                    if classify and (models := [*iterate_classifiers(reward, options)]):
                        asking["classify"] = classify[models[0]]
                    if remote and reward == "judge" and "address" in options:
                        asking["generate"] = remote[remote_judge_key(options)]
                        options = without_remote(options)
                    self._of[name] = AsyncGrader(name, reward, {**options, **asking}, grading, deadlines)
                else:
                    alone.setdefault(_Pool(own, _confined(reward, options, grading)), {})[name] = reward, options
            if task.group_reward:
                judged = task.group_reward, task.group_reward_options
                together.setdefault(_Pool(own, _confined(*judged, grading)), {})[task.name] = judged
        own_settings = {task.name: task.grading for task in tasks if task.grading}
        settings = [
            PoolSettings(
                rewards=alone.get(key, {}),
                group_rewards=together.get(key, {}),
                config=own_settings.get(key.task, config),
                confined=key.confined,
            )
            for key in alone.keys() | together.keys()
        ]
        self._pools = (make_pools or partial(GradingPools, deadlines=deadlines))(settings)
        self._of |= {name: self._pools for each in settings for name in each.rewards}

    @property
    def _all(self) -> set[Grader]:
        return {*self._of.values(), self._pools}

    @property
    def stats(self) -> GradingStats:
        """Sums of the statistics of all graders."""
        return GradingStats.sum(grader.stats for grader in self._all)

    async def __aenter__(self) -> Self:
        """Start all that grades, at once; `ConfigError` if a reward cannot be built."""
        self._stop = await start_together(self._all)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stop is not None:
            await self._stop()

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Return the score by the task's reward, or the reason why there is none.

        Raises:
            ConfigError: The task has no reward.
            WorkerDiedError: The task's grader cannot go on.
        """
        if prompt.task in self._compositions:
            composition = self._compositions[prompt.task]
            names = [f"{prompt.task}/{part}" for part in composition.parts]
            parts = await asyncio.gather(*(self._of[n].score(replace(prompt, task=n), transcript) for n in names))
            score = composition.score(dict(zip(composition.parts, parts, strict=True)))
        elif prompt.task in self._of:
            score = await self._of[prompt.task].score(prompt, transcript)
        else:
            known = sorted(self._of.keys() | self._compositions.keys())
            message = f"there is no reward for task {prompt.task!r}: {', '.join(known)} have one"
            raise ConfigError(message, key="tasks", value=prompt.task, valid=known)
        return self._in_range(prompt.task, score)

    async def start_profile(self, memory: bool) -> None:
        """Begin to profile all processes that grade; see `core.profiles.Profiled`."""
        await self._pools.start_profile(memory)

    async def write_profile(self, folder: Path, prefix: str) -> None:
        """Write these profiles."""
        await self._pools.write_profile(folder, prefix)

    def _apart(self, task: TaskConfig) -> dict[str, tuple[str, Mapping[str, Any]]]:
        """Return the rewards of a task by the name under which they are graded.

        It is the task's own; for a composition with an `async def` part, one name a part.
        """
        if task.reward in COMPOSED:
            composition = Composition(**task.reward_options)
            if any(is_asynchronous(part.reward) for part in composition.parts.values()):
                self._compositions[task.name] = composition
                return {f"{task.name}/{name}": (part.reward, part.options) for name, part in composition.parts.items()}
        return {task.name: (task.reward, task.reward_options)}

    async def score_group(
        self, prompt: Prompt, transcripts: Sequence[Transcript], scores: Sequence[Score]
    ) -> tuple[Score, ...]:
        """Return the final scores of siblings by the task's group reward: of all siblings, or of none."""
        judged = await self._pools.score_group(prompt, transcripts, scores)
        return tuple(self._in_range(prompt.task, score) for score in judged)

    def _in_range(self, task: str, score: Score) -> Score:
        """Return the score, flagged if it is outside the reward range of its task."""
        least, most = self._ranges.get(task, (-math.inf, math.inf))
        if score.value is not None and not least <= score.value <= most:
            return replace(score, parts={**score.parts, FLAG_PREFIX + "out_of_range": 1.0})
        return score

"""Keeps attempts running: admits groups while there is room, one asyncio task an attempt, and hands over steps of groups.

No barrier: an attempt that ends makes room, or completes its group, by itself. `Admission` decides; this obeys.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from antiphon.errors import RolloutError
from antiphon.rollout.admission import Admission, Change
from antiphon.types import (
    AttemptId,
    AttemptStatus,
    Group,
    GroupOutcome,
    PolicyVersion,
    Prompt,
    Trajectory,
)
from antiphon.waits import Waits

FILTERED_IN_A_ROW = 1000  # groups without one to train on, after which a filter is taken to reject everything

RunAttempt = Callable[[Prompt, AttemptId, PolicyVersion], Awaitable[Trajectory]]
KeepGroup = Callable[[Group], bool]


@dataclass(slots=True)
class _OpenGroup:
    prompt: Prompt
    trajectories: dict[int, Trajectory] = field(default_factory=dict)  # sibling -> its usable trajectory


class Scheduler:
    """The producing half of the loop.

    consumes  prompts, one a group
    waits for room in the freshness window
    unblocked by an attempt that ends, a group that is filtered, a version that is published
    produces  groups; `next_step` gives those of one training step
    """

    def __init__(
        self,
        *,
        admission: Admission,
        next_prompt: Callable[[], Prompt],
        run_attempt: RunAttempt,
        keep: KeepGroup | None,
        waits: Waits,
        timeout: float,
    ) -> None:
        self.admission = admission
        self.groups_ended: Counter[GroupOutcome] = Counter()
        self.failures: Counter[str] = Counter()
        self.last_failure = ""
        self._fruitless = 0  # groups in a row that ended without anything to train on
        self._next_prompt = next_prompt
        self._run_attempt = run_attempt
        self._keep = keep
        self._waits = waits
        self._timeout = timeout
        self._open: dict[int, _OpenGroup] = {}
        self._tasks: dict[AttemptId, asyncio.Task[None]] = {}
        self._owner: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()

    def start(self, owner: asyncio.TaskGroup) -> None:
        """Begin to admit; `owner` owns the attempts' tasks, so an error in one ends the run."""
        self._owner = owner
        self._admit()

    async def next_step(self) -> list[Group]:
        """The B groups of the next training step, as soon as they are there."""
        while (taken := self.admission.take()) is None:
            self._changed.clear()
            await self._waits.wait(
                self._changed.wait(), name="groups", owner="learner", on="groups to complete", deadline=self._timeout
            )
        return [self._close_group(group) for group in taken]

    def publish(self) -> PolicyVersion:
        """A version was published: release slots, drop what became too old, admit. Returns the new version."""
        self._abort(self.admission.publish())
        for group in [group for group in self._open if self.admission.state(group) is None]:
            self._drop(group, GroupOutcome.STALE)
        self._admit()
        return self.admission.version

    def drain(self, outcome: GroupOutcome) -> int:
        """Groups that ended so since this was last asked."""
        count = self.groups_ended[outcome]
        self.groups_ended[outcome] = 0
        return count

    def stop(self) -> None:
        """Cancel every attempt; nothing is admitted afterwards."""
        self._owner = None
        self._abort(self.admission.close())
        self._open.clear()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._owner is not None and self.admission.room > 0:
            prompt = self._next_prompt()
            attempts = self.admission.admit()
            self._open[attempts[0].group] = _OpenGroup(prompt)
            for attempt in attempts:
                self._start(attempt)

    def _start(self, attempt: AttemptId) -> None:
        assert self._owner is not None
        self._tasks[attempt] = self._owner.create_task(self._attempt(attempt), name=f"attempt {attempt}")

    async def _attempt(self, attempt: AttemptId) -> None:
        """One attempt. Ends by itself, or is cancelled when nobody needs it any more."""
        started = self.admission.started(attempt)
        trajectory = await self._run_attempt(self._open[attempt.group].prompt, attempt, started)
        del self._tasks[attempt]
        usable = trajectory.meta.status is AttemptStatus.FINISHED
        if usable:
            self._open[attempt.group].trajectories[attempt.sibling] = trajectory
        elif trajectory.meta.failure is not None:
            self.failures[trajectory.meta.failure.source] += 1
            self.last_failure = trajectory.meta.failure.message
        self._obey(attempt.group, self.admission.finish(attempt, usable))

    def _obey(self, group: int, change: Change) -> None:
        self._abort(change.abort)
        if change.retry is not None:
            self._start(change.retry)
        if change.failed:
            self._drop(group, GroupOutcome.FAILED)
            self._count_fruitless("failed", f": {self.last_failure}", limit=self.admission.config.groups_per_step)
        elif change.completed and self._keep is not None and not self._keep(self._group(group)):
            self.admission.filter(group)
            self._drop(group, GroupOutcome.FILTERED)
            self._count_fruitless("were filtered out", "", limit=FILTERED_IN_A_ROW)
        elif change.completed:
            self._fruitless = 0
        if change.failed or change.completed:
            self._admit()
            self._changed.set()

    def _count_fruitless(self, what: str, why: str, limit: int) -> None:
        """End a run that would otherwise produce nothing for ever."""
        self._fruitless += 1
        if self._fruitless >= limit:
            raise RolloutError(
                f"the last {self._fruitless} groups {what}, and none in between could be trained on{why}"
            )

    def _abort(self, attempts: tuple[AttemptId, ...]) -> None:
        for attempt in attempts:
            if (task := self._tasks.pop(attempt, None)) is not None:
                task.cancel()

    def _group(self, group: int) -> Group:
        held = self._open[group]
        ordered = tuple(held.trajectories[sibling] for sibling in sorted(held.trajectories))
        return Group(id=group, prompt=held.prompt, trajectories=ordered, outcome=GroupOutcome.COMPLETE)

    def _close_group(self, group: int) -> Group:
        closed = self._group(group)
        self._drop(group, GroupOutcome.COMPLETE)
        return closed

    def _drop(self, group: int, outcome: GroupOutcome) -> None:
        if self._open.pop(group, None) is not None:
            self.groups_ended[outcome] += 1

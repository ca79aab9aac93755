"""Keeps attempts running: admits groups while there is room, one asyncio task an attempt, and hands over steps of groups.

No barrier: an attempt that ends makes room, or completes its group, by itself. `Admission` decides; this obeys.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import RolloutError
from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    Group,
    GroupOutcome,
    PolicyVersion,
    Prompt,
    Trajectory,
)
from antiphon.record.ledger import Ledger
from antiphon.record.resume import ReusableRollout, ReusableRollouts
from antiphon.rollout.admission import Admission, Change
from antiphon.rollout.attempt import AttemptRunner, UnscoredAttempt
from antiphon.rollout.config import Policy, RolloutConfig
from antiphon.rollout.reward_monitor import RewardMonitor
from antiphon.rollout.sampling_loop import SamplingGroup, SamplingLoop
from antiphon.rollout.selection_bias import BiasMeter

FILTERED_IN_A_ROW = 1000  # complete groups without one to train on, after which a filter is taken to reject everything

DROPPED = frozenset(AttemptStatus) - {AttemptStatus.RUNNING, AttemptStatus.FINISHED, AttemptStatus.TRAINED}

GroupFilter = Callable[[Group], bool]


@dataclass(slots=True)
class _OpenGroup:
    prompt: Prompt
    since: float
    loop: asyncio.Task[None] | None = None  # the user's own
    trajectories: dict[int, Trajectory] = field(default_factory=dict)  # sibling -> its usable trajectory
    heard: int = 0  # of the ledger, when the last of them came


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
        config: RolloutConfig,
        version: PolicyVersion,
        next_prompt: Callable[[], Prompt],
        episodes: AttemptRunner,
        sampler: SamplingLoop | None = None,
        keep: GroupFilter | None,
        deadlines: Deadlines,
        ledger: Ledger,
    ) -> None:
        self.config = config
        self.admission = Admission(config, version, self._changed_to)
        self.bias_meter = BiasMeter()
        self.reward_monitor = RewardMonitor()
        self.groups_ended: Counter[GroupOutcome] = Counter()
        self.failures: Counter[str] = Counter()
        self.last_failure = ""
        self._failed_in_a_row = 0  # groups, without one between them that was complete
        self._filtered_in_a_row = 0  # complete groups, without one between them to train on
        self._next_prompt = next_prompt
        self._episodes = episodes
        self._sampler = sampler
        self._keep = keep
        self._deadlines = deadlines
        self._ledger = ledger
        self._returning = ReusableRollouts()
        self._open: dict[int, _OpenGroup] = {}
        self._long_round = False
        self._deferred: deque[Prompt] = deque()  # tail batching: prompts that wait for a long round
        self._admitting = False
        self._heard_of_step = 0  # of the ledger, when the last of its trajectories came
        self._hurried = False  # the ledger, for the step that comes next
        self._again: deque[tuple[int, Prompt]] = deque()  # groups that were live at the cut
        self._tasks: dict[AttemptId, asyncio.Task[None]] = {}
        self._owner: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        ledger.balance = self._balance

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON takes it; to be asked for between two steps."""
        live = [(group, _identity(self._open[group].prompt)) for group in self.admission.groups()]
        deferred = [_identity(prompt) for prompt in self._deferred]
        if self._long_round:  # it will begin again
            live, deferred = [], [identity for _, identity in live] + deferred
        return {"next_group": self.admission.next_group, "live": live, "deferred": deferred}

    def restore(
        self, state: Mapping[str, Any], find: Callable[[str, str, int], Prompt], returning: ReusableRollouts
    ) -> None:
        """Go on where `state` was taken, before `start`: prompts of groups that were live are offered again, under their
        numbers. `find` gives the prompt of a task, id and epoch; `returning` what earlier lives have left to be trained on."""
        self._returning = returning
        self.admission.next_group = state["next_group"]
        self._again.extend((group, find(*identity)) for group, identity in state["live"])
        self._deferred.extend(find(*identity) for identity in state["deferred"])

    def start(self, owner: asyncio.TaskGroup) -> None:
        """Begin to admit; `owner` owns the attempts' tasks, so an error in one ends the run."""
        self._owner = owner
        self.admit()

    async def next_step(self) -> list[Group]:
        """The B groups of the next training step, as soon as they are there."""
        while (taken := self.admission.take()) is None:
            self._changed.clear()
            await self._wait(self._changed.wait(), "groups", "groups to complete")
        chosen, change = taken
        self._ledger.begin_step(chosen)
        self._obey_stale(change)
        self._heard_of_step = max(self._open[group].heard for group in chosen)
        groups = [self._close_group(group) for group in chosen]
        self._hurried = False
        self._hurry()
        for group in groups:
            self.bias_meter.record_training(group)
        self.reward_monitor.record_training(groups)
        return groups

    async def wait_durable(self) -> None:
        """Return when what the step in hand trains on is durable; mostly it was before it was asked for."""
        await self._wait(self._ledger.wait_durable(self._heard_of_step), "commit", "the ledger")

    def publish(self) -> PolicyVersion:
        """A version was published: release slots, drop what became too old. Returns the new version; `admit` goes on."""
        change = self.admission.publish()
        self._ledger.end_step(self.admission.version)
        self._obey_stale(change)
        return self.admission.version

    def take_group_count(self, outcome: GroupOutcome) -> int:
        """Groups that ended so since this was last asked."""
        count = self.groups_ended[outcome]
        self.groups_ended[outcome] = 0
        return count

    def stop(self) -> None:
        """Cancel every attempt; nothing is admitted afterwards."""
        self._owner = None
        self._abort(self.admission.close())
        for group in list(self._open):
            self._drop(group, GroupOutcome.CANCELLED)

    def admit(self) -> None:
        """Let groups in while there is room."""
        if self._admitting:  # a group that was taken over is complete as it is admitted
            return
        self._admitting, begun = True, False
        while self._owner is not None:
            # A round whose groups were all taken over is over before it is seen to run.
            if self.config.in_rounds and not self.admission.running and not (begun and self.admission.room > 0):
                self._begin_round()
            begun = True
            if self.admission.room <= 0:
                break
            self._admit(*self._next())
        self._admitting = False

    # --- inside --------------------------------------------------------------------------------------------------------

    async def _wait(self, awaitable: Awaitable[Any], name: str, on: str) -> None:
        deadline, key = self.config.timeout, "rollout.timeout"
        await self._deadlines.wait(awaitable, name=name, owner="learner", on=on, deadline=deadline, key=key)

    def _next(self) -> tuple[int | None, Prompt]:
        """The prompt of the next group, with the group's number if it has one."""
        if self._again:
            return self._again.popleft()
        return None, self._deferred.popleft() if self._long_round else self._next_prompt()

    def _admit(self, number: int | None, prompt: Prompt) -> None:
        assert self._owner is not None
        found: Mapping[int, ReusableRollout] = {}
        if self._returning.by_prompt and self._sampler is None:
            found = self._returning.take(prompt, self.admission.oldest_start)
        group, attempts = self.admission.admit(number, {sibling: kept.started for sibling, kept in found.items()})
        opened = self._open[group] = _OpenGroup(prompt, asyncio.get_running_loop().time())
        self._ledger.add_group(group, prompt, self.admission.version)
        for attempt in attempts:
            if attempt.sibling not in found:
                self._start(attempt)
        for attempt in attempts:
            if attempt.sibling in found:
                self._take_over(attempt, found[attempt.sibling])
        if self._sampler is not None:
            opened.loop = self._owner.create_task(self._sample(group, self._sampler), name=f"group {group}")

    def _take_over(self, attempt: AttemptId, kept: ReusableRollout) -> None:
        """An attempt ends as it began: with what an earlier life of the run has finished."""
        trajectory = kept.trajectory(attempt)
        self.bias_meter.record_dispatch(trajectory.meta.task, trajectory.meta.prompt_id)
        self._ledger.add_reused_trajectory(trajectory, kept.origin, kept.file)
        self._heard(trajectory)

    def _hurry(self) -> None:
        """What the next step will be trained on is to be durable before it is asked for."""
        if not self._hurried and self.admission.ready:
            self._hurried = True
            self._ledger.request_commit()

    def _begin_round(self) -> None:
        size = self.config.groups_per_step
        self._long_round = self.config.policy is Policy.TAIL_BATCHING and len(self._deferred) >= size
        if self._long_round:
            self.admission.begin_round(size, redundancy=0)
        else:
            extra = 0 if self.config.policy is Policy.BATCH else self.config.extra_groups
            self.admission.begin_round(size + extra, self.config.redundancy)

    def _start(self, attempt: AttemptId) -> None:
        assert self._owner is not None
        prompt = self._open[attempt.group].prompt
        self.bias_meter.record_dispatch(prompt.task, prompt.id)
        self._tasks[attempt] = self._owner.create_task(self._attempt(attempt), name=f"attempt {attempt}")

    async def _attempt(self, attempt: AttemptId) -> None:
        """One attempt. Ends by itself, or is cancelled when nobody needs it any more."""
        started = self.admission.started(attempt)
        trajectory = await self._episodes.run(self._open[attempt.group].prompt, attempt, started)
        if self._tasks.pop(attempt, None) is not None:  # else it was cancelled, and its environment failed to close
            self._ended(trajectory)

    def _ended(self, trajectory: Trajectory) -> None:
        self._ledger.add_trajectory(trajectory)
        self._heard(trajectory)

    def _heard(self, trajectory: Trajectory) -> None:
        attempt = trajectory.meta.id
        usable = trajectory.meta.status is AttemptStatus.FINISHED
        self.bias_meter.record_finish(trajectory.meta)
        self.reward_monitor.record_finish(trajectory.meta)
        if usable and attempt.group in self._open:
            held = self._open[attempt.group]
            held.trajectories[attempt.sibling], held.heard = trajectory, self._ledger.sequence_number
        elif trajectory.meta.failure is not None:
            self.failures[trajectory.meta.failure.source] += 1
            self.last_failure = trajectory.meta.failure.message
        self._obey(attempt.group, self.admission.finish(attempt, usable))

    async def _sample(self, group: int, sampler: SamplingLoop) -> None:
        """A group in the hands of the user's own loop."""
        prompt = self._open[group].prompt

        async def generate(sampling: dict[str, Any]) -> UnscoredAttempt:
            attempt = self.admission.start(group)
            self.bias_meter.record_dispatch(prompt.task, prompt.id)
            try:
                return await self._episodes.generate(
                    prompt, attempt, self.admission.started(attempt), self.config.sampling.sampling(**sampling)
                )
            except asyncio.CancelledError:
                self.admission.drop(attempt)
                raise

        async def reward(played: UnscoredAttempt) -> Trajectory:
            trajectory = await self._episodes.score(played)
            self._ended(trajectory)
            return trajectory

        await sampler(SamplingGroup(prompt, self.config.group_size, generate, reward, self.admission.drop))
        self._obey(group, self.admission.give_up(group))

    def _obey(self, group: int, change: Change) -> None:
        self._abort(change.abort)
        if change.retry is not None:
            self._start(change.retry)
        if change.failed:
            self._drop(group, GroupOutcome.FAILED)
            self._count_failed()
        elif change.completed and self._keep is not None and not self._keep(self._group(group)):
            self.admission.filter(group)
            self._drop(group, GroupOutcome.FILTERED)
            self._count_filtered()
        elif change.completed:
            self._failed_in_a_row = self._filtered_in_a_row = 0
            self._end_loop(group)
            self._hurry()
        if change.failed or change.completed:
            self.admit()
            self._changed.set()

    def _obey_stale(self, change: Change) -> None:
        self._abort(change.abort)
        for group in change.stale:
            if self.config.policy is Policy.TAIL_BATCHING:
                self._deferred.append(self._open[group].prompt)
            self._drop(group, GroupOutcome.STALE)

    def _changed_to(self, attempt: AttemptId, status: AttemptStatus) -> None:
        if status is AttemptStatus.RUNNING:
            self._ledger.add_attempt(attempt, self.admission.started(attempt))
        else:
            self._ledger.set_status(attempt, status)
        if status in DROPPED and (group := self._open.get(attempt.group)):
            self.bias_meter.record_drop(status, asyncio.get_running_loop().time() - group.since)

    def _count_failed(self) -> None:
        """End a run in which no group is complete any more."""
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self.config.groups_per_step:
            raise RolloutError(f"the last {self._failed_in_a_row} groups failed: {self.last_failure}")

    def _count_filtered(self) -> None:
        """End a run whose filter rejects everything. A group that fails in between tells nothing of the filter."""
        self._failed_in_a_row = 0
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= FILTERED_IN_A_ROW:
            raise RolloutError(
                f"the last {self._filtered_in_a_row} complete groups were filtered out (rollout.filter), and none could be "
                "trained on"
            )

    def _abort(self, attempts: tuple[AttemptId, ...]) -> None:
        for attempt in attempts:
            if (task := self._tasks.pop(attempt, None)) is not None:
                task.cancel()

    def _end_loop(self, group: int) -> None:
        loop = self._open[group].loop
        if loop is not None:
            loop.cancel()

    def _group(self, group: int) -> Group:
        held = self._open[group]
        ordered = tuple(held.trajectories[sibling] for sibling in sorted(held.trajectories))
        return Group(id=group, prompt=held.prompt, trajectories=ordered, outcome=GroupOutcome.COMPLETE)

    def _close_group(self, group: int) -> Group:
        closed = self._group(group)
        self._drop(group, GroupOutcome.COMPLETE)
        return closed

    def _drop(self, group: int, outcome: GroupOutcome) -> None:
        if group in self._open:
            self._end_loop(group)
            del self._open[group]
            self.groups_ended[outcome] += 1
            self._ledger.end_group(group, outcome)

    def _balance(self) -> dict[str, int]:
        return {"dispatched": self.admission.dispatched} | {str(k): n for k, n in self.admission.ended.items()}


def _identity(prompt: Prompt) -> tuple[str, str, int]:
    return prompt.task, prompt.id, prompt.epoch

"""The scheduler: admits groups while there is room, runs each attempt in a task, and hands over the groups of each step.

There is no barrier: an attempt that ends makes room, or completes its group, by itself. `Admission` decides; the scheduler
carries out its decisions and tells the ledger.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError
from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    Group,
    GroupOutcome,
    PolicyVersion,
    Prompt,
    ScoreStatus,
    Trajectory,
)
from antiphon.core.types.versions import MAX_SUPPORT
from antiphon.record.ledger import Ledger
from antiphon.record.resume import ReusableRollout, ReusableRollouts
from antiphon.rollout.admission import Admission
from antiphon.rollout.attempt import AttemptRunner, UnscoredAttempt
from antiphon.rollout.config import Policy, RolloutConfig
from antiphon.rollout.group_hooks import GroupHooks
from antiphon.rollout.live_group import Change
from antiphon.rollout.open_group import OpenGroup
from antiphon.rollout.progress_guard import ProgressGuard
from antiphon.rollout.prompt_queue import FindPrompt, PromptQueue
from antiphon.rollout.reward_monitor import RewardMonitor
from antiphon.rollout.sampling_loop import SamplingGroup, SamplingLoop
from antiphon.rollout.selection_bias import BiasMeter

DROPPED = frozenset(AttemptStatus) - {AttemptStatus.RUNNING, AttemptStatus.FINISHED, AttemptStatus.TRAINED}


class Scheduler:
    """The producing half of the loop.

    consumes  prompts, one for each group
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
        hooks: GroupHooks,
        deadlines: Deadlines,
        ledger: Ledger,
    ) -> None:
        self.config = config
        self.admission = Admission(config, version, self._on_attempt_status)
        self.bias_meter = BiasMeter()
        self.reward_monitor = RewardMonitor()
        self.groups_ended: Counter[GroupOutcome] = Counter()
        self.progress = ProgressGuard(config.groups_per_step)
        self._prompts = PromptQueue(next_prompt)
        self._episodes = episodes
        self._sampler = hooks.sampler
        self._filter = hooks.filter
        self._observe = hooks.observe
        self._deadlines = deadlines
        self._ledger = ledger
        self._reusable = ReusableRollouts()
        self._open: dict[int, OpenGroup] = {}
        self._long_round = False  # tail batching
        self._admitting = False
        self._step_sequence_number = 0  # of the ledger, when the last trajectory of the step was added
        self._commit_requested = False  # for the step that comes next
        self._tasks: dict[AttemptId, asyncio.Task[None]] = {}
        self._owner: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        ledger.balance = self._attempt_balance

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON takes it. Valid between two steps."""
        live = [(group, self._open[group].prompt) for group in self.admission.groups()]
        return {"next_group": self.admission.next_group, **self._prompts.state(live, self._long_round)}

    def restore(self, state: Mapping[str, Any], find: FindPrompt, reusable: ReusableRollouts) -> None:
        """Continue where `state` was taken; to be called before `start`.

        Args:
            state: What `state` returned.
            find: Returns a prompt by task, id and epoch.
            reusable: Finished rollouts of earlier lineages, to be used instead of new ones.
        """
        self._reusable = reusable
        self.admission.next_group = state["next_group"]
        self._prompts.restore(state, find)

    def start(self, owner: asyncio.TaskGroup) -> None:
        """Begin to admit groups. `owner` owns the tasks of attempts, so an error in one ends the run."""
        self._owner = owner
        self.admit()

    async def next_step(self) -> list[Group]:
        """Wait for the B groups of the next training step and return them."""
        while (taken := self.admission.take()) is None:
            self._changed.clear()
            await self._wait(self._changed.wait(), "groups", "groups to complete")
        chosen, change = taken
        self._ledger.begin_step(chosen)
        self._end_stale_groups(change)
        self._step_sequence_number = max(self._open[group].sequence_number for group in chosen)
        groups = [self._close_group(group) for group in chosen]
        self._commit_requested = False
        self._request_commit()
        for group in groups:
            self.bias_meter.record_training(group)
        self.reward_monitor.record_training(groups)
        return groups

    async def wait_durable(self) -> None:
        """Wait until the trajectories of this step are durable; usually they already are."""
        await self._wait(self._ledger.wait_durable(self._step_sequence_number), "commit", "the ledger")

    def publish(self, version: PolicyVersion, to_engines: bool = True) -> None:
        """Release the slots of the step, and drop groups that became too old. The caller then calls `admit`.

        `version` is the successor of the current one; engines get it only with `to_engines`.
        """
        change = self.admission.publish(version, to_engines)
        self._ledger.end_step(version)
        self._end_stale_groups(change)

    def take_group_count(self, outcome: GroupOutcome) -> int:
        """Return how many groups ended with an outcome since the last call."""
        count = self.groups_ended[outcome]
        self.groups_ended[outcome] = 0
        return count

    def stop(self, *, lost: bool = False) -> None:
        """End every attempt; nothing is admitted afterwards.

        Args:
            lost: An error ends the run: attempts and groups are lost. Otherwise they are cancelled.
        """
        self._owner = None
        self._abort(self.admission.close(AttemptStatus.LOST if lost else AttemptStatus.CANCELLED))
        for group in list(self._open):
            self._end_group(group, GroupOutcome.LOST if lost else GroupOutcome.CANCELLED)

    def admit(self) -> None:
        """Admit groups while there is room."""
        if self._admitting:  # called again by a reused group, which is complete as it is admitted
            return
        self._admitting, begun = True, False
        while self._owner is not None:
            # A round whose groups are all reused ends before it is seen to run.
            if self.config.in_rounds and not self.admission.running and not (begun and self.admission.room > 0):
                self._begin_round()
            begun = True
            if self.admission.room <= 0:
                break
            self._admit_group(*self._prompts.pop(self._long_round))
        self._admitting = False

    # --- inside --------------------------------------------------------------------------------------------------------

    async def _wait(self, awaitable: Awaitable[Any], name: str, on: str) -> None:
        deadline, key = self.config.timeout, "rollout.timeout"
        await self._deadlines.wait(awaitable, name=name, owner="learner", on=on, deadline=deadline, key=key)

    def _admit_group(self, prompt: Prompt, number: int | None) -> None:
        assert self._owner is not None
        found: Mapping[int, ReusableRollout] = {}
        if self._reusable.by_prompt and self._sampler is None:
            found = self._reusable.take(prompt, self.admission.oldest_start)
        group, attempts = self.admission.admit(number, {sibling: rollout.started for sibling, rollout in found.items()})
        opened = self._open[group] = OpenGroup(prompt, asyncio.get_running_loop().time())
        self._ledger.add_group(group, prompt, self.admission.version)
        for attempt in attempts:
            if attempt.sibling not in found:
                self._start_attempt(attempt)
        for attempt in attempts:
            if attempt.sibling in found:
                self._reuse_rollout(attempt, found[attempt.sibling])
        if self._sampler is not None:
            sampling = self._run_sampling_loop(group, self._sampler)
            opened.sampling_task = self._owner.create_task(sampling, name=f"group {group}")

    def _reuse_rollout(self, attempt: AttemptId, rollout: ReusableRollout) -> None:
        """End an attempt at once with what an earlier lineage has finished."""
        trajectory = rollout.trajectory(attempt)
        self.bias_meter.record_dispatch(trajectory.meta.task, trajectory.meta.prompt_id)
        self._ledger.add_reused_trajectory(trajectory, rollout.origin, rollout.file)
        self._on_trajectory(trajectory)

    def _request_commit(self) -> None:
        """Have the ledger write the trajectories of the next step before it is asked to wait for them."""
        if not self._commit_requested and self.admission.ready:
            self._commit_requested = True
            self._ledger.request_commit()

    def _begin_round(self) -> None:
        size = self.config.groups_per_step
        self._long_round = self.config.policy is Policy.TAIL_BATCHING and self._prompts.deferred >= size
        if self._long_round:
            self.admission.begin_round(size, redundancy=0)
        else:
            extra = 0 if self.config.policy is Policy.BATCH else self.config.extra_groups
            self.admission.begin_round(size + extra, self.config.redundancy)

    def _start_attempt(self, attempt: AttemptId) -> None:
        assert self._owner is not None
        prompt = self._open[attempt.group].prompt
        self.bias_meter.record_dispatch(prompt.task, prompt.id)
        self._tasks[attempt] = self._owner.create_task(self._run_attempt(attempt), name=f"attempt {attempt}")

    async def _run_attempt(self, attempt: AttemptId) -> None:
        """Run an attempt until it ends, or is cancelled because it is not needed any more."""
        started = self.admission.start_version(attempt)
        trajectory = await self._episodes.run(self._open[attempt.group].prompt, attempt, started)
        if self._tasks.pop(attempt, None) is not None:  # else it was cancelled, and closing its environment failed
            self._record_trajectory(trajectory)

    def _record_trajectory(self, trajectory: Trajectory) -> None:
        self._ledger.add_trajectory(trajectory)
        self._on_trajectory(trajectory)

    def _on_trajectory(self, trajectory: Trajectory) -> None:
        attempt = trajectory.meta.id
        usable = trajectory.meta.status is AttemptStatus.FINISHED
        self.bias_meter.record_finish(trajectory.meta)
        self.reward_monitor.record_finish(trajectory.meta)
        if usable and attempt.group in self._open:
            self._open[attempt.group].add(trajectory, self._ledger.sequence_number)
        elif trajectory.meta.failure is not None:
            self.progress.record_failure(trajectory.meta.failure)
        self._apply_change(attempt.group, self.admission.finish(attempt, usable))

    async def _run_sampling_loop(self, group: int, sampler: SamplingLoop) -> None:
        """Run the user's own sampling loop for a group."""
        prompt, loop_task = self._open[group].prompt, asyncio.current_task()

        async def generate(sampling: dict[str, Any]) -> UnscoredAttempt:
            chosen = self.config.sampling.sampling(**sampling)
            if chosen.truncated and not chosen.support_size:
                message = f"must give a top_k of 1 to {MAX_SUPPORT} with top_p or min_p, as `rollout.sampling` must"
                raise ConfigError(message, key="rollout.sampler")
            if chosen.penalized or chosen.num_beams > 1:
                message = (
                    "must not sample with penalties or beams, which are for evaluations: tasks[].evaluation.sampling"
                )
                raise ConfigError(message, key="rollout.sampler")
            attempt = self.admission.start(group)
            self.bias_meter.record_dispatch(prompt.task, prompt.id)
            try:
                return await self._episodes.generate(prompt, attempt, self.admission.start_version(attempt), chosen)
            except asyncio.CancelledError:
                if loop_task is None or not loop_task.cancelling():  # else the whole loop ends, and `stop` says why
                    self.admission.drop(attempt)
                raise

        async def reward(unscored: UnscoredAttempt) -> Trajectory:
            trajectory = await self._episodes.score(unscored)
            self._record_trajectory(trajectory)
            return trajectory

        await sampler(SamplingGroup(prompt, self.config.group_size, generate, reward, self.admission.drop))
        self._apply_change(group, self.admission.give_up(group))

    def _apply_change(self, group: int, change: Change) -> None:
        self._abort(change.abort)
        if change.retry is not None:
            self._start_attempt(change.retry)
        if change.failed:
            self._end_group(group, GroupOutcome.FAILED)
            self.progress.record_failed_group()
        elif change.completed and not self._is_kept(self._open[group].to_group(group)):
            self.admission.filter(group)
            self._note_scores(self._open[group].to_group(group))
            self._end_group(group, GroupOutcome.FILTERED)
            self.progress.record_filtered_group()
        elif change.completed:
            self.progress.record_trainable_group()
            self._open[group].cancel_sampling()
            self._request_commit()
        if change.failed or change.completed:
            self.admit()
            self._changed.set()

    def _is_kept(self, group: Group) -> bool:
        """Return True if a complete group may be trained on: it was not dropped, and the filter keeps it."""
        if any(trajectory.meta.score.status is ScoreStatus.DROPPED for trajectory in group.trajectories):
            return False
        return self._filter is None or self._filter(group)

    def _end_stale_groups(self, change: Change) -> None:
        self._abort(change.abort)
        for group in change.stale:
            if self.config.policy is Policy.TAIL_BATCHING:
                self._prompts.defer(self._open[group].prompt)
            self._end_group(group, GroupOutcome.STALE)

    def _on_attempt_status(self, attempt: AttemptId, status: AttemptStatus) -> None:
        if status is AttemptStatus.RUNNING:
            self._ledger.add_attempt(attempt, self.admission.start_version(attempt))
        else:
            self._ledger.set_status(attempt, status)
        if status in DROPPED and (group := self._open.get(attempt.group)):
            self.bias_meter.record_drop(status, asyncio.get_running_loop().time() - group.opened)

    def _abort(self, attempts: tuple[AttemptId, ...]) -> None:
        for attempt in attempts:
            if (task := self._tasks.pop(attempt, None)) is not None:
                task.cancel()

    def _close_group(self, group: int) -> Group:
        closed = self._open[group].to_group(group)
        self._note_scores(closed)
        self._end_group(group, GroupOutcome.COMPLETE)
        return closed

    def _note_scores(self, group: Group) -> None:
        """Tell the curriculum of a group that ends; not earlier, since one alive at a checkpoint completes once more."""
        if self._observe is not None:
            self._observe(group)

    def _end_group(self, group: int, outcome: GroupOutcome) -> None:
        if group in self._open:
            self._open.pop(group).cancel_sampling()
            self.groups_ended[outcome] += 1
            self._ledger.end_group(group, outcome)

    def _attempt_balance(self) -> dict[str, int]:
        return {"dispatched": self.admission.dispatched} | {str(k): n for k, n in self.admission.ended.items()}

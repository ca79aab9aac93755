"""The loops of a run.

```
              ┌────────────── Scheduler ───────────────┐                    ┌────────── Run.train ──────────┐
 prompts ──▶ admission ──▶ attempts ──▶ groups complete ──▶ next_step() ──▶ stages ──▶ learner.step ─┐      │
              ▲              │  ▲                                                                    │      │
              │       generate  │ tokens                                                             ▼      │
              │              ▼  │                                                                 publish   │
              │           EnginePool ◀───────────────── load (in flight) ◀───────────────────────────┤      │
              └──────────────────────────── slots released ◀──────────────────────────────────────────┘      │
```

Two loops meet in `Scheduler.next_step` (groups) and `Scheduler.publish` (versions). With an asynchronous ratio of 0
there is no room for a group while one is trained on, so the same two loops take turns; there is no other mode.

A run ends when its steps are done, on Ctrl-C (after the step in hand, with a checkpoint), or with the first error of any
part: every task has an owner, every wait a deadline, and a dead worker fails whoever waits for it (`run.supervision`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from antiphon.algorithms.rewards import AlgorithmState, restore_algorithm_state
from antiphon.core.errors import StallError
from antiphon.core.types import Credit, Group
from antiphon.learning.data_samples import supervised_batch
from antiphon.record.metrics_table import plot_metric, read_metrics_table
from antiphon.record.resume import ResumeState, code_version
from antiphon.record.trackers.samples import SampleTables
from antiphon.rollout.evaluation import Evaluation
from antiphon.rollout.scheduler import Scheduler
from antiphon.run.checkpoints import RunCheckpoints
from antiphon.run.components import Components, Progress
from antiphon.run.evaluations import Evaluations, evaluate_newest
from antiphon.run.profiler import profile_rollouts
from antiphon.run.publisher import LearnerAccess
from antiphon.run.step_metrics import describe_judges, describe_step
from antiphon.run.stepping import StepMetrics, Stepper
from antiphon.run.summary import summarize_accuracy
from antiphon.run.supervision import StopSignal, name_step_in_errors, run_supervised
from antiphon.run.waits import RunWaits

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

T = TypeVar("T")


class Run:
    """One run of `Components`, from its first version to its summary."""

    def __init__(self, parts: Components) -> None:
        self.parts = parts
        self.config = parts.config
        resumption = parts.record.resumption
        self.progress = Progress(**resumption.state["progress"]) if resumption else Progress()
        self._algorithm_state = AlgorithmState()
        self._checkpoints = RunCheckpoints(parts)
        self._evaluations = Evaluations(parts)
        self._waits = RunWaits(parts.config, parts.deadlines)
        self._stopping = StopSignal()
        self.stepper = Stepper(self.train, self.stop)
        self.scheduler: Scheduler | None = None  # of reinforcement learning, once it has begun
        self._since = 0.0  # when reinforcement learning began, had it never been interrupted
        self._last_state: dict[str, Any] = {}  # for the checkpoint after the last step

    async def train(self) -> dict[str, Any]:
        """Warm start if there is one, then reinforcement learning; returns the summary."""
        with self._stopping.on_interrupt(self.parts.record.view.message):
            return await self._supervised(self._train)

    async def sft(self) -> dict[str, Any]:
        """Supervised fine-tuning alone; returns the summary."""
        with self._stopping.on_interrupt(self.parts.record.view.message):
            return await self._supervised(self._fine_tune_alone)

    async def reinforce(self) -> int:
        """Reinforcement learning alone, without evaluation or summary; returns the number of steps done."""
        return await self._supervised(self._reinforce)

    async def __aiter__(self) -> AsyncIterator[StepMetrics]:
        """Train as `train` does, and yield each step; the next one begins when it is asked for."""
        while (step := await self.stepper.next_step()) is not None:
            yield step

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self.parts.record.directory.path

    def metrics(self) -> "pandas.DataFrame":
        """Return the metrics of the steps so far, a row a step; needs pandas."""
        return read_metrics_table(self.directory)

    def plot(self, metric: str = "reward/mean") -> "Axes":
        """Draw a metric over the steps so far; needs matplotlib."""
        return plot_metric(self.directory, metric)

    def stop(self) -> None:
        """End the run after the step in hand."""
        self._stopping.set()

    async def _supervised(self, main: Callable[[asyncio.TaskGroup], Awaitable[T]]) -> T:
        """Run `main` together with the guards, which end the run when a model or the last engine dies."""
        weights, rollouts, ledger = self.parts.weights, self.parts.rollouts, self.parts.record.ledger

        async def start(owner: asyncio.TaskGroup) -> T:
            weights.start(owner, ledger)
            return await main(owner)

        guards = [weights.died(), rollouts.watch(weights.refresh), ledger.commit_on_request()]
        try:
            result = await run_supervised(guards, start)
        except BaseException as error:
            recent = ledger.events.format_recent()
            ledger.events.add("end", error=f"{type(error).__name__}: {error}")
            if isinstance(error, StallError):
                message = f"{error}\nWhat happened last:\n{recent}"
                raise StallError(message, error.key, owner=error.owner, on=error.on) from error
            raise
        ledger.events.add("end", error="")
        return result

    # --- supervised fine-tuning ----------------------------------------------------------------------------------------

    async def _fine_tune_alone(self, owner: asyncio.TaskGroup) -> dict[str, Any]:
        await self._evaluate_before()
        self.progress.warm_start_seconds = await self._fine_tune(owner)
        last = self.parts.weights.version.n
        return await self._finish(owner, {"step": last}, await self._evaluations.run(last))

    async def _fine_tune(self, owner: asyncio.TaskGroup) -> float:
        """Take likelihood steps until the validation accuracy is reached; returns seconds.

        A validation runs on the engines while the learner goes on, and is read before the next one begins.
        """
        weights, sft, began = self.parts.weights, self.config.sft, _now()
        assert sft is not None
        async with weights.updating() as learner:
            await learner.begin_supervised(sft.optimizer, sft.steps)
        validation: asyncio.Task[Evaluation] | None = None
        for step in range(1, sft.steps + 1):
            metrics = await self._fine_tune_step(step, sft.batch_size)
            due = step % sft.evaluate_every == 0
            if due and validation is not None:
                metrics["sft/accuracy"] = (await validation).accuracy
            self._record(step, sft.steps, metrics, show=due, counter="sft_step")
            if self._stopping.is_set or metrics.get("sft/accuracy", -1.0) >= (sft.stop_accuracy or 2.0):
                break
            if due and sft.stop_accuracy:
                async with weights.updating() as learner:
                    await learner.publish()
                await weights.switch_to_generation()
                plans, prompts = self.config.plan_evaluation(1, 1.0), self.parts.tasks.validation
                validation = owner.create_task(evaluate_newest(self.parts, prompts, plans), name="validation")
                if weights.shared_devices:  # generation and training take turns
                    await validation
        if validation is not None:
            await validation
        async with weights.updating() as learner:
            await learner.publish()
        return _now() - began

    async def _fine_tune_step(self, step: int, examples: int) -> dict[str, float]:
        learner_config = self.config.learner
        pairs = [self.parts.tasks.next_example() for _ in range(examples)]
        batch = supervised_batch(pairs, learner_config.tokens_per_pack, learner_config.mesh.data)
        async with self.parts.weights.updating() as learner:
            with name_step_in_errors(f"step {step} of supervised fine-tuning"):
                trained = await learner.step(batch)
        return {f"sft/{name}": value for name, value in trained.items()}

    # --- reinforcement learning ----------------------------------------------------------------------------------------

    async def _train(self, owner: asyncio.TaskGroup) -> dict[str, Any]:
        if self.parts.record.resumption is None:
            self.progress.warm_start_seconds = await self._fine_tune(owner) if self.config.sft else 0.0
            await self._evaluate_before()
        steps = await self._reinforce(owner)
        return await self._finish(owner, self._last_state, await self._evaluations.run(steps))

    async def _reinforce(self, owner: asyncio.TaskGroup) -> int:
        """Run both loops to the last step; return the number of steps done."""
        weights, resumption = self.parts.weights, self.parts.record.resumption
        self._since = _now() - self.progress.seconds
        scheduler = self.scheduler = self._make_scheduler()
        weights.on_publish = scheduler.publish
        try:
            async with weights.updating() as learner:
                await learner.begin(self.config)
                if resumption is not None:
                    await self._restore(learner, scheduler, resumption)
                elif self.config.checkpoint.every:
                    await self._checkpoints.save(owner, learner, self._checkpoint_state(0, scheduler))
            await weights.switch_to_generation()
            scheduler.start(owner)
            if resumption is not None:
                self._evaluations.resume(owner, resumption.state.get("evaluation"))
            steps = await self._steps(owner, scheduler, resumption.state["step"] if resumption else 0)
        except BaseException:  # of any part: the task group cancels this
            scheduler.stop(lost=True)
            raise
        self.progress.seconds = _now() - self._since
        self._last_state = self._checkpoint_state(steps, scheduler)
        scheduler.stop()
        await self._evaluations.cancel()
        weights.on_publish = None
        return steps

    def _make_scheduler(self) -> Scheduler:
        parts = self.parts
        return Scheduler(
            config=self.config.rollout,
            version=parts.weights.version,
            next_prompt=parts.tasks.mixture.next,
            episodes=parts.rollouts,
            hooks=parts.hooks,
            deadlines=parts.deadlines,
            ledger=parts.record.ledger,
        )

    async def _restore(self, learner: LearnerAccess, scheduler: Scheduler, resumption: ResumeState) -> None:
        """Continue from the newest checkpoint."""
        mixture = self.parts.tasks.mixture
        await learner.restore(resumption.checkpoint)
        self._algorithm_state = restore_algorithm_state(resumption.state.get("controllers"))
        mixture.restore(resumption.state["mixture"])
        scheduler.restore(resumption.state["scheduler"], mixture.find, resumption.reusable)

    async def _steps(self, owner: asyncio.TaskGroup, scheduler: Scheduler, done: int) -> int:
        """Take the steps after `done`: the consuming half of the loop; returns the number of steps done.

        consumes     groups, B a step
        waits for    groups to complete
        unblocked by `Scheduler`, when the groups of a step are ready
        produces     versions
        """
        config = self.config
        for step in range(done + 1, config.steps + 1):
            began, waited, recorded = _now(), self._waits.seconds("groups"), self._waits.seconds("commit")
            # When stopping, do not ask: if generation is ahead, groups are always ready and the run would never end.
            stopping = self._stopping
            async with profile_rollouts(self.parts, step):
                groups = None if stopping.is_set else await stopping.unless_set(self._next_groups(scheduler))
                if groups is None:
                    return step - 1
                waited = self._waits.seconds("groups") - waited
                metrics = await self._step(owner, step, groups, scheduler)
            seconds = max(_now() - began, 1e-9)  # in virtual time a step may take none
            tokens = sum(t.meta.completion_tokens for group in groups for t in group.trajectories)
            metrics |= {
                "step/seconds": seconds,
                "step/wait_groups_share": waited / seconds,
                "step/wait_commit_share": (self._waits.seconds("commit") - recorded) / seconds,
                "tokens/per_second": tokens / seconds,
            }
            metrics |= await self._evaluations.after_step(owner, step, self.progress.before)
            await self.stepper.after_step(step, self._record(step, config.steps, metrics))
        return max(done, config.steps)  # a resume may ask for fewer than there are

    async def _step(
        self, owner: asyncio.TaskGroup, step: int, groups: Sequence[Group], scheduler: Scheduler
    ) -> dict[str, float]:
        """Train on groups and publish the next version; write a checkpoint if one is due."""
        parts = self.parts
        async with parts.weights.updating() as learner:
            await scheduler.wait_durable()
            if self.config.rollout.deterministic:
                await self._waits(parts.deadlines.quiesce("queue", "quiesce", "health"), "quiesce", "all other tasks")
            metrics = describe_step(groups, scheduler, parts.rollouts) | self._check_rewards(step, scheduler)
            with name_step_in_errors(f"step {step}"):
                result = await learner.learn(step, groups, self._algorithm_state)
            self._algorithm_state = result.algorithm_state
            parts.record.ledger.set_batch_digest(result.digest)
            parts.record.ledger.add_credit(result.credit)
            await self._record_samples(step, groups, result.credit)
            staging = await self._checkpoints.copy(learner, step) if self._checkpoints.is_due(step) else None
            await learner.publish(self._updates_engines(step))  # after that, shared devices are the engines'
            state = self._checkpoint_state(step, scheduler) if staging else {}
            scheduler.admit()  # after `state` is taken: a resume draws these prompts again
            await self._checkpoints.write(owner, staging, state)
        return metrics | result.metrics | parts.weights.metrics | self._record_judges()

    def _updates_engines(self, step: int) -> bool:
        """Return True if engines get the weights of a step."""
        return step % self.config.weights.every == 0 or self._evaluations.is_due(step)

    async def _next_groups(self, scheduler: Scheduler) -> list[Group]:
        """Wait for the groups of the next step. Their deadline begins when engines have loaded what they need."""
        weights = self.parts.weights
        while True:
            try:
                return await scheduler.next_step()
            except StallError:
                if _now() - weights.loaded_at >= self.config.rollout.timeout and not weights.is_loading:
                    raise
                await weights.wait_loaded()

    # --- evaluation and metrics ----------------------------------------------------------------------------------------

    async def _evaluate_before(self) -> None:
        evaluation = await self._evaluations.run(0)
        if evaluation is not None:
            self.progress.before = evaluation.accuracies.tolist()
            self.progress.measures = dict(evaluation.measures)

    def _check_rewards(self, step: int, scheduler: Scheduler) -> dict[str, float]:
        """Return statistics of the rewards; report each alarm once."""
        metrics, alarms = scheduler.reward_monitor.check()
        for alarm in alarms:
            if self.progress.alarms.setdefault(f"{alarm.task}: {alarm.name}", step) == step:
                self.parts.record.view.message(f"alarm at step {step}: {alarm}")
        return metrics

    def _record(
        self, step: int, steps: int, metrics: dict[str, float], show: bool = True, counter: str = "step"
    ) -> dict[str, float]:
        """Write the metrics of a step, counted by `counter`, and show them; return them reduced."""
        record = self.parts.record
        record.metrics.record_all(metrics)
        reduced = record.metrics.flush(step, counter)
        record.trackers.notify()
        if show:
            record.view.step(step, steps, reduced, self.parts.deadlines)
        return reduced

    def _record_judges(self) -> dict[str, float]:
        """Write what judges behind an address have cost so far, and return it as metrics."""
        judges = self.parts.remote_judges
        judges.write_usage(self.parts.record.directory.judges)
        return describe_judges(judges)

    async def _record_samples(self, step: int, groups: Sequence[Group], credit: Sequence[Credit]) -> None:
        """Write the table of a step's sample rollouts, for trackers, if one is due."""
        record, renderer = self.parts.record, self.parts.tasks.renderer
        tables = SampleTables(record.lineage, self.config.record.samples)
        if record.trackers and renderer is not None and tables.is_due(step):
            await record.in_thread(tables.write, step, groups, credit, renderer.decode)

    # --- checkpoints and summary ---------------------------------------------------------------------------------------

    def _checkpoint_state(self, step: int, scheduler: Scheduler) -> dict[str, Any]:
        """Return the state of the run after `step` for a checkpoint, without that of its models."""
        self.progress.seconds = _now() - self._since
        version = self.parts.weights.version
        return {
            "step": step,
            "lineage": version.lineage,
            "version": version.n,
            "progress": asdict(self.progress),
            "mixture": self.parts.tasks.mixture.state(),
            "scheduler": scheduler.state(),
            "evaluation": self._evaluations.unfinished(step),
            "controllers": asdict(self._algorithm_state),
            "heard": self.parts.record.ledger.sequence_number,
            "config": self.config.model_dump(mode="json"),
            "code": code_version(),
        }

    async def _finish(
        self, owner: asyncio.TaskGroup, state: dict[str, Any], after: Evaluation | None
    ) -> dict[str, Any]:
        """Save the model; write the summary and return it."""
        weights, progress = self.parts.weights, self.progress
        await weights.wait_loaded()
        async with weights.updating() as learner:
            await self._checkpoints.save(owner, learner, state)
        await self._checkpoints.wait_saved()
        summary = summarize_accuracy(progress, after, self.config) | {
            "warm_start_seconds": progress.warm_start_seconds,
            "train_seconds": progress.warm_start_seconds + progress.seconds,
            "steps": state["step"],
            "versions": weights.version.n,
            "lineage": weights.version.lineage,
            "stopped_early": self._stopping.is_set,
            "alarms": progress.alarms,
        }
        self.parts.record.directory.write_summary(summary)
        return summary


def _now() -> float:
    return asyncio.get_running_loop().time()

"""The loops of a run, and how they stop.

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
part: every task has an owner, every wait a deadline, and a dead worker fails whoever waits for it.
"""

import asyncio
import gc
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import declaration_of
from antiphon.algorithms.registry import ADVANTAGES, LOSSES
from antiphon.algorithms.rewards import restore_controllers
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import NonFiniteError, StallError
from antiphon.core.failpoints import hit
from antiphon.core.types import (
    AttemptId,
    Group,
    GroupOutcome,
    IntArray,
    PolicyVersion,
    Prompt,
    Sampling,
    Trajectory,
    TrajectoryMeta,
    WeightsUpdate,
)
from antiphon.core.workers import WorkerHandle
from antiphon.engines.base import InferenceEngine
from antiphon.learning.data_samples import supervised_batch
from antiphon.learning.learner import ModelRoles, Scorer, Trainer
from antiphon.learning.remote import RemoteTrainer
from antiphon.learning.stages import STAGES
from antiphon.learning.step import StepPipeline
from antiphon.record.checkpoint import checkpoint_name, prune_checkpoints, publish_checkpoint, staging_dir
from antiphon.record.ledger import Ledger
from antiphon.record.live import View
from antiphon.record.metrics import Metrics
from antiphon.record.resume import ResumeState, code_version
from antiphon.record.run_dir import RunDirectory
from antiphon.record.trackers import Tracker
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.evaluation import Evaluation, bootstrap_interval, evaluate
from antiphon.rollout.group_scoring import GroupScoring
from antiphon.rollout.pool import EnginePool
from antiphon.rollout.remote_workers import RolloutWorker, RolloutWorkers
from antiphon.rollout.sampling_loop import SamplingLoop
from antiphon.rollout.scheduler import GroupFilter, Scheduler
from antiphon.run.config import RunConfig
from antiphon.run.device_sharing import SharedDevices
from antiphon.tasks.base import FLAG_PREFIX
from antiphon.tasks.mixture import Mixture
from antiphon.weights.base import TransferContext

T = TypeVar("T")

# Thresholds of Python's collector: what a run makes lives long, and by default it is looked through all the time.
COLLECT = (50_000, 20, 20)
EVALUATION_PRIORITY = -1  # before rollouts: training waits for it
# The key of each wait's deadline. All others have rollout.timeout.
DEADLINES = {
    **dict.fromkeys(("begin", "step"), "learner.timeout"),
    **dict.fromkeys(("publish", "load", "turn"), "weights.timeout"),
    **dict.fromkeys(("restore", "checkpoint"), "checkpoint.timeout"),
}


@dataclass(slots=True, kw_only=True)
class Components:
    """What `build` makes of a configuration, and a run is made of."""

    config: RunConfig
    deadlines: Deadlines
    workers: Sequence[WorkerHandle | RemoteTrainer]  # whose death is the run's; that of an engine is the pool's to mend
    models: ModelRoles | RemoteTrainer
    training: StepPipeline | RemoteTrainer
    pool: EnginePool | RolloutWorkers
    lease: SharedDevices
    judges: Sequence[EnginePool] = ()  # that rewards ask
    episodes: EpisodeRunner | RolloutWorkers
    siblings: GroupScoring | None = None  # plays attempts instead, where scores need each other
    mixture: Mixture
    next_example: Callable[[], tuple[IntArray, IntArray]]  # prompt and answer, for supervised fine-tuning
    validation: Sequence[Prompt]
    test: Sequence[Prompt]
    keep: GroupFilter | None
    sampler: SamplingLoop | None
    directory: RunDirectory
    ledger: Ledger
    resumption: ResumeState | None = None
    exchange: TransferContext  # where weights pass from learner to engines
    metrics: Metrics
    trackers: Sequence[Tracker]
    view: View
    in_thread: Callable[..., Awaitable[None]] = asyncio.to_thread  # what writes to disk and takes a while


def make_step_pipeline(
    config: RunConfig,
    learner: Trainer,
    reference: Scorer | None = None,
    critics: Sequence[Trainer] = (),
    teachers: Sequence[Scorer] = (),
) -> StepPipeline:
    """What makes updates of groups in a run with this configuration."""
    return StepPipeline(
        learner=learner,
        reference=reference,
        critics=critics,
        teachers=list(zip(config.teachers, teachers, strict=True)),
        algorithm=config.algorithm,
        config=config.learner,
        critic=config.critic,
        critic_ranks=config.learner_of("critic").mesh.data,
        estimate_advantages=ADVANTAGES.resolve(config.algorithm.advantage),
        loss=declaration_of(LOSSES.resolve(config.algorithm.loss)),
        stages=[STAGES.resolve(name) for name in config.learner.stages],
        max_tokens=config.rollout.sampling.max_tokens,
    )


@dataclass(slots=True, kw_only=True)
class Progress:
    """What a run knows of its past, and a checkpoint keeps."""

    before: list[float] | None = None  # accuracy on each test prompt
    measures: dict[str, float] = field(default_factory=dict)  # of the same evaluation
    warm_start_seconds: float = 0.0
    seconds: float = 0.0  # of reinforcement learning
    alarms: dict[str, int] = field(default_factory=dict)  # each that was raised, and at which step first


class Run:
    """One run of `Components`, from its first version to its summary."""

    def __init__(self, parts: Components) -> None:
        self.parts = parts
        self.config = parts.config
        gone_on = parts.resumption
        self.version = PolicyVersion(gone_on.lineage, gone_on.state["version"]) if gone_on else PolicyVersion(0, 0)
        self.progress = Progress(**gone_on.state["progress"]) if gone_on else Progress()
        self._since = 0.0  # when reinforcement learning began, had it never been interrupted
        self._last: dict[str, Any] = {}  # the cut after the last step
        self._stopping = asyncio.Event()
        self._published: WeightsUpdate | None = (
            None  # the last update, which engines can load until the next is published
        )
        self._loading: asyncio.Task[None] | None = None
        self._loaded_at = 0.0  # when all engines had it
        self._saving: asyncio.Task[None] | None = None
        self._between_steps = asyncio.Lock()  # held while the learner's weights change, and while they are published

    async def train(self) -> dict[str, Any]:
        """Warm start if there is one, then reinforcement learning; returns the summary."""
        with self._interruptible():
            return await self._supervised(self._train)

    async def sft(self) -> dict[str, Any]:
        """Supervised fine-tuning alone; returns the summary."""
        with self._interruptible():
            return await self._supervised(self._sft_alone)

    async def reinforce(self) -> int:
        """Reinforcement learning alone, from the weights of now: no evaluation, no summary; returns the steps done."""
        return await self._supervised(self._reinforce)

    def stop(self) -> None:
        """End the run after the step in hand."""
        self._stopping.set()

    async def _supervised(self, main: Callable[[asyncio.TaskGroup], Awaitable[T]]) -> T:
        """Run `main` beside what ends the run from the side: the death of a worker, or of the last engine."""
        parts = self.parts
        watchers = [*(worker.died() for worker in parts.workers), parts.pool.watch(self._refresh)]
        watchers.append(parts.ledger.commit_on_request())
        watchers += [judge.watch() for judge in parts.judges]
        try:
            return await run_supervised(watchers, main)
        except StallError as stall:
            raise StallError(
                f"{stall}\nWhat happened last:\n{self.parts.ledger.events.format_recent()}", stall.key
            ) from stall

    # --- how a run ends ------------------------------------------------------------------------------------------------

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C ends the run after the step in hand, the second at once."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt() -> None:
            if self._stopping.is_set() and task is not None:
                task.cancel()
            self.stop()
            self.parts.view.message("stopping after this step; Ctrl-C again stops at once")

        with suppress(ValueError, RuntimeError):  # only the main thread hears signals
            loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            with suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(signal.SIGINT)

    async def _unless_stopped(self, awaitable: Awaitable[T]) -> T | None:
        """The result, or None if the run is to stop first."""
        work, stop = asyncio.ensure_future(awaitable), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            work.cancel()
            stop.cancel()

    def _spent(self, name: str) -> float:
        return self.parts.deadlines.spent("learner", name)

    async def _wait(self, awaitable: Awaitable[T], name: str, on: str, owner: str = "learner") -> T:
        key = DEADLINES.get(name, "rollout.timeout")
        deadline = attrgetter(key)(self.config)
        return await self.parts.deadlines.wait(awaitable, name=name, owner=owner, on=on, deadline=deadline, key=key)

    # --- supervised fine-tuning ----------------------------------------------------------------------------------------

    async def _sft_alone(self, owner: asyncio.TaskGroup) -> dict[str, Any]:
        await self._test_before()
        self.progress.warm_start_seconds = await self._sft(owner)
        return await self._finish(owner, {"step": self.version.n}, await self._test())

    async def _sft(self, owner: asyncio.TaskGroup) -> float:
        """Likelihood steps until the validation accuracy is reached; returns seconds.

        A validation runs on the engines while the learner goes on, and is read before the next one begins.
        """
        parts, sft = self.parts, self.config.sft
        assert sft is not None
        began = _now()
        begun = parts.models.learner.begin(AlgorithmConfig(loss="sft"), sft.optimizer, sft.steps)
        await self._wait(begun, "begin", "the learner")
        validation: asyncio.Task[Evaluation] | None = None
        for step in range(1, sft.steps + 1):
            examples = [parts.next_example() for _ in range(sft.batch_size)]
            learner = self.config.learner
            batch = supervised_batch(examples, learner.tokens_per_pack, learner.mesh.data)
            async with self._between_steps:
                await self._take_devices()
                with name_step_in_errors(f"step {step} of supervised fine-tuning"):
                    trained = await self._wait(parts.models.learner.step(batch), "step", "the learner")
            metrics = {f"sft/{name}": value for name, value in trained.items()}
            due = step % sft.evaluate_every == 0
            if due and validation is not None:
                metrics["sft/accuracy"] = (await validation).accuracy
            self._record(step, sft.steps, metrics, show=due)
            if self._stopping.is_set() or metrics.get("sft/accuracy", -1.0) >= (sft.stop_accuracy or 2.0):
                break
            if due and sft.stop_accuracy:
                async with self._between_steps:
                    await self._publish(owner, self.version.next())
                validation = owner.create_task(self._evaluate(parts.validation, 1, 1.0), name="validation")
                if parts.lease.shared:  # there is no beside each other
                    await validation
        if validation is not None:
            await validation
        async with self._between_steps:
            await self._publish(owner, self.version.next())
        return _now() - began

    # --- reinforcement learning ----------------------------------------------------------------------------------------

    async def _train(self, owner: asyncio.TaskGroup) -> dict[str, Any]:
        if self.parts.resumption is None:
            self.progress.warm_start_seconds = await self._sft(owner) if self.config.sft else 0.0
            await self._test_before()
        await self._reinforce(owner)
        return await self._finish(owner, self._last, await self._test())

    async def _reinforce(self, owner: asyncio.TaskGroup) -> int:
        parts, config, resumption = self.parts, self.config, self.parts.resumption
        self._since = _now() - self.progress.seconds
        begun = parts.models.begin(config.algorithm, config.learner, config.critic, config.steps)
        await self._wait(begun, "begin", "the learner")
        scheduler = Scheduler(
            config=config.rollout,
            version=self.version,
            next_prompt=parts.mixture.next,
            episodes=parts.siblings or parts.episodes,
            sampler=parts.sampler,
            keep=parts.keep,
            deadlines=parts.deadlines,
            ledger=parts.ledger,
        )
        done = 0
        if resumption is not None:
            done = resumption.state["step"]
            async with self._between_steps:
                await self._wait(parts.models.restore(resumption.checkpoint), "restore", "the learner")
                if self.version.n:  # else engines have it
                    await self._publish(owner, self.version)
            parts.training.controllers = restore_controllers(resumption.state.get("controllers"))
            parts.mixture.restore(resumption.state["mixture"])
            scheduler.restore(resumption.state["scheduler"], parts.mixture.find, resumption.reusable)
        elif config.checkpoint.every:
            await self._save(owner, self._cut(0, scheduler))
        await self._turn(parts.lease.generate())
        scheduler.start(owner)
        steps = await self._steps(owner, scheduler, done)
        self.progress.seconds = _now() - self._since
        self._last = self._cut(steps, scheduler)
        scheduler.stop()
        return steps

    async def _steps(self, owner: asyncio.TaskGroup, scheduler: Scheduler, done: int) -> int:
        """The consuming half of the loop, from the step after `done`; returns the number of steps done.

        consumes     groups, B a step
        waits for    groups to complete
        unblocked by `Scheduler`, when the groups of a step are ready
        produces     versions
        """
        config = self.config
        for step in range(done + 1, config.steps + 1):
            began, waited, recorded = _now(), self._spent("groups"), self._spent("commit")
            # Not asked, once it is to stop: where generation is ahead of the learner, groups are there at once, every time.
            groups = None if self._stopping.is_set() else await self._unless_stopped(self._next_groups(scheduler))
            if groups is None:
                return step - 1
            waited = self._spent("groups") - waited
            async with self._between_steps:
                await scheduler.wait_durable()
                if config.rollout.deterministic:
                    await self._wait(self.parts.deadlines.quiesce("queue", "calm", "health"), "calm", "everybody else")
                metrics = self._describe(groups, scheduler) | self._watch(step, scheduler)
                await self._take_devices()
                metrics |= await self._learn(step, groups)
                await self._publish(owner, self.version.next())
                scheduler.publish()
                cut = self._cut(step, scheduler) if self._due(step) else None
                scheduler.admit()
                if cut is not None:
                    await self._save(owner, cut)
            seconds = max(_now() - began, 1e-9)  # in virtual time a step may take none
            tokens = sum(t.meta.completion_tokens for group in groups for t in group.trajectories)
            metrics |= {
                "step/seconds": seconds,
                "step/wait_groups_share": waited / seconds,
                "step/wait_commit_share": (self._spent("commit") - recorded) / seconds,
                "tokens/per_second": tokens / seconds,
            }
            if config.evaluation.every and step % config.evaluation.every == 0 and step < config.steps:
                evaluation = await self._test()
                if evaluation is not None:
                    metrics |= {f"evaluation/{name}": value for name, value in evaluation.measures.items()}
                    metrics |= {"evaluation/accuracy": evaluation.accuracy}
            self._record(step, config.steps, metrics)
        return config.steps

    async def _next_groups(self, scheduler: Scheduler) -> list[Group]:
        """Wait for the groups of the next step. Their deadline begins when engines have loaded what they need."""
        while True:
            try:
                return await scheduler.next_step()
            except StallError:
                if _now() - self._loaded_at >= self.config.rollout.timeout and (
                    not self._loading or self._loading.done()
                ):
                    raise
                await self._settle()

    def _due(self, step: int) -> bool:
        every = self.config.checkpoint.every
        return bool(every) and step % every == 0 and step < self.config.steps

    async def _learn(self, number: int, groups: Sequence[Group]) -> dict[str, float]:
        """Take one step through its stages; returns their metrics."""
        wait = partial(self._wait, name="step", on="the learner")
        with name_step_in_errors(f"step {number}"):
            metrics, batch = await self.parts.training.learn(number, self.version.n, groups, wait)
        self.parts.ledger.set_batch_digest(batch)
        return metrics

    async def _publish(self, owner: asyncio.TaskGroup, version: PolicyVersion) -> None:
        """Make the learner's weights known as `version`. Engines load them while the run goes on; a version is published
        only once the one before it is loaded everywhere."""
        await self._settle()
        parts = self.parts
        hit("publish")
        update = await self._wait(parts.models.learner.publish(version.n, parts.exchange), "publish", "the learner")
        await self._turn(parts.lease.leave())
        parts.ledger.add_version(version, update.manifest.digest if update.manifest else None)
        self.version, self._published = version, update
        hit("published")
        self._loading = owner.create_task(self._load(update), name=f"load version {version.n}")

    async def _load(self, update: WeightsUpdate) -> None:
        """Have all engines load what was published."""
        loading = self.parts.pool.load(update, self.config.rollout.on_update)
        await self._wait(loading, "load", "engines to load weights", owner="pool")
        self._loaded_at = _now()

    async def _refresh(self, engine: InferenceEngine | RolloutWorker) -> None:
        """Load the weights that were published last into a replacement engine or rollout worker. The learner may have others by
        now. Before anything is published there is nothing to do: the first version goes to all engines there are by then."""
        async with self._between_steps:
            await self._settle()
            update = self._published
            if update is not None and engine.version < update.version:
                loading = engine.load(update, self.config.rollout.on_update)
                await self._wait(loading, "load", "a new engine to load weights")

    async def _take_devices(self) -> None:
        """Begin the models' turn, when what was published is loaded."""
        if self.parts.lease.shared:
            await self._settle()
            await self._turn(self.parts.lease.train())

    async def _turn(self, change: Awaitable[None]) -> None:
        """Wait until devices that are shared have changed hands."""
        await self._wait(change, "turn", "devices that are shared")

    async def _settle(self) -> None:
        if self._loading is not None:
            await self._wait(asyncio.shield(self._loading), "load", "engines to load weights")

    # --- looking at it -------------------------------------------------------------------------------------------------

    async def _test(self) -> Evaluation | None:
        settings = self.config.evaluation
        if not self.parts.test:
            return None
        temperature = settings.resolve_temperature(settings.samples)
        return await self._evaluate(self.parts.test, settings.samples, temperature)

    async def _test_before(self) -> None:
        """What is known of the model that there is to begin with."""
        evaluation = await self._test()
        if evaluation is not None:
            self.progress.before = [float(correct) for correct in evaluation.correct.mean(axis=1)]
            self.progress.measures = dict(evaluation.measures)

    async def _evaluate(self, prompts: Sequence[Prompt], samples: int, temperature: float) -> Evaluation:
        """Score prompts with the newest version."""
        await self._turn(self.parts.lease.generate())
        rollout, version = self.config.rollout, self.version
        sampling = Sampling(max_tokens=rollout.sampling.max_tokens, temperature=temperature, stop=rollout.sampling.stop)

        async def run(prompt: Prompt, attempt: AttemptId) -> Trajectory:
            return await self.parts.episodes.run(prompt, attempt, version, sampling, EVALUATION_PRIORITY)

        return await evaluate(prompts, samples, run)

    def _describe(self, groups: Sequence[Group], scheduler: Scheduler) -> dict[str, float]:
        """What a step's groups look like as it begins."""
        metas = [trajectory.meta for group in groups for trajectory in group.trajectories]
        ages = [meta.started.age(scheduler.admission.version) for meta in metas]
        return {
            **{f"age/{age}": ages.count(age) / len(ages) for age in range(self.config.rollout.max_age + 1)},
            "reward/mean": float(np.mean([meta.score.value for meta in metas])),
            **_by_task(metas),
            "age/mean": float(np.mean(ages)),
            "age/max": float(max(ages)),
            "length/mean": float(np.mean([meta.completion_tokens for meta in metas])),
            "length/max": float(max(meta.completion_tokens for meta in metas)),
            "length/truncated": float(np.mean([meta.truncated for meta in metas])),
            "engines/live": float(self.parts.pool.engines),
            "tokens/requeued": float(self.parts.pool.requeued_tokens),
            "attempts/dispatched": float(scheduler.admission.dispatched),
            "groups/live": float(scheduler.admission.live),
            "groups/filtered": float(scheduler.take_group_count(GroupOutcome.FILTERED)),
            "groups/failed": float(scheduler.take_group_count(GroupOutcome.FAILED)),
            "groups/stale": float(scheduler.take_group_count(GroupOutcome.STALE)),
            **scheduler.bias_meter.metrics(),
        }

    def _watch(self, step: int, scheduler: Scheduler) -> dict[str, float]:
        """What the rewards look like; each alarm is told of once."""
        metrics, alarms = scheduler.reward_monitor.check()
        for alarm in alarms:
            if self.progress.alarms.setdefault(f"{alarm.task}: {alarm.name}", step) == step:
                self.parts.view.message(f"alarm at step {step}: {alarm}")
        return metrics

    def _record(self, step: int, steps: int, metrics: dict[str, float], show: bool = True) -> None:
        self.parts.metrics.record_all(metrics)
        reduced = self.parts.metrics.flush(step)
        for tracker in self.parts.trackers:
            tracker.log(step, reduced)
        if show:
            self.parts.view.step(step, steps, reduced, self.parts.deadlines)

    # --- what is kept --------------------------------------------------------------------------------------------------

    def _cut(self, step: int, scheduler: Scheduler) -> dict[str, Any]:
        """Where the run is after `step`."""
        self.progress.seconds = _now() - self._since
        return {
            "step": step,
            "lineage": self.version.lineage,
            "version": self.version.n,
            "progress": asdict(self.progress),
            "mixture": self.parts.mixture.state(),
            "scheduler": scheduler.state(),
            "controllers": asdict(self.parts.training.controllers),
            "heard": self.parts.ledger.sequence_number,
            "config": self.config.model_dump(mode="json"),
            "code": code_version(),
        }

    async def _save(self, owner: asyncio.TaskGroup, cut: dict[str, Any]) -> None:
        """Begin to write a checkpoint, and go on when the learner may; the one before it is in place by then."""
        await self._saved()
        await self._wait(self.parts.ledger.commit(), "commit", "the ledger")
        directory, version = self.parts.directory.checkpoints / checkpoint_name(cut["step"]), self.version
        if directory.is_dir():  # the very cut that this life began at
            return
        aside = staging_dir(directory)
        writing = await self._wait(self.parts.models.save(aside), "checkpoint", "the learner")

        async def keep() -> None:
            await asyncio.gather(*writing)
            await self.parts.in_thread(publish_checkpoint, aside, directory, cut)
            self.parts.ledger.add_checkpoint(cut["step"], version, directory.name)
            prune_checkpoints(directory.parent, self.config.checkpoint.keep_last, self.config.checkpoint.keep_every)

        self._saving = owner.create_task(keep(), name=f"checkpoint {cut['step']}")

    async def _saved(self) -> None:
        if self._saving is not None:
            await self._wait(asyncio.shield(self._saving), "checkpoint", "a checkpoint to be in place")

    async def _finish(self, owner: asyncio.TaskGroup, cut: dict[str, Any], after: Evaluation | None) -> dict[str, Any]:
        """Save the model; say what the run came to."""
        await self._settle()
        await self._save(owner, cut)
        await self._saved()
        progress = self.progress
        summary: dict[str, Any] = {"accuracy_before": None, "accuracy_after": None}
        if progress.before and after:
            before, settings = np.array(progress.before), self.config.evaluation
            temperature = settings.resolve_temperature(settings.samples)
            gain = after.correct.mean(axis=1) - before
            summary = {
                "accuracy_before": float(before.mean()),
                "accuracy_after": after.accuracy,
                "gain_interval": bootstrap_interval(gain),
                "test_prompts": len(gain),
                "evaluation": {"samples": settings.samples, "temperature": temperature},
                "tasks": self._accuracies(before, after.correct.mean(axis=1)),
                "measures_before": progress.measures,
                "measures_after": after.measures,
            }
        summary |= {
            "warm_start_seconds": progress.warm_start_seconds,
            "train_seconds": progress.warm_start_seconds + progress.seconds,
            "steps": cut["step"],
            "versions": self.version.n,
            "lineage": self.version.lineage,
            "stopped_early": self._stopping.is_set(),
            "alarms": progress.alarms,
        }
        self.parts.directory.write_summary(summary)
        return summary

    def _accuracies(self, before: np.ndarray, after: np.ndarray) -> dict[str, dict[str, float]]:
        """Accuracies [P] of the test prompts, averaged over those of each task."""
        tasks = np.array([prompt.task for prompt in self.parts.test])
        return {
            str(task): {
                "accuracy_before": float(before[tasks == task].mean()),
                "accuracy_after": float(after[tasks == task].mean()),
            }
            for task in np.unique(tasks)
        }


def _by_task(metas: Sequence[TrajectoryMeta]) -> dict[str, float]:
    """The mean score and the share of each task, if there are several, and the mean of each part that its scores have."""
    values: dict[str, list[float]] = {}
    for meta in metas:
        values.setdefault(f"reward/task/{meta.task}", []).append(meta.score.value or 0.0)
        for part, value in meta.score.parts.items():
            if not part.startswith(FLAG_PREFIX):
                values.setdefault(f"reward/part/{meta.task}/{part}", []).append(value)
    shares = Counter(meta.task for meta in metas)
    if len(shares) == 1:  # then the mean says it
        del values[f"reward/task/{metas[0].task}"]
        shares.clear()
    means = {name: float(np.mean(found)) for name, found in values.items()}
    return means | {f"share/{task}": count / len(metas) for task, count in shares.items()}


@contextmanager
def name_step_in_errors(name: str) -> Iterator[None]:
    """Name the step in the error of a gradient that is not finite."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error}") from error


async def run_supervised(
    guards: Sequence[Coroutine[Any, Any, None]], main: Callable[[asyncio.TaskGroup], Awaitable[T]]
) -> T:
    """Run `main` in a task group beside `guards`, which end only by raising; of all errors, raise the first."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*COLLECT)
    try:
        async with asyncio.TaskGroup() as owner:
            watchers = [owner.create_task(guard, name="guard") for guard in guards]
            result = await main(owner)
            for watcher in watchers:
                watcher.cancel()
        return result
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    finally:
        gc.set_threshold(*thresholds)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside nested groups: the one the others follow from."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _now() -> float:
    return asyncio.get_running_loop().time()

"""Run the scheduler and the stages of a run again on recorded events."""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from antiphon.algorithms.rewards import AlgorithmState, restore_algorithm_state
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import RecordError
from antiphon.core.types import (
    AttemptId,
    FloatArray,
    Group,
    Pack,
    PolicyVersion,
    Prompt,
    Sampling,
    TrainBatch,
    Trajectory,
)
from antiphon.inspect.recorded_lineage import Arrival, Publication, RecordedLineage, ReplayMismatchError, StepBegin
from antiphon.inspect.samples import find_tokenizer
from antiphon.learning.learner import Learner, ModelRoles
from antiphon.record import safe_files
from antiphon.record.checkpoint import checkpoint_name, read_state
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger, run_synchronously
from antiphon.record.reader import RunReader
from antiphon.record.resume import ReusableRollouts, find_reusable, open_first_lineage
from antiphon.record.store import LedgerStore
from antiphon.rollout.group_hooks import GroupHooks, make_filter, make_observer
from antiphon.rollout.scheduler import Scheduler
from antiphon.run.config import RunConfig
from antiphon.run.launch.models import make_step_pipeline
from antiphon.run.supervision import run_supervised
from antiphon.tasks.mixture import Mixture
from antiphon.tasks.rendering import Renderer
from antiphon.weights.base import TransferContext

ROUNDS = 12  # of the event loop, after which every task waits for a recorded event
SAMPLER_ERROR = "a run with a custom sampler (rollout.sampler) cannot be replayed: its calls are not recorded"


class RecordedAttempts:
    """An `AttemptRunner` whose attempts end when the run recorded their end."""

    def __init__(self) -> None:
        self.running: dict[AttemptId, asyncio.Future[Trajectory]] = {}

    async def run(self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion) -> Trajectory:
        """Wait for the recorded end of an attempt."""
        self.running[attempt] = asyncio.get_running_loop().create_future()
        try:
            return await self.running[attempt]
        finally:
            del self.running[attempt]

    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling | None = None
    ) -> Any:
        """Refuse: a custom sampler calls this, and its calls are not recorded."""
        raise RecordError(SAMPLER_ERROR)

    async def score(self, played: Any) -> Trajectory:
        """Refuse: `generate` returned nothing that could be scored."""
        raise NotImplementedError


class _RecordedTrainer:
    """A `Trainer` that ignores batches, or passes them on to a real learner once there is one."""

    def __init__(self) -> None:
        self.learner: Learner | None = None

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        return await self.learner.step(batch) if self.learner else {}

    async def predict(self, packs: Sequence[Pack]) -> list[FloatArray]:
        return await self._require_learner().predict(packs)

    async def logprobs_and_entropies(self, packs: Sequence[Pack]) -> list[FloatArray]:
        return await self._require_learner().logprobs_and_entropies(packs)

    async def attention_stats(self, packs: Sequence[Pack]) -> list[FloatArray]:
        return await self._require_learner().attention_stats(packs)

    def _require_learner(self) -> Learner:
        if self.learner is None:
            raise RecordError(
                "a batch of this run holds log-probs or values of the policy or a critic: replay it with --weights, from the "
                "first checkpoint that was kept (checkpoint.keep_every: 1 keeps all)"
            )
        return self.learner


class Replayer:
    """Runs the real scheduler and stages on recorded events, one lineage after another."""

    def __init__(
        self,
        reader: RunReader,
        config: RunConfig,
        models: ModelRoles | None,
        context: TransferContext | None,
    ) -> None:
        """Replay a run; weights are compared if there is a context to publish them to."""
        self._run = reader.directory
        self._reader = reader
        self._config = config
        self._models = models if context else None
        self._context = context
        self._is_training = False  # the learner has the weights of the run
        self._trainers = [_RecordedTrainer() for _ in range(1 + (config.critic.count if config.critic else 0))]
        reference, teachers = (models.reference, models.teachers) if models else (None, [])
        self._pipeline = make_step_pipeline(
            config,
            self._trainers[0],
            reference,
            self._trainers[1:],
            teachers,
            open_renderer=lambda: Renderer(_find_tokenizer(reader.directory, config)),
        )
        self._mixture = Mixture.load(config.tasks, config.seed)
        self._initial_state = self._mixture.state()

    async def replay_lineage(self, lineage: RecordedLineage) -> int:
        """Replay one lineage and return its number of steps."""
        with tempfile.TemporaryDirectory() as folder, closing(LedgerStore(Path(folder))) as store:
            open_first_lineage(store)
            return await run_supervised((), lambda owner: self._replay_events(lineage, store, owner))

    async def _replay_events(self, lineage: RecordedLineage, store: LedgerStore, owner: asyncio.TaskGroup) -> int:
        attempts, steps = RecordedAttempts(), 0
        scheduler = self._make_scheduler(lineage, attempts, store)
        await self._restore_weights(lineage, lineage.step)
        scheduler.start(owner)
        for event in lineage.events:
            await _run_until_idle()
            match event:
                case Arrival(attempt=attempt, trajectory=trajectory):
                    if attempt not in attempts.running:
                        raise ReplayMismatchError(
                            f"attempt {lineage.number}:{attempt} ended in the run, and is not running in the replay"
                        )
                    attempts.running[attempt].set_result(trajectory)
                case StepBegin():
                    groups = await _take_groups(event, scheduler, owner)
                    await self._build_batch(groups, event, scheduler.admission.version.n)
                    steps += 1
                case Publication(to_engines=to_engines):
                    scheduler.publish(scheduler.admission.version.next(), to_engines)
                    scheduler.admit()
                    await self._compare_weights(event)
                    await self._restore_weights(lineage, lineage.step + steps)
        scheduler.stop()
        return steps

    def _make_scheduler(self, lineage: RecordedLineage, attempts: RecordedAttempts, store: LedgerStore) -> Scheduler:
        config, reusable = self._config, ReusableRollouts()
        if lineage.row.parent is not None and not config.rollout.deterministic:
            oldest = lineage.version - config.rollout.max_age
            reusable = find_reusable(self._reader, lineage.number, lineage.version, oldest)
            reusable.exclude_tasks(config.judged_together)
        scheduler = Scheduler(
            config=config.rollout,
            version=PolicyVersion(lineage.number, lineage.version),
            next_prompt=self._mixture.next,
            episodes=attempts,
            hooks=GroupHooks(
                filter=make_filter(config.rollout, config.tasks),
                observe=make_observer(config.tasks, config.plan_evaluation(), self._mixture),
            ),
            deadlines=Deadlines(),
            ledger=Ledger(store, Events(), run=run_synchronously),
        )
        self._is_training = False
        for trainer in self._trainers:
            trainer.learner = None
        with safe_files.convert_read_errors(f"{self._run / 'ledger.db'}: the state of lineage {lineage.number}"):
            self._pipeline.algorithm_state = (
                restore_algorithm_state(lineage.row.state.get("controllers")) if lineage.row.state else AlgorithmState()
            )
            self._mixture.restore(lineage.row.state["mixture"] if lineage.row.state else self._initial_state)
            if lineage.row.state:
                scheduler.restore(lineage.row.state["scheduler"], self._mixture.find, reusable)
        return scheduler

    async def _build_batch(self, groups: Sequence[Group], recorded: StepBegin, version: int) -> None:
        _, batch, _ = await self._pipeline.learn(recorded.step, version, groups)
        if recorded.batch is not None and batch != recorded.batch:
            raise ReplayMismatchError(f"step {recorded.step}: the batch is not the one that was trained on")

    async def _restore_weights(self, lineage: RecordedLineage, step: int) -> None:
        """Begin to train at the first checkpoint of the lineage that is there."""
        directory = safe_files.resolve_path(self._run, f"checkpoints/{checkpoint_name(step)}")
        if self._models is None or self._is_training or not directory.is_dir():
            return
        if step > lineage.step and read_state(directory)["lineage"] != lineage.number:
            return  # another lineage wrote it, which undid this one
        safe_files.check_model_files(directory)
        config = self._config
        await self._models.begin(config.algorithm, config.learner, config.critic, config.steps)
        await self._models.restore(directory)
        self._pipeline.algorithm_state = restore_algorithm_state(read_state(directory).get("controllers"))
        for trainer, learner in zip(self._trainers, [self._models.learner, *self._models.critics], strict=True):
            trainer.learner = learner
        self._is_training = True

    async def _compare_weights(self, recorded: Publication) -> None:
        """Raise `ReplayMismatchError` unless the learner has the recorded weights of a version."""
        if self._models is None or self._context is None or not self._is_training or not recorded.to_engines:
            return
        update = await self._models.learner.publish(recorded.version, self._context)
        if update.manifest.digest != recorded.digest:
            raise ReplayMismatchError(f"version {recorded.version}: its weights are not those that were published")


def _find_tokenizer(run: Path, config: RunConfig) -> Path:
    """Return the directory of a run that holds its tokenizer, or else that of the model it began with."""
    try:
        return find_tokenizer(run)
    except RecordError:
        return Path(config.model.path)


async def _take_groups(recorded: StepBegin, scheduler: Scheduler, owner: asyncio.TaskGroup) -> Sequence[Group]:
    """Take the groups of a step; raise `ReplayMismatchError` unless they are the recorded ones."""
    task = owner.create_task(scheduler.next_step(), name=f"step {recorded.step}")
    await _run_until_idle()
    if not task.done():
        task.cancel()
        raise ReplayMismatchError(
            f"step {recorded.step} began with groups {list(recorded.groups)}; in the replay there are not enough"
        )
    groups = task.result()
    if {group.id for group in groups} != set(recorded.groups):
        taken = sorted(group.id for group in groups)
        raise ReplayMismatchError(
            f"step {recorded.step} took groups {sorted(recorded.groups)}; in the replay it takes {taken}"
        )
    return groups


async def _run_until_idle() -> None:
    """Let all tasks run until each waits for a recorded event."""
    for _ in range(ROUNDS):
        await asyncio.sleep(0)

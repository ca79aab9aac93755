"""Replaying a run: what its ledger recorded, in the order in which it came, drives the real scheduler and stages once more.

Nothing is generated and nobody grades. Every decision is taken again (which groups are admitted, filtered, taken, dropped),
every batch is built again, and each must be the one of then, byte for byte; with `weights`, from the first checkpoint that is
there, so must the weights of every version. The first difference ends the replay, and is named.
"""

import asyncio
import json
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from antiphon.algorithms.rewards import Controllers, restore_controllers
from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import AntiphonError, RecordError
from antiphon.core.types import (
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    AttemptId,
    AttemptStatus,
    Failure,
    FloatArray,
    Group,
    Pack,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    TrainBatch,
    Trajectory,
    TrajectoryMeta,
)
from antiphon.inspect.recorded_config import has_model
from antiphon.learning.learner import Learner, ModelRoles
from antiphon.record import reading, schema, trajectories
from antiphon.record.checkpoint import checkpoint_name, read_state
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger, LedgerStore, run_synchronously
from antiphon.record.resume import ReusableRollouts, find_reusable, open_first_lineage
from antiphon.rollout.filters import FILTERS
from antiphon.rollout.scheduler import Scheduler
from antiphon.run.config import RunConfig
from antiphon.run.launch import model_directory, start_models
from antiphon.run.loop import make_step_pipeline, run_supervised
from antiphon.tasks.mixture import Mixture
from antiphon.weights.base import TransferContext
from antiphon.weights.shared_directory import shared_directory

SETTLE = 12  # turns of the event loop after which nothing is under way that does not wait for an arrival


class ReplayMismatch(AntiphonError):
    """What a replay came to is not what the run came to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    attempt: AttemptId
    trajectory: Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Take:
    step: int
    groups: tuple[int, ...]
    batch: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Release:
    version: int
    digest: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Life:
    """One lineage, as the ledger has it."""

    lineage: int
    parent: int | None
    step: int  # at its beginning
    version: int
    state: dict[str, Any] | None
    heard: Sequence[_Arrival | _Take | _Release]


class _Recorded:
    """A `AttemptRunner` whose attempts end when they arrived."""

    def __init__(self) -> None:
        self.running: dict[AttemptId, asyncio.Future[Trajectory]] = {}

    async def run(self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion) -> Trajectory:
        self.running[attempt] = asyncio.get_running_loop().create_future()
        try:
            return await self.running[attempt]
        finally:
            del self.running[attempt]

    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling | None = None
    ) -> Any:
        raise RecordError("a run with a sampling loop of the user's own cannot be replayed: its calls are not recorded")

    async def score(self, played: Any) -> Trajectory:
        raise NotImplementedError  # nothing was played


class _Reader:
    """A `Trainer` that only looks at what it is given, or hands it on to a real one."""

    def __init__(self) -> None:
        self.learner: Learner | None = None

    async def step(self, batch: TrainBatch) -> dict[str, float]:
        return await self.learner.step(batch) if self.learner else {}

    async def score(self, packs: Sequence[Pack]) -> list[FloatArray]:
        return await self._with_weights.score(packs)

    async def attention_stats(self, packs: Sequence[Pack]) -> list[FloatArray]:
        return await self._with_weights.attention_stats(packs)

    @property
    def _with_weights(self) -> Learner:
        if self.learner is None:
            raise RecordError(
                "a batch of this run holds what the policy or a critic said: it is replayed with --weights, from the first "
                "checkpoint that was kept (checkpoint.keep_every: 1 keeps all)"
            )
        return self.learner


def replay(run: Path, config: RunConfig, *, weights: bool = False, tell: Callable[[str], None] = print) -> int:
    """Replay a run; returns the number of steps. `ReplayMismatch` names the first one that there is."""
    return asyncio.run(_replay(run, config, weights, tell))


async def _replay(run: Path, config: RunConfig, weights: bool, tell: Callable[[str], None]) -> int:
    if config.rollout.sampler:
        raise RecordError("a run with a sampling loop of the user's own cannot be replayed: its calls are not recorded")
    steps = 0
    async with AsyncExitStack() as stack:
        db = stack.enter_context(closing(schema.open_ledger(run)))
        models = await stack.enter_async_context(_models(run, config, weights))
        exchange = TransferContext(stack.enter_context(shared_directory("replay")))
        again = _Again(run, config, db, models, exchange if weights else None)
        for life in _lives(db, run):
            done = await again.live(life)
            tell(f"lineage {life.lineage}: {done} steps as they were")
            steps += done
    return steps


def requires_models(config: RunConfig, weights: bool) -> bool:
    """Return True if a replay asks models: for weights to compare, or for what others than the policy said of tokens."""
    return weights or bool({REFERENCE_LOGPROBS, TEACHER_LOGPROBS} & config.algorithm.required_streams)


@asynccontextmanager
async def _models(run: Path, config: RunConfig, weights: bool) -> AsyncIterator[ModelRoles | None]:
    """The models that a replay needs: for the weights, if they are compared, and for what others said than the policy."""
    if not requires_models(config, weights):
        yield None
        return
    cluster: Cluster = CLUSTERS.resolve(config.cluster.kind)(config.cluster, None)
    try:
        path = str(run / "model") if has_model(run) else config.model.path
        model = await model_directory(cluster, path, Path(), config.seed)
        yield (await start_models(cluster, model, config))[0]
    finally:
        await cluster.close()


def _lives(db: sqlite3.Connection, run: Path) -> Iterator[_Life]:
    content = cache(lambda file: trajectories.read(reading.resolve_file(run, f"rollouts/{file}")))
    with reading.convert_read_errors(run / "ledger.db"):
        rows = db.execute("SELECT lineage, parent, cut, version, state FROM lineages ORDER BY lineage").fetchall()
    if not rows:
        raise RecordError(f"{run / 'ledger.db'} has no lineage: there is nothing to replay")
    for row in rows:
        with reading.convert_read_errors(run / "ledger.db"):
            life = _life(db, row, content)
        yield life


def _life(db: sqlite3.Connection, row: tuple[Any, ...], content: Any) -> _Life:
    lineage, parent, cut, version, state = row
    heard = [*_arrivals(db, lineage, content), *_turns(db, lineage)]
    (first,) = db.execute(
        "SELECT min(version) FROM groups WHERE lineage = ?", (lineage,)
    ).fetchone()  # a warm start has published before
    return _Life(
        lineage=lineage,
        parent=parent,
        step=cut,
        version=version if parent is not None else first or 0,
        state=json.loads(state) if state else None,
        heard=[what for _, what in sorted(heard, key=lambda entry: entry[0])],
    )


def _arrivals(db: sqlite3.Connection, lineage: int, content: Any) -> Iterator[tuple[int, _Arrival]]:
    """What attempts came to, with the order in which the scheduler heard of it; what was taken over comes by itself."""
    for order, group, sibling, attempt, started, failure, file, written, task, prompt in db.execute(
        "SELECT arrival, grp, sibling, try, started, failure, file, digest, task, id FROM attempts"
        " JOIN groups g USING (lineage, grp) JOIN prompts USING (prompt)"
        " WHERE lineage = ? AND arrival IS NOT NULL AND origin IS NULL",
        (lineage,),
    ):
        name = AttemptId(group, sibling, attempt)
        if file is None:
            source, _, message = failure.partition(": ")
            version = PolicyVersion(lineage, started)
            meta = TrajectoryMeta(
                id=name,
                prompt_id=prompt,
                task=task,
                started=version,
                newest=version,
                status=AttemptStatus.FAILED,
                score=Score.ungraded(message),
                failure=Failure(source=source, message=message),
            )
            yield order, _Arrival(attempt=name, trajectory=Trajectory(meta=meta, payload=()))
            continue
        trajectory = content(file).get(name)
        if trajectory is None or trajectories.digest(trajectory) != written:
            raise ReplayMismatch(
                f"attempt {lineage}:{name}: its trajectory in rollouts/{file} is not the one that was recorded"
            )
        yield order, _Arrival(attempt=name, trajectory=trajectory)


def _turns(db: sqlite3.Connection, lineage: int) -> Iterator[tuple[int, _Take | _Release]]:
    """When steps began and ended."""
    for step, took, released, batch, version, weights in db.execute(
        "SELECT step, took, released, batch, s.version, digest FROM steps s LEFT JOIN versions v"
        " ON v.lineage = s.lineage AND v.version = s.version WHERE s.lineage = ? ORDER BY step",
        (lineage,),
    ).fetchall():
        groups = db.execute("SELECT grp FROM groups WHERE lineage = ? AND step = ?", (lineage, step)).fetchall()
        yield took, _Take(step=step, groups=tuple(group for (group,) in groups), batch=batch)
        if released is not None:
            yield released, _Release(version=version, digest=weights)


class _Again:
    """The real orchestration, once more."""

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        db: sqlite3.Connection,
        models: ModelRoles | None,
        exchange: TransferContext | None,
    ) -> None:
        """Weights are compared at the exchange, if there is one."""
        self._run = run
        self._config = config
        self._db = db
        self._models = models if exchange else None
        self._exchange = exchange
        self._learning = False  # the weights are those of the run
        self._readers = [_Reader() for _ in range(1 + (config.critic.count if config.critic else 0))]
        reference, teachers = (models.reference, models.teachers) if models else (None, [])
        self._training = make_step_pipeline(config, self._readers[0], reference, self._readers[1:], teachers)
        self._mixture = Mixture.load(config.tasks, config.seed)
        self._beginning = self._mixture.state()

    async def live(self, life: _Life) -> int:
        """Replay one lineage; returns its steps."""
        with tempfile.TemporaryDirectory() as place, closing(LedgerStore(Path(place))) as store:
            open_first_lineage(store)
            return await run_supervised((), lambda owner: self._live(life, store, owner))

    async def _live(self, life: _Life, store: LedgerStore, owner: asyncio.TaskGroup) -> int:
        attempts, steps = _Recorded(), 0
        scheduler = self._scheduler(life, attempts, store)
        await self._load(life, life.step)
        scheduler.start(owner)
        for what in life.heard:
            await _settle()
            match what:
                case _Arrival(attempt=attempt, trajectory=trajectory):
                    if attempt not in attempts.running:
                        raise ReplayMismatch(f"attempt {life.lineage}:{attempt} arrived then, and does not run now")
                    attempts.running[attempt].set_result(trajectory)
                case _Take():
                    await self._train(await _taken(what, scheduler, owner), what, scheduler.admission.version.n)
                    steps += 1
                case _Release():
                    scheduler.publish()
                    scheduler.admit()
                    await self._compare(what)
                    await self._load(life, life.step + steps)
        scheduler.stop()
        return steps

    def _scheduler(self, life: _Life, attempts: _Recorded, store: LedgerStore) -> Scheduler:
        config, back = self._config, ReusableRollouts()
        if life.parent is not None and not config.rollout.deterministic:
            oldest = life.version - config.rollout.max_age
            with reading.convert_read_errors(self._run / "ledger.db"):
                back = find_reusable(self._db, self._run / "rollouts", life.lineage, life.version, oldest)
            back.exclude_tasks(config.judged_together)
        scheduler = Scheduler(
            config=config.rollout,
            version=PolicyVersion(life.lineage, life.version),
            next_prompt=self._mixture.next,
            episodes=attempts,
            keep=FILTERS.resolve(config.rollout.filter) if config.rollout.filter else None,
            deadlines=Deadlines(),
            ledger=Ledger(store, Events(), run=run_synchronously),
        )
        self._learning = False
        for reader in self._readers:
            reader.learner = None
        with reading.convert_read_errors(f"{self._run / 'ledger.db'}: the state of lineage {life.lineage}"):
            self._training.controllers = (
                restore_controllers(life.state.get("controllers")) if life.state else Controllers()
            )
            self._mixture.restore(life.state["mixture"] if life.state else self._beginning)
            if life.state:
                scheduler.restore(life.state["scheduler"], self._mixture.find, back)
        return scheduler

    async def _train(self, groups: Sequence[Group], then: _Take, version: int) -> None:
        _, batch = await self._training.learn(then.step, version, groups)
        if then.batch is not None and batch != then.batch:
            raise ReplayMismatch(f"step {then.step}: the batch is not the one that was trained on")

    async def _load(self, life: _Life, step: int) -> None:
        """Begin to train where the first checkpoint lies."""
        directory = reading.resolve_path(self._run, f"checkpoints/{checkpoint_name(step)}")
        if self._models is None or self._learning or not directory.is_dir():
            return
        if step > life.step and read_state(directory)["lineage"] != life.lineage:  # of another life, which undid this
            return
        reading.check_model_files(directory)
        config = self._config
        await self._models.begin(config.algorithm, config.learner, config.critic, config.steps)
        await self._models.restore(directory)
        self._training.controllers = restore_controllers(read_state(directory).get("controllers"))
        for reader, learner in zip(self._readers, [self._models.learner, *self._models.critics], strict=True):
            reader.learner = learner
        self._learning = True

    async def _compare(self, then: _Release) -> None:
        """The weights of a version against those of then."""
        if self._models is None or self._exchange is None or not self._learning:
            return
        update = await self._models.learner.publish(then.version, self._exchange)
        if update.manifest.digest != then.digest:
            raise ReplayMismatch(f"version {then.version}: its weights are not those that were published")


async def _taken(then: _Take, scheduler: Scheduler, owner: asyncio.TaskGroup) -> Sequence[Group]:
    """The groups of a step; `ReplayMismatch` unless they are those of then."""
    taking = owner.create_task(scheduler.next_step(), name=f"step {then.step}")
    await _settle()
    if not taking.done():
        taking.cancel()
        raise ReplayMismatch(f"step {then.step} began with groups {list(then.groups)}; now there are not enough")
    groups = taking.result()
    if {group.id for group in groups} != set(then.groups):
        now = sorted(group.id for group in groups)
        raise ReplayMismatch(f"step {then.step} took groups {sorted(then.groups)}; now it takes {now}")
    return groups


async def _settle() -> None:
    for _ in range(SETTLE):
        await asyncio.sleep(0)

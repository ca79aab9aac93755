"""The offline verbs, from a configuration and its data to `runs/<name>/model`: `dpo`, `reward-model`, `distill`.

    rows of the data ──▶ samples, a group for each row ──▶ batches ──▶ learner.step ──▶ a model directory

A verb says what becomes of a row, which workers there are, and what a batch is; the loop is the same. Nothing is generated, so
nothing is asynchronous but that the next batch is made while the learner is at this one. The order of the rows follows from
the seed, so a run that is resumed at a step goes on with the batches that it would have had.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.cluster.placement import Placement, assign_devices
from antiphon.core.config import dump, load
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import DataError
from antiphon.core.rng import derive, generator
from antiphon.core.types import REFERENCE_LOGPROBS, Pack, Prompt, Sample, TrainBatch
from antiphon.core.workers import WorkerHandle
from antiphon.learning.data_samples import (
    make_pair,
    make_response,
    make_scored_pair,
    make_text,
    pair_mean_batch,
    token_mean_batch,
)
from antiphon.learning.learner import WorkerLearner, objective_learner
from antiphon.learning.packing import pack_samples, split_packs
from antiphon.learning.parallel.rank_group import RankGroup
from antiphon.offline.checkpoints import OfflineCheckpoints, find_checkpoint, next_lineage
from antiphon.offline.config import DistillConfig, DpoConfig, OfflineConfig, RewardModelConfig
from antiphon.record.live import View, make_view
from antiphon.record.metrics import Metrics
from antiphon.record.run_dir import RunDirectory, convert_write_errors
from antiphon.record.run_start import RunStart
from antiphon.record.trackers import TrackedRun, TrackerFeeds, open_trackers
from antiphon.run.commands import INTERRUPTED, resume_after_deaths, run_to_exit_code
from antiphon.run.config_changes import check_same
from antiphon.run.dtypes import AUTO, choose_dtype
from antiphon.run.launch.model_checks import check_model, check_tokenizers
from antiphon.run.launch.model_directory import model_directory, round_base
from antiphon.run.placement import check_ranks_apart
from antiphon.run.supervision import StopSignal, name_step_in_errors, run_supervised
from antiphon.tasks.prompts import load_examples
from antiphon.tasks.rendering import Renderer

T = TypeVar("T")
# Keys that may change when a run is resumed.
CHANGEABLE = (
    *("steps", "epochs", "evaluate_every", "timeout", "record", "checkpoint", "cluster", "placement"),
    *("learner.threads", "learner.mesh", "learner.cpu_offload", "learner.optimizer", "learner.on_nonfinite"),
)
Group = Sequence[Sample]  # of one row of the data
MakeGroup = Callable[..., list[Sample]]  # of the row's number, and the tokens of its prompt and responses
Main = Callable[["Offline"], Coroutine[Any, Any, bool]]
MakeBatch = Callable[[Sequence[Group]], Coroutine[Any, Any, TrainBatch]]


def dpo(config: DpoConfig, *, overwrite: bool = False, resume: bool = False) -> int:
    """Run `antiphon dpo`: the log-probs of the model that the run begins with are the reference's; return the exit code."""

    async def main(run: "Offline") -> bool:
        learner = await run.learner("PreferenceLearner", config.dpo)
        run.data = await run.referenced(learner, run.data)
        run.validation = await run.referenced(learner, run.validation)
        return await run.train(learner, run.pair_mean_batch)

    return _run(config, make_pair, main, overwrite, resume)


def reward_model(config: RewardModelConfig, *, overwrite: bool = False, resume: bool = False) -> int:
    """Run `antiphon reward-model`; return the exit code."""

    async def main(run: "Offline") -> bool:
        learner = await run.learner("RewardLearner")
        return await run.train(learner, run.pair_mean_batch)

    return _run(config, make_scored_pair, main, overwrite, resume)


def distill(config: DistillConfig, *, overwrite: bool = False, resume: bool = False) -> int:
    """Run `antiphon distill`: the teacher is a worker of its own, a batch ahead of the learner; return the exit code."""

    async def main(run: "Offline") -> bool:
        made = run.directory.path / "teacher"
        path = await model_directory(run.cluster, config.distill.teacher, made, config.seed)
        check_tokenizers(run.model, path)
        given = config.distill, max(Renderer(run.model).vocabulary().values()) + 1
        await check_model(run.cluster, path, config.learner)
        learner = await run.learner("DistillationLearner", *given)
        teacher = await run.spawn("teacher", "Teacher", path, *given)

        async def taught(groups: Sequence[Group]) -> TrainBatch:
            (update,) = token_mean_batch(groups, config.learner.tokens_per_pack, config.learner.mesh.data).updates
            packs = [pack for of_rank in update.packs for pack in of_rank]
            said = iter(await run.wait(teacher.call("teach", packs), "teach", "the teacher"))
            of_ranks = tuple(tuple(replace(p, streams=next(said)) for p in of_rank) for of_rank in update.packs)
            return TrainBatch(updates=(replace(update, packs=of_ranks),))

        return await run.train(learner, taught)

    return _run(config, make_text if config.distill.on_prompts else make_response, main, overwrite, resume)


class WorkerOfflineLearner(WorkerLearner):
    """A `learning.objectives.base.OfflineLearner` behind a `WorkerHandle`."""

    async def measure(self, packs: Sequence[Pack]) -> list[dict[str, float]]:
        """Return of each pack its part of the loss and the sums of its measures."""
        measured: list[dict[str, float]] = await self._handle.call("measure", list(packs))
        return measured


@dataclass(slots=True, kw_only=True)
class Offline:
    """One run of an offline verb."""

    config: OfflineConfig
    cluster: Cluster
    model: Path  # that it begins with
    data: Sequence[Group]
    validation: Sequence[Group]
    start: RunStart
    metrics: Metrics
    trackers: TrackerFeeds
    view: View
    placement: Placement
    checkpoint: Path | None  # that it goes on from
    state: dict[str, Any]  # of that checkpoint
    deadlines: Deadlines = field(default_factory=Deadlines)
    workers: list[WorkerHandle] = field(default_factory=list)
    stopping: StopSignal = field(default_factory=StopSignal)

    @property
    def directory(self) -> RunDirectory:
        """The run's directory."""
        return self.start.directory

    async def learner(self, objective: str, *more: Any) -> WorkerOfflineLearner:
        """Start the learner of an objective (`learning.learner.OBJECTIVES`), on the model that the run begins with."""
        return WorkerOfflineLearner(await self.spawn("learner", objective, self.model, *more))

    async def spawn(self, name: str, objective: str, path: Path, *more: Any) -> WorkerHandle:
        """Start a model on the learner's mesh, each rank in a worker, whose death is the run's."""
        settings, ranks = self.config.learner, self.config.learner.mesh.world
        kind = objective_learner(objective, settings.kind)
        if name != "learner":  # is not trained
            settings = settings.model_copy(update={"lora": None, "freeze": ()})
        args = (str(path), settings, derive(self.config.seed, name), *more)
        members = [
            self.cluster.spawn(
                name if ranks == 1 else f"{name}-rank-{rank}", kind, *args, place=self.placement.place(name, rank)
            )
            for rank in range(ranks)
        ]
        self.workers.extend(members)
        if not settings.forms_group:
            return members[0]
        group = RankGroup(members, settings.mesh)
        await self.wait(group.rendezvous(self.config.placement.host), "start", f"the {name}")
        return group

    async def wait(self, awaitable: Awaitable[T], name: str, on: str = "the learner") -> T:
        """Wait for a worker, which may hang."""
        deadline, key = self.config.timeout, "timeout"
        return await self.deadlines.wait(awaitable, name=name, owner="run", on=on, deadline=deadline, key=key)

    async def pair_mean_batch(self, pairs: Sequence[Group]) -> TrainBatch:
        """An update on pairs."""
        return pair_mean_batch(pairs, self.config.learner.tokens_per_pack, self.config.learner.mesh.data)

    async def referenced(self, learner: WorkerOfflineLearner, pairs: Sequence[Group]) -> list[Group]:
        """The pairs with the log-probs of the learner's model as it is."""
        found: list[Group] = []
        for start in range(0, len(pairs), self.config.batch_size):
            samples = [sample for group in pairs[start : start + self.config.batch_size] for sample in group]
            members, packs = pack_samples(samples, self.config.learner.tokens_per_pack)
            said = split_packs(samples, members, await self.wait(learner.predict(packs), "reference"))
            streams = (s.streams.with_stream(REFERENCE_LOGPROBS, a) for s, a in zip(samples, said, strict=True))
            both = [replace(sample, streams=each) for sample, each in zip(samples, streams, strict=True)]
            found += zip(both[::2], both[1::2], strict=True)
        return found

    async def train(self, learner: WorkerOfflineLearner, batch_of: MakeBatch) -> bool:
        """Train; leave the model and a summary behind. Return False if Ctrl-C ended it, which leaves a checkpoint."""

        async def main(owner: asyncio.TaskGroup) -> bool:
            with self.stopping.on_interrupt(self.view.message):
                return await self._train(owner, learner, batch_of)

        return await run_supervised([worker.died() for worker in self.workers], main)

    async def _train(self, owner: asyncio.TaskGroup, learner: WorkerOfflineLearner, batch_of: MakeBatch) -> bool:
        config, began, done = self.config, time.monotonic(), self.state.get("step", 0)
        steps = max(config.steps or config.epochs * -(-len(self.data) // config.batch_size), done)
        parameters = await self.wait(learner.begin(AlgorithmConfig(), config.learner.optimizer, steps), "begin")
        checkpoints = OfflineCheckpoints(self.directory, config.checkpoint, learner, self.wait, self.view.message)
        if self.checkpoint is not None:
            await self.wait(learner.restore(self.checkpoint), "restore")
        self.start.confirm()
        held_out = await batch_of(self.validation) if self.validation else None
        before = after = self.state.get("validation_before")
        if held_out and (before is None or done == steps):
            after = await self._evaluate(learner, held_out)
            before = before or after
        if checkpoints.is_due(done):
            await checkpoints.save(owner, {"step": done, "validation_before": before})
        draws = batches(self.data, config.batch_size, config.seed if config.data.shuffle else None)
        ahead = (owner.create_task(batch_of(groups)) for groups in islice(draws, done, steps))
        following = next(ahead, None)
        while following is not None and not self.stopping.is_set:
            batch, following, done = await following, next(ahead, None), done + 1
            with name_step_in_errors(f"step {done}"):
                trained = await self.wait(learner.step(batch), "step")
            metrics = {f"learner/{name}": value for name, value in trained.items()}
            due = done == steps or (config.evaluate_every and done % config.evaluate_every == 0)
            if held_out and due:
                after = await self._evaluate(learner, held_out)
                metrics |= {f"evaluation/{name}": value for name, value in after.items()}
            self._record(done, steps, metrics)
            if checkpoints.is_due(done) or done == steps:
                await checkpoints.save(owner, {"step": done, "validation_before": before})
        if following is not None:
            following.cancel()
            await checkpoints.save(owner, {"step": done, "validation_before": before})
            await checkpoints.wait_saved()
            self.view.message(f"stopped after step {done} of {steps}; --resume goes on")
            return False
        place = await checkpoints.save_model(steps)
        seconds = time.monotonic() - began
        summary = {"steps": steps, "rows": len(self.data), "parameters": parameters, "seconds": seconds}
        self.directory.write_summary({**summary, "validation_before": before, "validation_after": after})
        self.view.message(f"{seconds:.0f} s; {place}")
        return True

    async def _evaluate(self, learner: WorkerOfflineLearner, batch: TrainBatch) -> dict[str, float]:
        """Return the metrics of a batch of one update, without a step."""
        totals: dict[str, float] = defaultdict(float)
        ranks = self.config.learner.mesh.data
        packs = [pack for of_rank in batch.updates[0].packs for pack in of_rank]
        for start in range(0, len(packs), ranks):
            for measured in await self.wait(learner.measure(packs[start : start + ranks]), "evaluate"):
                for name, value in measured.items():
                    totals[name] += value
        count, loss = totals.pop("tokens"), totals.pop("loss")
        return {"loss": loss} | {name: value / count for name, value in totals.items()}

    def _record(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        self.metrics.record_all(metrics)
        reduced = self.metrics.flush(step)
        self.trackers.notify()
        self.view.step(step, steps, reduced, self.deadlines)


def batches(rows: Sequence[T], size: int, seed: int | None) -> Iterator[list[T]]:
    """Rows without end, `size` at a time: each once an epoch, in an order of its own; without a seed in theirs.

    The last batch of an epoch has what is left.
    """
    for epoch in count():
        order = np.arange(len(rows)) if seed is None else generator(seed, "rows", epoch).permutation(len(rows))
        for start in range(0, len(rows), size):
            yield [rows[index] for index in order[start : start + size]]


def _run(config: OfflineConfig, group: MakeGroup, main: Main, overwrite: bool, resume: bool) -> int:
    async def once(overwrite: bool, resume: bool) -> int:
        async with _built(config, group, overwrite, resume) as run:
            return 0 if await main(run) else INTERRUPTED

    checkpoints = Path(config.record.directory, config.name, "checkpoints")
    return run_to_exit_code(resume_after_deaths(once, checkpoints, config.checkpoint.restarts, overwrite, resume))


@asynccontextmanager
async def _built(config: OfflineConfig, group: MakeGroup, overwrite: bool, resume: bool) -> AsyncIterator[Offline]:
    """The run of a configuration, with its data as samples and no worker yet."""
    async with AsyncExitStack() as stack:
        # What can be wrong with the input is found before anything is started.
        data = load_examples("data", config.data, config.seed)
        held_out = load_examples("validation", config.validation, config.seed) if config.validation else []
        stack.enter_context(convert_write_errors(Path(config.record.directory, config.name)))
        start = RunStart(config.record.directory, config.name, overwrite=overwrite, resume=resume)
        directory = stack.enter_context(start).directory  # as it was before, if the start is refused
        view = make_view(config.record.live)
        config = _choose_dtype(config, directory.config if resume else None, view.message)
        if resume:
            check_same(directory.config, config, CHANGEABLE, elsewhere="")
        directory.write_config(dump(config))
        view.start(config.name, f"{len(data)} rows, {config.batch_size} a step")
        stack.callback(view.close)
        checkpoint, state = find_checkpoint(directory, view.message) if resume else (None, {})
        lineage = next_lineage(directory.metrics) if resume else 0
        metrics = stack.enter_context(Metrics(directory.metrics, lineage=lineage))
        tracked = TrackedRun(name=config.name, directory=directory, lineage=lineage, cut=state.get("step", 0))
        trackers = open_trackers(config.record.trackers, tracked, time.time, view.message)
        stack.callback(trackers.close)
        trackers.notify()
        cluster: Cluster = CLUSTERS.resolve(config.cluster.kind)(config.cluster, directory.logs)
        stack.push_async_callback(cluster.close)
        made = directory.path / "initial_model"
        template = config.model.chat_template
        model = await model_directory(cluster, config.model.path, made, config.seed, chat_template=template)
        model = await round_base(cluster, model, made, config.learner)
        await check_model(cluster, model, config.learner)
        placement = await _place(cluster, config)
        renderer = Renderer(model)
        yield Offline(
            config=config,
            cluster=cluster,
            model=model,
            data=_groups(data, renderer, group),
            validation=_groups(held_out, renderer, group),
            start=start,
            metrics=metrics,
            trackers=trackers,
            view=view,
            placement=placement,
            checkpoint=checkpoint,
            state=state,
        )


def _choose_dtype(config: OfflineConfig, before: Path | None, report: Callable[[str], None]) -> OfflineConfig:
    """The configuration with a dtype in the place of `auto`: that of the run to resume, whose configuration is `before`."""
    learner = config.learner
    if before is not None and learner.dtype == AUTO:
        learner = learner.model_copy(update={"dtype": load(before, model=type(config)).learner.dtype})
    learner = choose_dtype(learner, "learner", report, local=config.cluster.one_machine)
    return config.model_copy(update={"learner": learner})


async def _place(cluster: Cluster, config: OfflineConfig) -> Placement:
    """Reserve the devices of the models."""
    roles, mesh = config.placement.roles, config.learner.mesh
    if not roles:
        return Placement()
    found = assign_devices(roles, cluster.nodes(), dict.fromkeys(roles, mesh.world))
    for role in roles:
        check_ranks_apart(role, found.known_places(role), mesh.world, config.placement.host, "placement.host")
    await cluster.reserve([place for role in roles for place in found.known_places(role)])
    return found


def _groups(rows: Sequence[tuple[Prompt, tuple[str, ...]]], renderer: Renderer, group: MakeGroup) -> list[Group]:
    """The rows in tokens."""
    groups: list[Group] = []
    for number, (prompt, responses) in enumerate(rows):
        tokens = renderer.encode_prompt(prompt.messages)
        if not len(tokens):
            message = f"prompt {prompt.id!r} is empty: there is nothing that its response could follow"
            raise DataError(message, row=number + 1)
        groups.append(group(number, tokens, *map(renderer.encode_response, responses)))
    return groups

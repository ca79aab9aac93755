"""The offline verbs, from a configuration and its data to `runs/<name>/model`: `dpo`, `reward-model`, `distill`.

    rows of the data ──▶ samples, a group for each row ──▶ batches ──▶ learner.step ──▶ a model directory

A verb says what becomes of a row, which workers there are, and what a batch is; the loop is the same. Nothing is generated, so
nothing is asynchronous but that the next batch is made while the learner is at this one.
"""

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.core.config import dump
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import DataError
from antiphon.core.rng import derive, generator
from antiphon.core.types import REFERENCE_LOGPROBS, Pack, Prompt, Sample, TrainBatch
from antiphon.core.workers import WorkerHandle
from antiphon.learning.data_samples import make_pair, make_response, make_scored_pair, pair_mean_batch, token_mean_batch
from antiphon.learning.learner import WorkerLearner
from antiphon.learning.packing import pack_samples, split_packs
from antiphon.offline.config import DistillConfig, DpoConfig, OfflineConfig, RewardModelConfig
from antiphon.record.checkpoint import TRAINING_STATE, publish_checkpoint, staging_dir
from antiphon.record.live import View, make_view
from antiphon.record.metrics import Metrics
from antiphon.record.run_dir import RunDirectory, convert_write_errors
from antiphon.record.run_start import RunStart
from antiphon.record.trackers import TrackedRun, TrackerFeeds, open_trackers
from antiphon.run.launch.model_checks import check_tokenizers
from antiphon.run.launch.model_directory import model_directory
from antiphon.run.supervision import name_step_in_errors, run_supervised
from antiphon.tasks.prompts import load_examples
from antiphon.tasks.rendering import Renderer

T = TypeVar("T")
Group = Sequence[Sample]  # of one row of the data
MakeGroup = Callable[..., list[Sample]]  # of the row's number, and the tokens of its prompt and responses
MakeBatch = Callable[[Sequence[Group]], Coroutine[Any, Any, TrainBatch]]


def dpo(config: DpoConfig, *, overwrite: bool = False) -> None:
    """Run `antiphon dpo`: the log-probs of the model that the run begins with are the reference's."""

    async def main(run: "Offline") -> None:
        learner = run.learner("antiphon.learning.objectives.pairs:PreferenceLearner", config.dpo)
        run.data = await run.referenced(learner, run.data)
        run.validation = await run.referenced(learner, run.validation)
        await run.train(learner, run.pair_mean_batch)

    asyncio.run(_run(config, overwrite, make_pair, main))


def reward_model(config: RewardModelConfig, *, overwrite: bool = False) -> None:
    """Run `antiphon reward-model`."""

    async def main(run: "Offline") -> None:
        await run.train(run.learner("antiphon.learning.objectives.pairs:RewardLearner"), run.pair_mean_batch)

    asyncio.run(_run(config, overwrite, make_scored_pair, main))


def distill(config: DistillConfig, *, overwrite: bool = False) -> None:
    """Run `antiphon distill`: the teacher is a worker of its own, a batch ahead of the learner."""

    async def main(run: "Offline") -> None:
        made = run.directory.path / "teacher"
        path = await model_directory(run.cluster, config.distill.teacher, made, config.seed)
        check_tokenizers(run.model, path)
        given = config.distill, max(Renderer(run.model).vocabulary().values()) + 1
        learner = run.learner("antiphon.learning.objectives.distill:DistillationLearner", *given)
        teacher = run.spawn("teacher", "antiphon.learning.objectives.distill:Teacher", path, *given)

        async def taught(groups: Sequence[Group]) -> TrainBatch:
            (update,) = token_mean_batch(groups, config.learner.tokens_per_pack).updates
            (packs,) = update.packs
            said = [await run.wait(teacher.call("teach", pack), "teach", "the teacher") for pack in packs]
            packs = tuple(replace(pack, streams=streams) for pack, streams in zip(packs, said, strict=True))
            return TrainBatch(updates=(replace(update, packs=(packs,)),))

        await run.train(learner, taught)

    asyncio.run(_run(config, overwrite, make_response, main))


class WorkerOfflineLearner(WorkerLearner):
    """A `learning.objectives.base.OfflineLearner` behind a `WorkerHandle`."""

    async def measure(self, pack: Pack) -> dict[str, float]:
        """Return the pack's part of the loss and the sums of its measures."""
        measured: dict[str, float] = await self._handle.call("measure", pack)
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
    deadlines: Deadlines = field(default_factory=Deadlines)
    workers: list[WorkerHandle] = field(default_factory=list)

    @property
    def directory(self) -> RunDirectory:
        """The run's directory."""
        return self.start.directory

    def learner(self, kind: str, *more: Any) -> WorkerOfflineLearner:
        """Start the learner, on the model that the run begins with."""
        return WorkerOfflineLearner(self.spawn("learner", kind, self.model, *more))

    def spawn(self, name: str, kind: str, path: Path, *more: Any) -> WorkerHandle:
        """Start a worker with a model, whose death is the run's."""
        seed = derive(self.config.seed, name)
        self.workers.append(self.cluster.spawn(name, kind, str(path), self.config.learner, seed, *more))
        return self.workers[-1]

    async def wait(self, awaitable: Awaitable[T], name: str, on: str = "the learner") -> T:
        """Wait for a worker, which may hang."""
        deadline, key = self.config.timeout, "timeout"
        return await self.deadlines.wait(awaitable, name=name, owner="run", on=on, deadline=deadline, key=key)

    async def pair_mean_batch(self, pairs: Sequence[Group]) -> TrainBatch:
        """An update on pairs."""
        return pair_mean_batch(pairs, self.config.learner.tokens_per_pack)

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

    async def train(self, learner: WorkerOfflineLearner, batch_of: MakeBatch) -> None:
        """Train, and leave the model and a summary behind."""

        async def main(owner: asyncio.TaskGroup) -> None:
            await self._train(owner, learner, batch_of)

        await run_supervised([worker.died() for worker in self.workers], main)

    async def _train(self, owner: asyncio.TaskGroup, learner: WorkerOfflineLearner, batch_of: MakeBatch) -> None:
        config, began = self.config, time.monotonic()
        steps = config.steps or config.epochs * -(-len(self.data) // config.batch_size)
        parameters = await self.wait(learner.begin(AlgorithmConfig(), config.learner.optimizer, steps), "begin")
        self.start.confirm()
        held_out = await batch_of(self.validation) if self.validation else None
        before = after = await self._evaluate(learner, held_out) if held_out else None
        draws = batches(self.data, config.batch_size, config.seed if config.data.shuffle else None)
        following = owner.create_task(batch_of(next(draws)))
        for step in range(1, steps + 1):
            batch = await following
            if step < steps:
                following = owner.create_task(batch_of(next(draws)))
            with name_step_in_errors(f"step {step}"):
                trained = await self.wait(learner.step(batch), "step")
            metrics = {f"learner/{name}": value for name, value in trained.items()}
            due = step == steps or (config.evaluate_every and step % config.evaluate_every == 0)
            if held_out and due:
                after = await self._evaluate(learner, held_out)
                metrics |= {f"evaluation/{name}": value for name, value in after.items()}
            self._record(step, steps, metrics)
        await self._save(learner, steps)
        seconds = time.monotonic() - began
        summary = {"steps": steps, "rows": len(self.data), "parameters": parameters, "seconds": seconds}
        self.directory.write_summary({**summary, "validation_before": before, "validation_after": after})
        self.view.message(f"{seconds:.0f} s; {self.directory.path / 'model'}")

    async def _evaluate(self, learner: WorkerOfflineLearner, batch: TrainBatch) -> dict[str, float]:
        """Return the metrics of a batch of one update, without a step."""
        totals: dict[str, float] = defaultdict(float)
        for pack in (pack for rank in batch.updates[0].packs for pack in rank):
            for name, value in (await self.wait(learner.measure(pack), "evaluate")).items():
                totals[name] += value
        count, loss = totals.pop("tokens"), totals.pop("loss")
        return {"loss": loss} | {name: value / count for name, value in totals.items()}

    def _record(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        self.metrics.record_all(metrics)
        reduced = self.metrics.flush(step)
        self.trackers.notify()
        self.view.step(step, steps, reduced, self.deadlines)

    async def _save(self, learner: WorkerOfflineLearner, steps: int) -> None:
        place = self.directory.path / "model"
        aside = staging_dir(place)
        saving = await self.wait(learner.save(aside), "save")
        await self.wait(saving, "save")
        shutil.rmtree(aside / TRAINING_STATE)  # for going on, which an offline run cannot
        publish_checkpoint(aside, place, {"step": steps})


def batches(rows: Sequence[T], size: int, seed: int | None) -> Iterator[list[T]]:
    """Rows without end, `size` at a time: each once an epoch, in an order of its own; without a seed in theirs.

    The last batch of an epoch has what is left.
    """
    for epoch in count():
        order = np.arange(len(rows)) if seed is None else generator(seed, "rows", epoch).permutation(len(rows))
        for start in range(0, len(rows), size):
            yield [rows[index] for index in order[start : start + size]]


async def _run(
    config: OfflineConfig, overwrite: bool, group: MakeGroup, main: Callable[[Offline], Awaitable[None]]
) -> None:
    async with _built(config, overwrite, group) as run:
        await main(run)


@asynccontextmanager
async def _built(config: OfflineConfig, overwrite: bool, group: MakeGroup) -> AsyncIterator[Offline]:
    """The run of a configuration, with its data as samples and no worker yet."""
    async with AsyncExitStack() as stack:
        # What can be wrong with the input is found before anything is started.
        data = load_examples("data", config.data, config.seed)
        held_out = load_examples("validation", config.validation, config.seed) if config.validation else []
        stack.enter_context(convert_write_errors(Path(config.record.directory, config.name)))
        start = RunStart(config.record.directory, config.name, overwrite=overwrite)
        directory = stack.enter_context(start).directory  # as it was before, if the start is refused
        directory.write_config(dump(config))
        view = make_view(config.record.live)
        view.start(config.name, f"{len(data)} rows, {config.batch_size} a step")
        stack.callback(view.close)
        metrics = stack.enter_context(Metrics(directory.metrics))
        tracked = TrackedRun(name=config.name, directory=directory, config=config.model_dump(mode="json"))
        trackers = open_trackers(config.record.trackers, tracked, time.time, view.message)
        stack.callback(trackers.close)
        cluster: Cluster = CLUSTERS.resolve(config.cluster.kind)(config.cluster, directory.logs)
        stack.push_async_callback(cluster.close)
        made = directory.path / "initial_model"
        model = await model_directory(cluster, config.model.path, made, config.seed)
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
        )


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

"""From a configuration to a run: the only wiring. Reads from top to bottom; names of parts are looked up, never compared."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.cluster.placement import Placement
from antiphon.core.config import dump
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, DataError, WorkerDied
from antiphon.core.registry import import_path
from antiphon.core.rng import derive
from antiphon.core.types import AttemptId, PolicyVersion, Prompt, Trajectory
from antiphon.core.workers import WorkerHandle
from antiphon.learning.learner import ModelRoles
from antiphon.learning.mesh_config import MeshesConfig
from antiphon.learning.remote import RemoteTrainer
from antiphon.learning.step import StepPipeline
from antiphon.record.checkpoint import list_checkpoints
from antiphon.record.events import Events, write_trace
from antiphon.record.ledger import Ledger, LedgerStore
from antiphon.record.live import View, make_view
from antiphon.record.metrics import Metrics
from antiphon.record.resume import ResumeState, open_first_lineage, open_next_lineage
from antiphon.record.run_dir import RunDirectory, RunLineage, convert_write_errors
from antiphon.record.trackers import open_trackers
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.evaluation import evaluate
from antiphon.rollout.filters import FILTERS
from antiphon.rollout.group_scoring import GroupScoring
from antiphon.rollout.pool import EnginePool
from antiphon.rollout.remote_workers import RolloutWorkers
from antiphon.run.config import RunConfig
from antiphon.run.config_changes import check_same
from antiphon.run.device_assignment import resolve_placement
from antiphon.run.device_sharing import SharedDevices
from antiphon.run.launch import (
    check_installed,
    check_model,
    make_group_scorer,
    model_directory,
    start_graders,
    start_models,
    start_rollout_workers,
    start_rollouts,
    start_trainer,
)
from antiphon.run.loop import Components, Run, make_step_pipeline, run_supervised
from antiphon.run.server_checks import check_servers
from antiphon.run.user_algorithm import add_declared_needs
from antiphon.tasks.config import TaskConfig
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.mixture import Mixture
from antiphon.tasks.prompts import load_prompts
from antiphon.tasks.rendering import Renderer
from antiphon.tasks.reward_checks.checks import CheckResult, check_reward
from antiphon.weights.base import TransferContext
from antiphon.weights.shared_directory import shared_directory

INTERRUPTED = 130  # exit code of what Ctrl-C ended


def train(config: RunConfig, *, overwrite: bool = False, resume: bool = False) -> int:
    """Run `antiphon train`; returns the exit code: 1 if the final accuracy is below what the configuration demands."""
    return _ended(_run(config, overwrite, Run.train, resume))


def sft(config: RunConfig, *, overwrite: bool = False) -> int:
    """Run `antiphon sft`; returns the exit code as `train` does. What reinforcement learning needs beside the model is left
    out, and the accuracy that is demanded of it."""
    evaluation = config.evaluation.model_copy(update={"minimum_accuracy": 0.0})
    without = {"algorithm": AlgorithmConfig(), "critic": None, "teachers": (), "meshes": MeshesConfig()}
    config = config.model_copy(update=without | {"evaluation": evaluation})
    return _ended(_run(config, overwrite, Run.sft))


def evaluate_model(
    model: str, config: RunConfig, *, samples: int, temperature: float | None = None, limit: int
) -> dict[str, Any]:
    """Run `antiphon eval`: accuracy and pass@k of a model on the tasks' test prompts. Without a `temperature` the
    configuration's holds, see `EvaluationConfig.temperature`."""
    if temperature is None:
        temperature = config.evaluation.resolve_temperature(samples)
    return asyncio.run(_evaluate(model, config, samples, temperature, limit))


def _ended(run: Coroutine[Any, Any, int]) -> int:
    """The exit code of a run, whether it ends by itself or with a second Ctrl-C."""
    try:
        return asyncio.run(run)
    except asyncio.CancelledError:
        return INTERRUPTED


async def _run(config: RunConfig, overwrite: bool, main: Callable[[Run], Any], resume: bool = False) -> int:
    with convert_write_errors(Path(config.record.directory, config.name)):
        return await _run_with_restarts(config, overwrite, main, resume)


async def _run_with_restarts(config: RunConfig, overwrite: bool, main: Callable[[Run], Any], resume: bool) -> int:
    """Go on at the last checkpoint when a worker is lost that nothing takes the place of, as often as may be."""
    checkpoints, cut, left = Path(config.record.directory, config.name, "checkpoints"), None, 0
    while True:
        try:
            return await _run_once(config, overwrite, main, resume)
        except WorkerDied as error:
            newest = list_checkpoints(checkpoints)[-1:]
            left = left - 1 if newest == cut else config.checkpoint.restarts
            if not newest or left <= 0:
                raise
            cut = newest
            make_view("off").message(f"{error}\nthe run goes on at its last checkpoint")
            overwrite, resume = False, True


async def _run_once(config: RunConfig, overwrite: bool, main: Callable[[Run], Any], resume: bool) -> int:
    async with open_run(config, overwrite=overwrite, resume=resume) as run:
        summary = await main(run)
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        demanded = config.evaluation.minimum_accuracy
        accuracy = ""
        if after is not None:
            how = f"at temperature {summary['evaluation']['temperature']:g}"
            accuracy = f"held-out accuracy {before:.3f} before, {after:.3f} after, {how}; "
        run.parts.view.message(f"{accuracy}{summary['train_seconds']:.0f} s of training; {run.parts.directory.path}")
        if summary["stopped_early"]:
            return INTERRUPTED
        if demanded and after < demanded:
            run.parts.view.message(f"below the {demanded:g} that evaluation.minimum_accuracy demands")
            return 1
    return 0


@asynccontextmanager
async def _cluster(config: RunConfig, logs: Path | None) -> AsyncIterator[tuple[Cluster, Placement]]:
    """Where the workers of a run are to be. Its devices are its own until the end."""
    cluster: Cluster = CLUSTERS.resolve(config.cluster.kind)(config.cluster, logs)
    try:
        placement = resolve_placement(cluster.nodes(), config)
        await cluster.reserve([place for role in placement.places for place in placement.there(role)])
        yield cluster, placement
    finally:
        await cluster.close()


async def _model(cluster: Cluster, directory: RunDirectory, config: RunConfig) -> Path:
    """Where the policy begins, which can be learned as the configuration wants."""
    built_model = directory.path / "model"  # is there, whole, if an earlier life of the run came to a checkpoint
    path = str(built_model) if built_model.is_dir() else config.model.path
    model = await model_directory(cluster, path, built_model, config.seed)
    await check_model(cluster, model, config.learner)
    return model


@asynccontextmanager
async def open_run(config: RunConfig, *, overwrite: bool = False, resume: bool = False) -> AsyncIterator[Run]:
    """The run of a configuration, started (or gone on with, `resume`) and in the end taken apart again."""
    async with AsyncExitStack() as stack:
        # What can be wrong with the input is found before anything is started.
        config = add_declared_needs(config)
        check_servers(config)
        check_installed(config.learner.kind)
        mixture = Mixture.load(config.tasks, config.seed)
        examples = Mixture.load(_examples(config), derive(config.seed, "sft"))
        validation, test = _held_out(config, "validation", 0), _held_out(config, "test", config.evaluation.limit)
        logs = RunDirectory(Path(config.record.directory, config.name)).logs
        ending = await stack.enter_async_context(AsyncExitStack())
        cluster, placement = await ending.enter_async_context(_cluster(config, logs))

        view = make_view(config.record.live)
        if resume:
            directory = RunDirectory.resume(config.record.directory, config.name)
            check_same(directory.config, config)
        else:
            directory = RunDirectory.create(config.record.directory, config.name, overwrite=overwrite)
        store = LedgerStore(directory.path)
        stack.callback(store.close)
        directory.write_config(dump(config))
        asynchronous = f"asynchronous ratio {config.rollout.async_ratio:g}"
        view.start(config.name, f"{config.rollout.capacity} groups alive, {asynchronous}")
        stack.callback(view.close)
        resumption = _resume(store, directory, config, view) if resume else None
        if resumption is None:
            open_first_lineage(store)
        lineage, step = (resumption.lineage, resumption.state["step"]) if resumption else (0, 0)
        metrics = stack.enter_context(Metrics(directory.metrics, lineage=lineage))
        trackers = open_trackers(config.record.trackers, directory.path, time.time)
        for tracker in trackers:
            stack.callback(tracker.close)
        events = _events(config, directory, stack)
        ledger = Ledger(store, events, lineage=lineage, step=step)
        stack.push_async_callback(ledger.close)
        place = stack.enter_context(shared_directory(config.name, config.weights.directory))
        exchange = TransferContext(place, config.weights.channel, config.weights.host)

        deadlines = Deadlines()
        stack.push_async_exit(ending.pop_all())  # workers end before what they write to
        model = await _model(cluster, directory, config)
        # Graders first: they start in no time, and a reward that cannot be built is found before models are loaded.
        beside = await stack.enter_async_context(AsyncExitStack())
        grading, judges = await beside.enter_async_context(
            start_graders(cluster, config, deadlines, view.message, placement, events)
        )
        if not resume:
            await _check_at_start(config, mixture, grading, view.message)
        response = config.sft.response if config.sft else ""
        workers: Sequence[WorkerHandle | RemoteTrainer]
        models: ModelRoles | RemoteTrainer
        training: StepPipeline | RemoteTrainer
        pool: EnginePool | RolloutWorkers
        episodes: EpisodeRunner | RolloutWorkers
        siblings: GroupScoring | None = None
        if config.rollout.workers:
            await beside.aclose()  # each worker has graders of its own
            trainer, shards = await asyncio.gather(
                start_trainer(cluster, model, config, directory, deadlines, placement),
                start_rollout_workers(
                    cluster, model, config, RunLineage(directory, lineage), deadlines, events, view.message
                ),
            )
            models, training, workers = trainer, trainer, [trainer]
            pool, episodes, renderer = shards, shards, Renderer(model)
        else:
            models, workers = await start_models(cluster, model, config, placement)
            training = make_step_pipeline(config, models.learner, models.reference, models.critics, models.teachers)
            pool, episodes, renderer = await start_rollouts(
                cluster, model, grading, config, deadlines, events, stack, view.message, placement
            )
            siblings = make_group_scorer(episodes, grading, config, deadlines)

        yield Run(
            Components(
                config=config,
                deadlines=deadlines,
                workers=workers,
                models=models,
                training=training,
                pool=pool,
                lease=SharedDevices(models, pool, judges, shared=placement.shared),
                judges=judges,
                episodes=episodes,
                siblings=siblings,
                mixture=mixture,
                next_example=lambda: renderer.encode_example(examples.next(), response),
                validation=validation,
                test=test,
                keep=FILTERS.resolve(config.rollout.filter) if config.rollout.filter else None,
                sampler=import_path(config.rollout.sampler, "sampler") if config.rollout.sampler else None,
                directory=directory,
                ledger=ledger,
                resumption=resumption,
                exchange=exchange,
                metrics=metrics,
                trackers=trackers,
                view=view,
            )
        )


def _events(config: RunConfig, directory: RunDirectory, stack: AsyncExitStack) -> Events:
    """What notes events; in the end, if they are wanted, a trace is made of them."""
    sink = None
    if config.record.events:
        stack.callback(write_trace, directory.events, directory.trace)
        sink = stack.enter_context(directory.events.open("a", encoding="utf-8"))
    return Events(asyncio.get_running_loop().time, sink)


def _examples(config: RunConfig) -> Sequence[TaskConfig]:
    """What supervised fine-tuning learns from."""
    if config.sft is None or config.sft.prompts is None:
        return config.tasks
    return (TaskConfig(name="sft", prompts=config.sft.prompts),)


def _resume(store: LedgerStore, directory: RunDirectory, config: RunConfig, view: View) -> ResumeState:
    """Go on with what the run directory has, and say so."""
    by_reference = config.rollout.workers > 0
    found = open_next_lineage(store, directory.checkpoints, config.rollout.max_age, view.message, refer=by_reference)
    if config.rollout.deterministic:
        # What is left of a wave would be computed in other company, and differ in the last bit.
        found.reusable.by_prompt.clear()
    found.reusable.exclude_tasks(config.judged_together)
    kept = sum(map(len, found.reusable.by_prompt.values()))
    view.message(
        f"resuming after step {found.state['step']}: {found.lost} attempts were lost, {kept} finished ones are at hand"
    )
    return found


async def _check_at_start(
    config: RunConfig, mixture: Mixture, grading: RewardRouter, tell: Callable[[str], None]
) -> None:
    """`ConfigError` if a reward is not what a run takes for granted."""
    found: list[CheckResult] = []
    try:
        async with asyncio.timeout(config.check.seconds):
            async for finding in findings(config, mixture, grading, config.check.prompts):
                found.append(finding)
    except TimeoutError:
        tell(f"rewards were not all checked within {config.check.seconds:g} s (check.seconds)")
    problems = [f"task {finding.task!r}: {problem}" for finding in found for problem in finding.problems]
    if problems:
        raise ConfigError(
            "\n".join([*problems, "if that is meant, check.prompts=0 starts the run without a look at it"])
        )


async def findings(
    config: RunConfig, mixture: Mixture, grading: RewardRouter, prompts: int, *, attack: bool = False
) -> AsyncIterator[CheckResult]:
    """What comes of each task's reward on so many prompts; where a world pays, or an agent plays, there is nothing to try."""
    for task in config.tasks:
        if prompts and not task.environment and not task.agent:
            sample = mixture.sample(task.name, prompts)
            yield await check_reward(task, sample, grading.score, task.grading or config.grading, attack=attack)


def check_rewards(config: RunConfig, prompts: int) -> list[CheckResult]:
    """Run `antiphon check`: try the rewards of all tasks, and attack them."""

    async def run() -> list[CheckResult]:
        mixture = Mixture.load(config.tasks, config.seed)
        cluster: Cluster = CLUSTERS.resolve(config.cluster.kind)(config.cluster, None)
        try:
            async with start_graders(cluster, config, Deadlines()) as (grading, _):
                return [finding async for finding in findings(config, mixture, grading, prompts, attack=True)]
        finally:
            await cluster.close()

    return asyncio.run(run())


def _held_out(config: RunConfig, which: str, limit: int) -> list[Prompt]:
    found = [
        prompt
        for task in config.tasks
        if (prompts := getattr(task, which)) is not None
        for prompt in load_prompts(task, prompts, config.seed)
    ]
    return found[:limit] if limit else found


async def _evaluate(model: str, config: RunConfig, samples: int, temperature: float, limit: int) -> dict[str, Any]:
    prompts = _held_out(config, "test", limit)
    if not prompts:
        raise DataError("there are no test prompts: give a task its `test`")
    async with AsyncExitStack() as stack:
        deadlines = Deadlines()
        cluster, placement = await stack.enter_async_context(_cluster(config, None))
        directory = await model_directory(cluster, model, Path(), config.seed)
        grading, judges = await stack.enter_async_context(
            start_graders(cluster, config, deadlines, placement=placement)
        )
        pool, episodes, _ = await start_rollouts(
            cluster, directory, grading, config, deadlines, Events(), stack, placement=placement
        )

        async def run(prompt: Prompt, attempt: AttemptId) -> Trajectory:
            sampling = config.rollout.sampling.sampling(temperature=temperature)
            return await episodes.run(prompt, attempt, PolicyVersion(0, 0), sampling)

        watches = [each.watch() for each in (pool, *judges)]
        result = await run_supervised(watches, lambda _: evaluate(prompts, samples, run))
    ks = sorted({2**power for power in range(samples.bit_length())} | {samples})
    return {
        "prompts": len(prompts),
        "samples": samples,
        "temperature": temperature,
        "accuracy": result.accuracy,
        "accuracy, 95 % interval": result.interval(),
        "ungraded": result.ungraded,
        "truncated": result.truncated,
        "means": dict(result.measures),
    } | {f"pass@{k}": result.pass_at(k) for k in ks}

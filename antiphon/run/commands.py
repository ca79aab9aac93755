"""The commands that run a configuration from its beginning to its end: train, sft and eval."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.blocking import run_blocking
from antiphon.core.errors import DataError, WorkerDiedError
from antiphon.core.types import AttemptId, AttemptStatus, PolicyVersion, Prompt, Sampling, Trajectory
from antiphon.learning.config import LearnerConfig
from antiphon.learning.mesh_config import MeshesConfig
from antiphon.record.checkpoint import list_checkpoints
from antiphon.record.live import make_view
from antiphon.record.run_dir import convert_write_errors
from antiphon.rollout.backend import LocalRollouts
from antiphon.rollout.evaluation import Evaluation, TaskPlan, evaluate
from antiphon.run.branch import prepare_branch
from antiphon.run.build import start_run
from antiphon.run.chat_api import APIRollouts, ChatAPI, open_api_rollouts
from antiphon.run.config import RunConfig
from antiphon.run.config_checks.user_functions import check_import_paths
from antiphon.run.dtypes import choose_dtypes
from antiphon.run.launch.context import LaunchContext, open_cluster
from antiphon.run.launch.graders import start_graders
from antiphon.run.launch.model_directory import model_directory
from antiphon.run.launch.rollouts import start_rollouts
from antiphon.run.launch.tasks import load_held_out
from antiphon.run.loop import Run
from antiphon.run.supervision import run_supervised

INTERRUPTED = 130  # exit code of a run that Ctrl-C ended
Main = Callable[[Run], Coroutine[Any, Any, dict[str, Any]]]
Once = Callable[[bool, bool], Coroutine[Any, Any, int]]  # with overwrite and resume; returns the exit code


def train(config: RunConfig, *, overwrite: bool = False, resume: bool = False) -> int:
    """Run `antiphon train`; returns the exit code: 1 if the final accuracy is below `evaluation.minimum_accuracy`."""
    return run_to_exit_code(_run(config, overwrite, Run.train, resume))


def branch(source: Path, step: int, config: RunConfig, *, overwrite: bool = False) -> int:
    """Run `antiphon branch`: lay out a run as `prepare_branch` does, and train it; returns the exit code as `train` does."""
    prepare_branch(source, step, config, overwrite=overwrite)
    return train(config, resume=True)


def sft(config: RunConfig, *, overwrite: bool = False) -> int:
    """Run `antiphon sft`; returns the exit code as `train` does.

    Everything that only reinforcement learning needs is left out, the demanded accuracy included.
    """
    evaluation = config.evaluation.model_copy(update={"minimum_accuracy": 0.0})
    learner = config.learner.model_copy(update={"stages": LearnerConfig().stages, "stage_options": {}})
    without = {"algorithm": AlgorithmConfig(), "critic": None, "teachers": (), "meshes": MeshesConfig()}
    config = config.model_copy(update=without | {"evaluation": evaluation, "learner": learner})
    return run_to_exit_code(_run(config, overwrite, Run.sft))


def evaluate_model(
    model: str,
    config: RunConfig,
    *,
    samples: int | None = None,
    temperature: float | None = None,
    limit: int,
    api: ChatAPI | None = None,
) -> dict[str, Any]:
    """Run `antiphon eval`: accuracy and pass@k of a model on the tasks' test prompts.

    Args:
        model: A directory or Hugging Face id, or the name of the model that `api` has.
        config: The tasks, engines and sampling.
        samples: Completions a prompt; by default, as the configuration says for each task.
        temperature: Of sampling; by default, as the configuration says for each task.
        limit: Number of prompts to use, from the first; 0 uses all.
        api: Asked instead of the engines.
    """
    return run_blocking(_evaluate(model, config, config.plan_evaluation(samples, temperature), limit, api))


def run_to_exit_code(run: Coroutine[Any, Any, int]) -> int:
    """Run a command to its end; return its exit code."""
    try:
        return run_blocking(run)
    except asyncio.CancelledError:  # a second Ctrl-C
        return INTERRUPTED


async def _run(config: RunConfig, overwrite: bool, main: Main, resume: bool = False) -> int:
    async def once(overwrite: bool, resume: bool) -> int:
        return await _run_once(config, overwrite, main, resume)

    directory = Path(config.record.directory, config.name)
    with convert_write_errors(directory):
        restarts = config.checkpoint.restarts
        return await resume_after_deaths(once, directory / "checkpoints", restarts, overwrite, resume)


async def resume_after_deaths(once: Once, checkpoints: Path, restarts: int, overwrite: bool, resume: bool) -> int:
    """Run a command; resume it from its newest checkpoint if a worker dies that cannot be replaced.

    Args:
        once: Runs it, given whether to overwrite and whether to resume; returns the exit code.
        checkpoints: Folder of its checkpoints.
        restarts: How often in a row without a new checkpoint in between.
        overwrite: How it is run the first time.
        resume: How it is run the first time.
    """
    previous: list[Path] | None = None
    left = 0
    while True:
        try:
            return await once(overwrite, resume)
        except WorkerDiedError as error:
            newest = list_checkpoints(checkpoints)[-1:]
            left = left - 1 if newest == previous else restarts
            if not newest or left <= 0:
                raise
            previous = newest
            make_view("off").message(f"{error}\nthe run goes on at its last checkpoint")
            overwrite, resume = False, True


async def _run_once(config: RunConfig, overwrite: bool, main: Main, resume: bool) -> int:
    async with start_run(config, overwrite=overwrite, resume=resume) as run:
        summary = await main(run)
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        demanded, record = config.evaluation.minimum_accuracy, run.parts.record
        told = _describe_drops(run)
        if after is not None:
            how = f"at temperature {summary['evaluation']['temperature']:g}"
            earlier = "" if before is None else f"{before:.3f} before, "
            told += f"held-out accuracy {earlier}{after:.3f} after, {how}; "
        record.view.message(f"{told}{summary['train_seconds']:.0f} s of training; {record.directory.path}")
        if summary["stopped_early"]:
            return INTERRUPTED
        if demanded and after < demanded:
            record.view.message(f"below the {demanded:g} that evaluation.minimum_accuracy demands")
            return 1
    return 0


def _describe_drops(run: Run) -> str:
    """Return a line on attempts that were dropped before the run was over, and one on tasks that gave nothing to train on."""
    if run.scheduler is None:
        return ""
    lines = []
    ended, expected = run.scheduler.admission.ended, (AttemptStatus.TRAINED, AttemptStatus.CANCELLED)
    if counts := [f"{number:,} {status}" for status, number in ended.items() if status not in expected and number]:
        counts.insert(0, f"{ended[AttemptStatus.TRAINED]:,} trained")
        path = run.parts.record.directory.path
        causes = f"`antiphon audit {path}` counts all executions, and `antiphon why` tells causes"
        lines.append(f"attempts in this execution: {', '.join(counts)}; {causes}\n")
    if tasks := run.scheduler.bias_meter.list_untrained_tasks():
        lines.append(f"attempted and not trained on in this execution: {', '.join(tasks)}\n")
    return "".join(lines)


def keep_used(plans: Mapping[str, TaskPlan], prompts: Sequence[Prompt]) -> dict[str, TaskPlan]:
    """Return the plans of the tasks that have prompts."""
    used = {prompt.task for prompt in prompts}
    return {task: plan for task, plan in plans.items() if task in used}


@asynccontextmanager
async def open_rollouts(
    model: str, config: RunConfig, api: ChatAPI | None, plans: Mapping[str, TaskPlan]
) -> AsyncIterator[LocalRollouts | APIRollouts]:
    """Start the graders of a configuration, and its engines with a model that is not trained, or the client of an API."""
    if api is not None:
        async with open_api_rollouts(model, api, config, plans) as api_rollouts:
            yield api_rollouts
        return
    check_import_paths(config, under="engine")
    async with AsyncExitStack() as stack:
        cluster, placement = await stack.enter_async_context(open_cluster(config, None))
        config = choose_dtypes(config, placement, print)
        context = LaunchContext(cluster=cluster, config=config, placement=placement)
        directory = await model_directory(cluster, model, Path(), config.seed)
        graders = await stack.enter_async_context(start_graders(context))
        yield await start_rollouts(context, directory, graders, stack)


async def _evaluate(
    model: str, config: RunConfig, plans: Mapping[str, TaskPlan], limit: int, api: ChatAPI | None
) -> dict[str, Any]:
    prompts = load_held_out(config, "test", limit)
    if not prompts:
        raise DataError("there are no test prompts: give a task its `test`")
    plans = keep_used(plans, prompts)
    async with open_rollouts(model, config, api, plans) as rollouts:

        async def run(prompt: Prompt, attempt: AttemptId, sampling: Sampling) -> Trajectory:
            return await rollouts.evaluate(prompt, attempt, PolicyVersion(0, 0), sampling)

        result = await run_supervised([rollouts.watch()], lambda _: evaluate(prompts, plans, run))
    found = _describe(result, plans)
    found |= {"ungraded": result.ungraded, "truncated": result.truncated, "means": dict(result.measures)}
    return found | ({"api": rollouts.usage} if isinstance(rollouts, APIRollouts) else {})


def _describe(result: Evaluation, plans: Mapping[str, TaskPlan]) -> dict[str, Any]:
    """Describe all tasks as one, and if there are several each by itself."""
    samples, tasks = result.samples, result.by_task()
    ks = sorted({2**power for power in range(samples.bit_length())} | {samples})
    drawn: dict[str, set[float]] = {
        "samples": {plans[task].samples for task in tasks},
        "temperature": {plans[task].sampling.temperature for task in tasks},
    }
    found = {
        "prompts": len(result.prompt_ids),
        **{name: values.pop() for name, values in drawn.items() if len(values) == 1},
        "accuracy": result.accuracy,
        "accuracy, 95 % interval": result.interval(),
    } | {f"pass@{k}": result.pass_at(k) for k in ks}
    return found | ({"tasks": {task: _describe(own, plans) for task, own in tasks.items()}} if len(tasks) > 1 else {})

"""From a configuration to a run: the only wiring. Names of components are looked up, never compared."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from antiphon.cluster.base import Cluster
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError
from antiphon.record.run_dir import RunDirectory
from antiphon.record.run_start import RunStart
from antiphon.rollout.group_hooks import load_group_hooks
from antiphon.run.components import Components
from antiphon.run.compose import require_attached_objects
from antiphon.run.config import RunConfig
from antiphon.run.config_checks.servers import check_servers
from antiphon.run.config_checks.user_functions import add_declared_needs, check_import_paths
from antiphon.run.device_sharing import SharedDevices
from antiphon.run.dtypes import choose_dtypes, keep_dtypes
from antiphon.run.launch.context import LaunchContext, open_cluster
from antiphon.run.launch.graders import Judges, start_graders, start_judges
from antiphon.run.launch.model_checks import check_installed, check_model
from antiphon.run.launch.model_directory import model_directory, round_base
from antiphon.run.launch.models import start_training
from antiphon.run.launch.record import RunRecord, open_record
from antiphon.run.launch.roles import start_roles
from antiphon.run.launch.rollouts import make_rollout_workers, start_rollouts
from antiphon.run.launch.tasks import TaskData, load_tasks
from antiphon.run.live_state import keep_live_state
from antiphon.run.loop import Run
from antiphon.run.pack_size import choose_pack_size, keep_pack_size
from antiphon.run.publisher import WeightPublisher
from antiphon.run.reward_checks import check_rewards_at_start
from antiphon.tasks.rendering import Renderer
from antiphon.weights.base import TransferContext
from antiphon.weights.shared_directory import shared_directory


@asynccontextmanager
async def start_run(config: RunConfig, *, overwrite: bool = False, resume: bool = False) -> AsyncIterator[Run]:
    """Start a run, and stop all of its parts at the end.

    Args:
        config: The run's configuration.
        overwrite: Replace the run of this name, if there is one.
        resume: Continue the run of this name from its newest checkpoint.
    """
    async with AsyncExitStack() as stack:
        _require_placement(config)
        config = add_declared_needs(keep_dtypes(keep_pack_size(config)) if resume else config)
        check_import_paths(config)
        run_directory = RunDirectory(Path(config.record.directory, config.name))
        require_attached_objects(config, has_model=resume and run_directory.built_model.is_dir())
        tasks = load_tasks(config)  # mistakes in the input are found before anything is started
        check_servers(config)
        check_installed(config.learner.kind)
        cluster_stack = await stack.enter_async_context(AsyncExitStack())
        cluster, placement = await cluster_stack.enter_async_context(open_cluster(config, run_directory.logs))
        start = RunStart(config.record.directory, config.name, overwrite=overwrite, resume=resume)
        directory = stack.enter_context(start).directory  # unchanged if the start is refused
        record = await open_record(config, directory, stack, resume=resume)
        config = choose_dtypes(config, placement, record.view.message)
        shared = stack.enter_context(shared_directory(config.name, config.weights.directory))
        transfer = TransferContext.of(shared, config.weights, config.weights_dtype, config.weight_senders)
        stack.push_async_exit(cluster_stack.pop_all())  # workers end before the record that they write to
        model = await _prepare_model(cluster, record.directory, config)
        config = choose_pack_size(config, model)
        record.write_config(config)
        context = LaunchContext(
            cluster=cluster,
            config=config,
            placement=placement,
            deadlines=Deadlines(),
            events=record.events,
            report=record.view.message,
        )
        tasks.use_renderer(Renderer(model), config.engine)
        judges = await start_judges(context, stack, record.directory.judges)
        devices = await _start_workers(context, model, tasks, record, judges, stack)
        run = Run(
            Components(
                config=config,
                deadlines=context.deadlines,
                tasks=tasks,
                rollouts=devices.rollouts,
                weights=WeightPublisher(config, context.deadlines, devices, transfer, record.first_version),
                record=record,
                remote_judges=judges.remote_judges,
                hooks=load_group_hooks(config.rollout, config.tasks, config.plan_evaluation(), tasks.mixture),
            )
        )
        stack.push_async_exit(run.stepper.end)
        await stack.enter_async_context(keep_live_state(run))
        start.confirm()
        yield run


def _require_placement(config: RunConfig) -> None:
    if config.placement.auto:
        message = "the planner divides devices before a run starts: `antiphon train` asks it; in Python call"
        raise ConfigError(f"{message} antiphon.place_automatically(config)", key="placement.auto", value=True)


async def _prepare_model(cluster: Cluster, directory: RunDirectory, config: RunConfig) -> Path:
    """Return the directory of the model that training begins with, after a check that it can be trained."""
    built_model = directory.built_model
    if built_model.is_dir():
        model = await model_directory(cluster, str(built_model), built_model, config.seed)
    else:
        template = config.model.chat_template
        model = await model_directory(cluster, config.model.path, built_model, config.seed, chat_template=template)
        model = await round_base(cluster, model, built_model, config.learner)
    await check_model(cluster, model, config.learner)
    return model


async def _start_workers(
    context: LaunchContext, model: Path, tasks: TaskData, record: RunRecord, judges: Judges, stack: AsyncExitStack
) -> SharedDevices:
    """Start graders, so that a reward that cannot be built is found before models are loaded; then all other parts."""
    grader_stack = await stack.enter_async_context(AsyncExitStack())
    graders = await grader_stack.enter_async_context(start_graders(context, judges))
    if record.resumption is None:
        await check_rewards_at_start(context, tasks, graders.router)
    context = replace(context, roles=await start_roles(context, stack))
    if context.config.rollout.workers:
        await grader_stack.aclose()  # each rollout worker has graders of its own; the judges stay
        workers = make_rollout_workers(context, model, record.lineage, judges)
        stack.push_async_callback(workers.close)
        training, _ = await asyncio.gather(start_training(context, model, record.lineage), workers.start())
        return SharedDevices(training, workers, shared=context.placement.shared)
    training = await start_training(context, model, record.lineage)
    rollouts = await start_rollouts(context, model, graders, stack)
    return SharedDevices(training, rollouts, shared=context.placement.shared)

"""Starting the agents that play the attempts of tasks; all of them use one gateway."""

import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from antiphon.core.errors import SandboxError, WorkerDiedError
from antiphon.core.registry import import_path
from antiphon.core.rng import derive
from antiphon.core.rpc import Client
from antiphon.core.types import Score
from antiphon.core.worker_set import WorkerSet
from antiphon.rollout.agents import Agent, FunctionAgent, command_agent, run_agent
from antiphon.rollout.atropos.agent import AtroposAgent
from antiphon.rollout.beam_search import with_beam_search
from antiphon.rollout.episode import RunAgent
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.rollout.gateway.server import Gateway
from antiphon.rollout.log_file.agent import LogFileAgent
from antiphon.rollout.pool import EnginePool
from antiphon.run.launch.context import LaunchContext
from antiphon.sandbox.remote_commands import open_remote_sandbox
from antiphon.sandbox.sessions.commands import open_local_sandbox
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.tasks.config import AgentConfig
from antiphon.tasks.rendering import Renderer

ATROPOS_WORKER = "antiphon.rollout.atropos.host:AtroposHost"


async def start_agents(
    context: LaunchContext, pool: EnginePool, renderer: Renderer, max_length: int, stack: AsyncExitStack
) -> dict[str, RunAgent]:
    """Return the agent of each task that has one. The gateway is closed by `stack`."""
    config = context.config
    tasks = {task.name: task.agent for task in config.tasks if task.agent is not None}
    if not tasks:
        return {}
    model = ServedModel(
        generate=with_beam_search(pool.generate),
        tokenizer=renderer,
        max_length=max_length,
        tools=config.rollout.tool_format,
    )
    gateway = await stack.enter_async_context(Gateway(model, seed=config.seed))
    directories: RuntimeDirs | None = None
    if any(agent.command and not agent.unconfined and not agent.service for agent in tasks.values()):
        directories = RuntimeDirs()
        stack.callback(directories.close)
    runners: dict[str, RunAgent] = {}
    for name, settings in tasks.items():
        if settings.atropos:
            hosts = _make_atropos_hosts(context, name, settings, renderer, gateway)
            collect = partial(_collect_group, await stack.enter_async_context(hosts))
            runners[name] = AtroposAgent(collect, gateway, config.rollout.group_size, settings.seconds).run
        else:
            agent = _make_agent(context, settings, directories)
            runners[name] = partial(run_agent, agent, gateway, seconds=settings.seconds)
    return runners


def _make_atropos_hosts(
    context: LaunchContext, task: str, settings: AgentConfig, renderer: Renderer, gateway: Gateway
) -> WorkerSet[Client]:
    """Return the process of a task's environment of Atropos, as a set of one worker, which is not started yet."""
    config, serials = context.config, itertools.count()

    async def start(number: int) -> Client:
        seed = derive(config.seed, "atropos", task)
        arguments = settings.atropos, settings.options, str(renderer.directory), config.rollout.group_size, seed
        handle = context.cluster.spawn(f"atropos-{task}-{next(serials)}", ATROPOS_WORKER, *arguments)
        client = Client(handle, {"policy": gateway.answer})
        await client.started_or_killed()
        return client

    return WorkerSet(
        f"environments of Atropos of task {task!r}",
        start,
        1,
        context.deadlines,
        context.report,
        silence=settings.seconds,
        patience=config.rollout.timeout,
        patience_key="rollout.timeout",
    )


async def _collect_group(hosts: WorkerSet[Client], index: int, keys: Sequence[str]) -> Sequence[Score]:
    """Have an environment of Atropos collect a group; `SandboxError` if its process ends meanwhile."""

    async def work(host: Client) -> Sequence[Score]:
        try:
            scores: Sequence[Score] = await host.call("collect", index, keys)
        except WorkerDiedError as error:  # the process that takes its place must not go on with the same attempts
            raise SandboxError(f"the process of the environment ended: {error}") from error
        return scores

    return await hosts.use(work, "one group")


def _make_agent(context: LaunchContext, settings: AgentConfig, directories: RuntimeDirs | None) -> Agent:
    if settings.function:
        return FunctionAgent(import_path(settings.function, "agent"))
    config = ShellSandboxConfig(image=settings.image, network=settings.network)
    if settings.service:
        open_sandbox = partial(open_remote_sandbox, settings.service, settings.image)
        return LogFileAgent(command=settings.command, open_sandbox=open_sandbox)
    if settings.log_file:
        assert directories is not None
        open_local = partial(open_local_sandbox, directories, config, context.deadlines)
        return LogFileAgent(command=settings.command, open_sandbox=open_local)
    return command_agent(
        settings.command,
        rooms=None if settings.unconfined else directories,
        deadlines=context.deadlines,
        config=config,
        unconfined=settings.unconfined,
    )

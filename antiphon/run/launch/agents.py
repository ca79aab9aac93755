"""Starting the agents that play the attempts of tasks; all of them use one gateway."""

from contextlib import AsyncExitStack
from functools import partial

from antiphon.core.registry import import_path
from antiphon.rollout.agents import Agent, FunctionAgent, command_agent, run_agent
from antiphon.rollout.episode import RunAgent
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.rollout.gateway.server import Gateway
from antiphon.rollout.pool import EnginePool
from antiphon.run.launch.context import LaunchContext
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.tasks.config import AgentConfig
from antiphon.tasks.rendering import Renderer


async def start_agents(
    context: LaunchContext, pool: EnginePool, renderer: Renderer, max_length: int, stack: AsyncExitStack
) -> dict[str, RunAgent]:
    """Return the agent of each task that has one. The gateway is closed by `stack`."""
    config = context.config
    tasks = {task.name: task.agent for task in config.tasks if task.agent is not None}
    if not tasks:
        return {}
    model = ServedModel(
        generate=pool.generate, tokenizer=renderer, max_length=max_length, tools=config.rollout.tool_format
    )
    gateway = await stack.enter_async_context(Gateway(model, seed=config.seed))
    directories: RuntimeDirs | None = None
    if any(agent.command and not agent.unconfined for agent in tasks.values()):
        directories = RuntimeDirs()
        stack.callback(directories.close)
    agents = {name: _make_agent(context, settings, directories) for name, settings in tasks.items()}
    return {name: partial(run_agent, agents[name], gateway, seconds=tasks[name].seconds) for name in tasks}


def _make_agent(context: LaunchContext, settings: AgentConfig, directories: RuntimeDirs | None) -> Agent:
    if settings.function:
        return FunctionAgent(import_path(settings.function, "agent"))
    return command_agent(
        settings.command,
        rooms=None if settings.unconfined else directories,
        deadlines=context.deadlines,
        config=ShellSandboxConfig(image=settings.image, network=settings.network),
        unconfined=settings.unconfined,
    )

"""Checks of the rewards of a run's tasks on prompts of theirs."""

import asyncio
from collections.abc import AsyncIterator

from antiphon.core.errors import ConfigError
from antiphon.core.rng import derive
from antiphon.core.types import Prompt
from antiphon.rollout.environment_call import EnvironmentCallError, call_environment, unparsed
from antiphon.rollout.episode_loop import EnvironmentFactory
from antiphon.run.config import RunConfig
from antiphon.run.dtypes import choose_dtypes
from antiphon.run.launch.context import LaunchContext, open_cluster
from antiphon.run.launch.environments import make_environments
from antiphon.run.launch.graders import start_graders
from antiphon.run.launch.tasks import TaskData, load_tasks
from antiphon.tasks.base import as_reset, as_step
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.reward_checks.checks import GARBAGE, CheckResult, check_reward


async def check_rewards_at_start(context: LaunchContext, tasks: TaskData, router: RewardRouter) -> None:
    """Raise `ConfigError` if a reward is not what a run takes for granted."""
    config, results = context.config, list[CheckResult]()
    try:
        async with asyncio.timeout(config.check.seconds):
            async for result in check_tasks(config, tasks, router, config.check.prompts):
                results.append(result)
    except TimeoutError:
        context.report(f"rewards were not all checked within {config.check.seconds:g} s (check.seconds)")
    problems = [f"task {result.task!r}: {problem}" for result in results for problem in result.problems]
    if problems:
        raise ConfigError(
            "\n".join([*problems, "if that is meant, check.prompts=0 starts the run without a look at it"])
        )


async def check_tasks(
    config: RunConfig, tasks: TaskData, router: RewardRouter, prompts: int, *, attack: bool = False
) -> AsyncIterator[CheckResult]:
    """Check the reward of each task on a number of its prompts, but for tasks with environments or agents."""
    for task in config.tasks:
        if task.environment or task.agent or not prompts:
            continue
        if sample := tasks.sample(task.name, prompts):  # there is none if no row names the task
            yield await check_reward(task, sample, router.score, task.grading or config.grading, attack=attack)


async def check_environment(task: str, prompt: Prompt, make: EnvironmentFactory, seconds: float) -> CheckResult:
    """Make the environment of a task for a prompt, reset it, and take one step with a meaningless action."""
    began, errors = asyncio.get_running_loop().time(), list[str]()
    try:
        environment = await call_environment(seconds, unparsed, make, prompt)
        try:
            await call_environment(seconds, as_reset, environment.reset, derive(prompt.seed, "environment"))
            await call_environment(seconds, as_step, environment.step, GARBAGE)
        finally:
            await call_environment(seconds, unparsed, environment.close)
    except EnvironmentCallError as error:
        errors.append(f"the environment failed: {error}")
    return CheckResult(
        task=task,
        gradings=0,
        oracle=None,
        empty=None,
        garbage=None,
        seconds=asyncio.get_running_loop().time() - began,
        problems=(),
        errors=tuple(errors),
    )


def check_rewards(config: RunConfig, prompts: int) -> list[CheckResult]:
    """Run `antiphon check`: try the rewards of all tasks, and attack them; take a step in each environment."""

    async def run() -> list[CheckResult]:
        tasks = load_tasks(config)
        async with open_cluster(config, None) as (cluster, placement):
            chosen = choose_dtypes(config, placement, lambda message: None)
            context = LaunchContext(cluster=cluster, config=chosen, placement=placement)
            environments = make_environments(context)
            tried = [
                await check_environment(name, prompt, make, config.rollout.environment_timeout)
                for name, make in environments.items()
                for prompt in tasks.sample(name, 1)
            ]
            async with start_graders(context) as graders:
                checked = check_tasks(config, tasks, graders.router, prompts, attack=True)
                return [*tried, *[result async for result in checked]]

    return asyncio.run(run())

"""Checks of the rewards of a run's tasks on prompts of theirs."""

import asyncio
from collections.abc import AsyncIterator

from antiphon.core.errors import ConfigError
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext, open_cluster
from antiphon.run.launch.graders import start_graders
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.mixture import Mixture
from antiphon.tasks.reward_checks.checks import CheckResult, check_reward


async def check_rewards_at_start(context: LaunchContext, mixture: Mixture, router: RewardRouter) -> None:
    """Raise `ConfigError` if a reward is not what a run takes for granted."""
    config, results = context.config, list[CheckResult]()
    try:
        async with asyncio.timeout(config.check.seconds):
            async for result in check_tasks(config, mixture, router, config.check.prompts):
                results.append(result)
    except TimeoutError:
        context.report(f"rewards were not all checked within {config.check.seconds:g} s (check.seconds)")
    problems = [f"task {result.task!r}: {problem}" for result in results for problem in result.problems]
    if problems:
        raise ConfigError(
            "\n".join([*problems, "if that is meant, check.prompts=0 starts the run without a look at it"])
        )


async def check_tasks(
    config: RunConfig, mixture: Mixture, router: RewardRouter, prompts: int, *, attack: bool = False
) -> AsyncIterator[CheckResult]:
    """Check the reward of each task on a number of prompts, but for tasks with environments or agents."""
    for task in config.tasks:
        if prompts and not task.environment and not task.agent:
            sample = mixture.sample(task.name, prompts)
            yield await check_reward(task, sample, router.score, task.grading or config.grading, attack=attack)


def check_rewards(config: RunConfig, prompts: int) -> list[CheckResult]:
    """Run `antiphon check`: try the rewards of all tasks, and attack them."""

    async def run() -> list[CheckResult]:
        mixture = Mixture.load(config.tasks, config.seed)
        async with open_cluster(config, None) as (cluster, placement):
            context = LaunchContext(cluster=cluster, config=config, placement=placement)
            async with start_graders(context) as graders:
                return [result async for result in check_tasks(config, mixture, graders.router, prompts, attack=True)]

    return asyncio.run(run())

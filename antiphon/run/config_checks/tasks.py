"""Tasks: rewards, judges, environments, agents, and the accuracy that is asked of them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.run.config_checks.common import Problem, check_registered
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.environments import ENVIRONMENTS, max_turns
from antiphon.tasks.prompts import SOURCES
from antiphon.tasks.rewards import ASYNCHRONOUS, COMPOSED, GROUP_REWARDS, REWARDS

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig


def check_tasks(config: "RunConfig") -> Iterator[Problem]:
    """Check each task's prompts, reward, judge, environment and agent."""
    for index, task in enumerate(config.tasks):
        at = f"tasks.{index}"
        for field in ("prompts", "validation", "test"):
            prompts: PromptsConfig | None = getattr(task, field)
            if prompts:
                yield from check_registered(SOURCES, prompts.source, f"{at}.{field}.source")
        yield from check_registered(REWARDS, task.reward, f"{at}.reward")
        if task.judge is not None:
            yield from _check_judge_concurrency(config, task, f"{at}.judge.minimum")
            if task.reward in REWARDS.built_in and task.reward not in ASYNCHRONOUS | COMPOSED:
                yield f"{at}.judge", f"reward {task.reward!r} asks no model"
            if ":" in task.judge.path:
                yield f"{at}.judge.path", f"{task.judge.path!r} must be a directory or a Hugging Face id"
            if config.rollout.deterministic:
                yield (
                    f"{at}.judge",
                    "what engines of its own say depends on who asks when: not with rollout.deterministic",
                )
        yield from _check_group_reward(config, task, at)
        yield from _check_agent(config, task, at)
        if task.environment:
            yield from check_registered(ENVIRONMENTS, task.environment, f"{at}.environment")
            yield from _check_episode_length(config, task)
        elif task.reward == "environment_return":
            yield f"{at}.reward", "'environment_return' is paid by an environment, and this task has none"


def _check_agent(config: "RunConfig", task: TaskConfig, at: str) -> Iterator[Problem]:
    if task.agent and task.environment:
        yield (
            f"{at}.agent",
            f"task {task.name!r} has an environment: it is played by turns, or by an agent, not by both",
        )
    if task.agent and config.rollout.deterministic:
        yield f"{at}.agent", "when an agent asks is up to it: not with rollout.deterministic"


def _check_judge_concurrency(config: "RunConfig", task: TaskConfig, at: str) -> Iterator[Problem]:
    """Check that a judge that scales up can be asked more than its first engines answer at once."""
    if task.judge is None or task.reward != "judge":
        return
    least, questions = task.judge.minimum or task.judge.replicas, (task.grading or config.grading).concurrency
    if least < task.judge.replicas and questions <= (slots := least * config.engine.slots):
        yield (
            at,
            f"{least} with {slots} slots (engine.slots) have room for the {questions} questions that are asked at once "
            "(grading.concurrency), and no other would ever start: give more concurrency or fewer slots",
        )


def _check_episode_length(config: "RunConfig", task: TaskConfig) -> Iterator[Problem]:
    """Check that episodes are long enough for their environment's verdict."""
    most, last = config.rollout.max_turns, max_turns(str(task.environment), task.environment_options)
    if most == 1:
        yield "rollout.max_turns", f"task {task.name!r} acts in an environment, which needs more than 1 turn"
    elif last is not None and most < last:
        yield (
            "rollout.max_turns",
            f"{most} would end episodes of task {task.name!r} before its environment judges them, which is after {last} "
            f"turns: give {last} or more, or set turns to {most} in its environment_options",
        )


def _check_group_reward(config: "RunConfig", task: TaskConfig, at: str) -> Iterator[Problem]:
    if task.group_reward is None:
        if task.group_reward_options:
            yield f"{at}.group_reward_options", "there is no group_reward that they could be for"
        return
    yield from check_registered(GROUP_REWARDS, task.group_reward, f"{at}.group_reward")
    if config.rollout.sampler:
        yield f"{at}.group_reward", "a sampler of your own judges siblings one by one: judge them together in it"
    if config.rollout.group_size == 1:
        yield f"{at}.group_reward", "1 sibling (rollout.group_size) has no others to be judged with"


def check_accuracy(config: "RunConfig") -> Iterator[Problem]:
    """Check that the test or validation prompts exist that accuracy targets need."""
    wanted = {
        "evaluation.every": config.evaluation.every,
        "evaluation.minimum_accuracy": config.evaluation.minimum_accuracy,
    }
    if not any(task.test for task in config.tasks):
        for path, value in wanted.items():
            if value:
                yield path, f"{value:g} needs accuracy on test prompts, and no task has any (tasks.0.test)"
    if config.sft and config.sft.stop_accuracy and not any(task.validation for task in config.tasks):
        yield (
            "sft.stop_accuracy",
            f"{config.sft.stop_accuracy:g} needs accuracy on validation prompts, and no task has any (tasks.0.validation)",
        )

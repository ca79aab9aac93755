"""Checks of tasks: rewards, judges, environments, agents, and prompts for accuracy."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.run.config_checks.common import Problem
from antiphon.run.model_files import A_MODEL, is_function
from antiphon.tasks.config import TaskConfig
from antiphon.tasks.environments import max_turns
from antiphon.tasks.rewards import ASYNCHRONOUS, COMPOSED, REWARDS
from antiphon.tasks.rewards.judge_options import iterate_remote_judges

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig


ROUTED = {"name", "route", "prompts", "validation", "test", "weight"}  # settings of a task with a route


def check_tasks(config: "RunConfig") -> Iterator[Problem]:
    """Check each task's data, judge, rewards, environment and agent."""
    yield from _check_data(config)
    for index, task in enumerate(config.tasks):
        at = f"tasks.{index}"
        yield from _check_route(task, at)
        yield from _check_selection(task, at)
        if task.judge is not None:
            yield from _check_judge_concurrency(config, task, f"{at}.judge.minimum")
            if task.reward in REWARDS.known and task.reward not in ASYNCHRONOUS | COMPOSED:
                yield f"{at}.judge", f"is not used: reward {task.reward!r} asks no model"
            if is_function(task.judge.path):
                yield f"{at}.judge.path", f"{task.judge.path!r} must be {A_MODEL}"
            if config.rollout.deterministic:
                yield (
                    f"{at}.judge",
                    "cannot be combined with rollout.deterministic: replies of its engines depend on the order of requests",
                )
        yield from _check_remote_judges(config, task, at)
        yield from _check_group_reward(config, task, at)
        yield from _check_agent(config, task, at)
        if task.environment:
            yield from _check_episode_length(config, task)
        elif task.reward == "environment_return":
            yield f"{at}.reward", "'environment_return' needs a task with an environment"


def _check_data(config: "RunConfig") -> Iterator[Problem]:
    """Check that there are prompts to train on, and that a task without prompts can get some, or is only evaluated."""
    if all(task.prompts is None or not task.weight for task in config.tasks):
        yield "tasks.0.prompts", "is missing: no task with a weight above 0 has prompts to train on"
    routed = [task for task in config.tasks if task.route]
    if len(routed) == len(config.tasks):
        yield "tasks.0.route", "needs another task, without a route, that rows can name"
    for index, task in enumerate(config.tasks):
        if task.prompts is None and task.weight and not routed:
            message = "is missing, and no task has a route by which a row could name this one; weight: 0 only evaluates a task"
            yield f"tasks.{index}.prompts", message
        if task.test is None and not task.weight and not routed:
            yield f"tasks.{index}.test", "is missing: a task of weight 0 is only evaluated"


def _check_route(task: TaskConfig, at: str) -> Iterator[Problem]:
    """Check that a task with a route has no settings that its rows get from the tasks they name."""
    if not task.route:
        return
    if task.prompts is None and task.test is None and task.validation is None:
        yield f"{at}.route", "is not used: the task has no data (prompts, validation, test)"
    for key in sorted(task.model_fields_set - ROUTED):
        if getattr(task, key) != TaskConfig.model_fields[key].default:
            yield f"{at}.{key}", f"is not used: each row gets it from the task that its {task.route!r} names (route)"


def _check_selection(task: TaskConfig, at: str) -> Iterator[Problem]:
    """Check that what selects prompts and groups of a task has some to select."""
    if task.mean_range is not None and task.mean_range[0] > task.mean_range[1]:
        low, high = task.mean_range
        yield f"{at}.mean_range", f"[{low:g}, {high:g}] keeps no group: give the lowest mean first"
    if not task.weight:
        for key in ("curriculum", "mean_range"):
            if getattr(task, key) is not None:
                yield f"{at}.{key}", "is not used: a task of weight 0 is only evaluated"
    elif task.curriculum is not None and task.prompts is None:
        yield (
            f"{at}.curriculum",
            "is not used: the task has no prompts of its own, and those of a route are drawn in its order",
        )


def _check_agent(config: "RunConfig", task: TaskConfig, at: str) -> Iterator[Problem]:
    if task.agent and task.environment:
        yield (
            f"{at}.agent",
            f"task {task.name!r} has an environment and an agent: leave one out",
        )
    if task.agent and config.rollout.deterministic:
        yield f"{at}.agent", "cannot be combined with rollout.deterministic: the timing of its requests is its own"
    if task.reward == "agent_result" and not task.agent:
        yield f"{at}.reward", "'agent_result' needs a task with an agent"
    if task.agent and task.agent.atropos:
        yield from _check_atropos(config, task, at)


def _check_atropos(config: "RunConfig", task: TaskConfig, at: str) -> Iterator[Problem]:
    """Check that an environment of Atropos gets whole groups, and scores them."""
    if ":" not in task.reward and task.reward != "agent_result":
        yield f"{at}.reward", f"is {task.reward!r}, but an environment of Atropos scores its groups: give agent_result"
    if task.group_reward:
        yield f"{at}.group_reward", "is not used: an environment of Atropos scores its groups"
    if config.rollout.redundancy:
        yield (
            "rollout.redundancy",
            f"must be 0: the environment of task {task.name!r} scores whole groups (agent.atropos)",
        )
    if config.rollout.sampler:
        yield "rollout.sampler", f"cannot be combined with the environment of task {task.name!r} (agent.atropos)"


def _check_judge_concurrency(config: "RunConfig", task: TaskConfig, at: str) -> Iterator[Problem]:
    """Check that a judge that scales up can be asked more than its first engines answer at once."""
    if task.judge is None or task.reward != "judge":
        return
    least, questions = task.judge.minimum or task.judge.replicas, (task.grading or config.grading).concurrency
    if least < task.judge.replicas and questions <= (slots := least * config.engine.slots):
        yield (
            at,
            f"{least} engines with {slots} slots together (engine.slots) serve all {questions} concurrent requests "
            "(grading.concurrency), so no other engine would ever start: raise grading.concurrency or lower engine.slots",
        )


def _check_remote_judges(config: "RunConfig", task: TaskConfig, at: str) -> Iterator[Problem]:
    """Check that the cost of judges is known where it is bounded, and that waiting for their rate takes no grading too long."""
    if task.grading is not None and task.grading.judge_budget:
        yield f"{at}.grading.judge_budget", "belongs to the run: set grading.judge_budget"
    grading = task.grading or config.grading
    at_once = grading.concurrency * max(config.rollout.workers, 1)
    for options in iterate_remote_judges(task.reward, task.reward_options):
        if config.grading.judge_budget and not (options.get("input_price") or options.get("output_price")):
            message = "needs the input_price or output_price of each judge, the cost of a million tokens"
            yield "grading.judge_budget", f"{message}: task {task.name!r} has none"
        rate = options.get("requests_per_minute") or 0
        longest = at_once * 60 / rate if isinstance(rate, int | float) and rate > 0 else 0.0
        if longest > grading.deadline:
            message = (
                f"{at_once} gradings at once (grading.concurrency) with {rate:g} requests a minute wait up to {longest:g} s, "
                f"longer than grading.deadline, {grading.deadline:g} s: lower grading.concurrency or raise grading.deadline"
            )
            yield f"{at}.reward_options", message


def _check_episode_length(config: "RunConfig", task: TaskConfig) -> Iterator[Problem]:
    """Check that episodes are long enough for their environment's verdict."""
    most, last = config.rollout.max_turns, max_turns(str(task.environment), task.environment_options)
    if most == 1:
        yield "rollout.max_turns", f"must be 2 or more: task {task.name!r} has an environment"
    elif last is not None and most < last:
        yield (
            "rollout.max_turns",
            f"{most} ends episodes of task {task.name!r} before its environment scores them, after {last} turns: "
            f"give {last} or more, or set turns to {most} in its environment_options",
        )


def _check_group_reward(config: "RunConfig", task: TaskConfig, at: str) -> Iterator[Problem]:
    if task.group_reward is None:
        if task.group_reward_options:
            yield f"{at}.group_reward_options", "is not used: the task has no group_reward"
        return
    if config.rollout.sampler:
        yield f"{at}.group_reward", "cannot be combined with rollout.sampler, which scores siblings one by one"
    if config.rollout.group_size == 1:
        yield f"{at}.group_reward", "needs groups of 2 or more siblings (rollout.group_size)"


def check_accuracy(config: "RunConfig") -> Iterator[Problem]:
    """Check that the test or validation prompts exist that accuracy targets need, and that no setting is without use."""
    wanted = {
        "evaluation.every": config.evaluation.every,
        "evaluation.minimum_accuracy": config.evaluation.minimum_accuracy,
    }
    if not any(task.test for task in config.tasks):
        for path, value in wanted.items():
            if value:
                yield path, f"{value:g} needs test prompts, and no task has any (tasks.0.test)"
    if config.evaluation.blocking and config.evaluation.concurrency:
        yield "evaluation.concurrency", "is not used with evaluation.blocking: nothing else runs then"
    if config.sft and config.sft.stop_accuracy and not any(task.validation for task in config.tasks):
        yield (
            "sft.stop_accuracy",
            f"{config.sft.stop_accuracy:g} needs validation prompts, and no task has any (tasks.0.validation)",
        )

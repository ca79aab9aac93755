"""Algorithms, critics, teachers and stages."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.algorithms.declarations import Declaration
from antiphon.algorithms.sections import LossWeightConfig, RewardConfig
from antiphon.core.types import VALUES
from antiphon.run.config_checks.common import Problem

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig


def check_critics(config: "RunConfig") -> Iterator[Problem]:
    """Check critics against the algorithm that uses their values."""
    algorithm, critic = config.algorithm, config.critic
    if critic is None:
        if VALUES in algorithm.required_streams:
            yield (
                "critic",
                f"algorithm {algorithm.recipe!r} needs values, and there is no critic: give critic: {{count: 1}}",
            )
        return
    if VALUES not in algorithm.required_streams:
        yield "critic", f"algorithm {algorithm.recipe!r} asks for no values: it would be trained for nothing"
    if ":" in critic.path:
        yield "critic.path", f"{critic.path!r} must be a directory or a Hugging Face id"
    if critic.disjoint and critic.count > config.rollout.group_size:
        yield (
            "critic.count",
            f"{critic.count} critics cannot have disjoint shares of the {config.rollout.group_size} siblings of a group "
            "(rollout.group_size)",
        )
    if algorithm.agreement_mask or algorithm.disagreement_mask:
        compare = "agreement_mask and disagreement_mask compare"
        if critic.count == 1:
            yield "critic.count", f"1 critic always agrees with itself; {compare} 2 or more"
        elif not critic.disjoint:
            yield "critic.disjoint", f"critics that learn the same always agree; {compare} some that do not: give true"
    if critic.warmup_steps >= config.steps:
        yield "critic.warmup_steps", f"{critic.warmup_steps} leaves nothing of the {config.steps} steps to train in"


def check_turns(config: "RunConfig") -> Iterator[Problem]:
    """Check that options about turns have several turns to act on."""
    if config.rollout.max_turns > 1:
        return
    algorithm = config.algorithm
    asked = {
        "ratio_level": algorithm.ratio_level,
        "correction.level": algorithm.correction.level,
        "correction.filter_level": algorithm.correction.filter_level,
    }
    for key, value in asked.items():
        if value == "turn":
            yield f"algorithm.{key}", f"{value!r} asks for turns, and every response has one (rollout.max_turns)"


def check_advantage(config: "RunConfig", declared: Declaration | None = None) -> Iterator[Problem]:
    """Check what the advantage function declares against groups, turns and the shaping of rewards.

    Args:
        config: The configuration.
        declared: Declaration of a user's function, which is known once its run starts; None for that of a built-in one.
    """
    algorithm, rollout = config.algorithm, config.rollout
    name, declared = algorithm.advantage, declared or algorithm.advantage_declaration
    if declared.grouped and rollout.group_size == 1:
        yield "rollout.group_size", f"with 1 sibling {name!r} has nobody to compare with: every advantage would be 0"
    if declared.per_turn and rollout.max_turns == 1:
        yield "algorithm.advantage", f"{name!r} asks for turns, and every response has one (rollout.max_turns)"
    paid = rollout.max_turns > 1 and any(task.environment for task in config.tasks)
    if declared.per_turn or (declared.pays_turns and paid):
        for key in algorithm.reward.without_turns:
            yield (
                f"algorithm.reward.{key}",
                f"{getattr(algorithm.reward, key)!r} is of whole trajectories, and {name!r} pays turns "
                "(algorithm.advantage), which have no share in it: leave it out; scale divides turns, too",
            )


def check_stages(config: "RunConfig") -> Iterator[Problem]:
    """Check that each configured option is used by a stage."""
    algorithm, stages = config.algorithm, config.learner.stages
    if (algorithm.reward, algorithm.weight) != (RewardConfig(), LossWeightConfig()) and "rewards" not in stages:
        yield "learner.stages", "without 'rewards' nothing comes of algorithm.reward and algorithm.weight"
    if config.critic is not None and "update_critics" not in stages:
        yield "learner.stages", "without 'update_critics' no critic learns"
    if algorithm.reward.overlong_tokens and config.rollout.max_turns > 1:
        yield (
            "algorithm.reward.overlong_tokens",
            "is of the length of a response, and there are several (rollout.max_turns)",
        )
    if config.rollout.group_size == 1 and algorithm.reward.baseline == "group":
        yield "algorithm.reward.baseline", "'group' leaves nothing of the score of 1 sibling (rollout.group_size)"


def check_teachers(config: "RunConfig") -> Iterator[Problem]:
    """Check teachers against the algorithm and the tasks."""
    if config.algorithm.teacher_coefficient and not config.teachers:
        yield (
            "teachers",
            f"algorithm {config.algorithm.recipe!r} asks teachers, and there are none: give teachers: [{{path: …}}]",
        )
    if config.teachers and not config.algorithm.teacher_coefficient:
        yield "algorithm.teacher_coefficient", "0 listens to no teacher, and there are teachers"
    names = {task.name for task in config.tasks}
    for index, teacher in enumerate(config.teachers):
        if ":" in teacher.path:
            yield f"teachers.{index}.path", f"{teacher.path!r} must be a directory or a Hugging Face id"
        for unknown in sorted(set(teacher.tasks) - names):
            yield f"teachers.{index}.tasks", f"{unknown!r} is no task of this run; there are {', '.join(sorted(names))}"

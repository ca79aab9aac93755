"""Checks of the algorithm, its critics and teachers, the stages of a step, and the streams that they compute and read.

What a user's own function declares is known only once the run starts: `config_checks/user_functions.py` calls `check_streams`,
and the other checks that depend on it, then.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.algorithms.declarations import Declaration
from antiphon.algorithms.sections import LossWeightConfig, RewardConfig
from antiphon.core.errors import Mistake
from antiphon.core.types import (
    ATTENTION_RHYTHM,
    ENTROPY_WEIGHT,
    KL_REWARD,
    RETURNS,
    ROUTED_EXPERTS,
    SAMPLING_SUPPORT,
    STREAMS,
    TEACHER_LOGPROBS,
    VALUES,
    StreamSpec,
)
from antiphon.engines.base import ENGINES
from antiphon.engines.config import SERVER_KINDS
from antiphon.run.config_checks.common import Problem, iterate_engines
from antiphon.run.model_files import A_MODEL, is_function

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig

OWN_PRODUCERS = ("stage", "engine")  # producers that a stream of a user can have


@dataclass(frozen=True, slots=True, kw_only=True)
class Declarations:
    """Declarations of the functions that a configuration names, in the order of `learner.stages`.

    Attributes:
        requested: Streams in `algorithm.streams`.
    """

    advantage: Declaration
    loss: Declaration
    requested: tuple[StreamSpec, ...] = ()
    stages: tuple[Declaration, ...] = ()

    @property
    def needs(self) -> list[StreamSpec]:
        """The streams that any of the functions reads."""
        return [spec for each in (self.advantage, self.loss, *self.stages) for spec in each.needs]


def has_user_functions(config: "RunConfig") -> bool:
    """Return True if the configuration names functions of the user, which may need more streams than it shows."""
    return any(":" in name for name in (config.algorithm.advantage, config.algorithm.loss, *config.learner.stages))


def check_streams(config: "RunConfig", declared: Declarations) -> Iterator[Problem]:
    """Check that each stream which a function reads is computed before it is read."""
    algorithm, missing = config.algorithm, _missing_settings(config)
    if all(engine.kind in ENGINES.shipped or engine.kind in SERVER_KINDS for _, engine in iterate_engines(config)):
        own = [spec for spec in declared.needs if spec.producer == "engine" and spec.name not in STREAMS]
        missing |= dict.fromkeys(own, "engine.kind: an engine of your own that returns it")
    readers: dict[str, list[_Reader]] = {
        "advantages": [_Reader("algorithm.advantage", algorithm.advantage, declared.advantage.needs)],
        "update_actor": [
            _Reader("algorithm.loss", algorithm.loss, declared.loss.needs),
            *(
                _Reader(f"algorithm.streams.{index}", name, [spec])
                for index, (name, spec) in enumerate(zip(algorithm.streams, declared.requested, strict=False))
            ),
        ],
    }
    stages = [*zip(config.learner.stages, declared.stages, strict=True)]
    produced = {spec for _, stage in stages for spec in stage.produces if spec not in missing}
    available = {spec for spec in STREAMS.values() if spec.producer == "engine" and spec not in missing}
    for index, (name, stage) in enumerate(stages):
        for reader in (_Reader(f"learner.stages.{index}", name, stage.needs), *readers.pop(name, ())):
            yield from reader.check(available, produced, missing)
        available |= {spec for spec in stage.produces if spec not in missing}
    for reader in (each for rest in readers.values() for each in rest):  # whose stage a user's own replaces
        yield from reader.check(available, produced, missing)


def _missing_settings(config: "RunConfig") -> dict[StreamSpec, str]:
    """Return the streams of Antiphon that this run does not compute, each with the setting that would add it."""
    algorithm, has_critic = config.algorithm, config.critic is not None
    settings = {
        VALUES: (has_critic, "critic: {count: 1}"),
        RETURNS: (has_critic, "critic: {count: 1}"),
        TEACHER_LOGPROBS: (bool(config.teachers), "teachers: [{path: …}]"),
        KL_REWARD: (algorithm.kl.in_reward, "algorithm.kl: {coefficient: 0.1, place: reward}"),
        ENTROPY_WEIGHT: (algorithm.disagreement_mask > 0, "algorithm.disagreement_mask: 0.2"),
        ROUTED_EXPERTS: (
            all(each.routed_experts for _, each in iterate_engines(config)),
            "engine.routed_experts: true",
        ),
        SAMPLING_SUPPORT: (config.rollout.sampling.sampling().support_size > 0, "rollout.sampling.top_k: 50"),
    }
    return {spec: setting for spec, (is_set, setting) in settings.items() if not is_set}


@dataclass(frozen=True, slots=True)
class _Reader:
    """A function that reads streams: its key and its name in the configuration."""

    key: str
    name: str
    needs: Sequence[StreamSpec]

    def check(
        self, available: set[StreamSpec], produced: set[StreamSpec], missing: dict[StreamSpec, str]
    ) -> Iterator[Problem]:
        """Yield a problem for each stream that is not there when the function is called.

        Args:
            available: Streams that the samples have by then.
            produced: Streams that they have at the end of the step.
            missing: Streams that a setting would add.
        """
        for spec in self.needs:
            if spec in available:
                continue
            if spec.name not in STREAMS and spec.producer not in OWN_PRODUCERS:
                reason = f"whose producer is {spec.producer!r}; that of a stream of your own is 'stage' or 'engine'"
                yield self._mistake(spec, reason, OWN_PRODUCERS)
            elif spec in missing:
                yield self._mistake(spec, f"which this run does not compute: set {missing[spec]}", (missing[spec],))
            elif spec.name in STREAMS or spec.producer == "stage":
                reason = "which a stage after it produces: move that stage forward in learner.stages"
                if spec not in produced:
                    reason = "which no stage in learner.stages produces: add one that declares @stage(produces=[…])"
                names = tuple(sorted(each.name for each in available))
                yield self._mistake(spec, f"{reason}. Available here: {', '.join(names) or 'none'}", names)

    def _mistake(self, spec: StreamSpec, reason: str, valid: Sequence[str]) -> Mistake:
        return Mistake(self.key, f"{self.name!r} needs the stream {spec.name!r}, {reason}", self.name, tuple(valid))


def check_critics(config: "RunConfig", *, needs_known: bool = False) -> Iterator[Problem]:
    """Check critics against the algorithm that uses their values.

    Args:
        config: The configuration.
        needs_known: Its `algorithm.streams` has what the user's functions declare.
    """
    algorithm, critic = config.algorithm, config.critic
    if critic is None:
        if VALUES in algorithm.required_streams:
            yield (
                "critic",
                f"is missing: algorithm {algorithm.recipe!r} needs the values of a critic. Add critic: {{count: 1}}",
            )
        return
    if VALUES not in algorithm.required_streams and (needs_known or not has_user_functions(config)):
        yield "critic", f"no part of algorithm {algorithm.recipe!r} reads the values of a critic: leave it out"
    if is_function(critic.path):
        yield "critic.path", f"{critic.path!r} must be {A_MODEL}"
    if critic.disjoint and critic.count > config.rollout.group_size:
        yield (
            "critic.count",
            f"{critic.count} critics cannot have disjoint shares of a group of {config.rollout.group_size} siblings "
            "(rollout.group_size)",
        )
    if algorithm.agreement_mask or algorithm.disagreement_mask:
        masks = "algorithm.agreement_mask and algorithm.disagreement_mask compare critics"
        if critic.count == 1:
            yield "critic.count", f"must be 2 or more: {masks}"
        elif not critic.disjoint:
            yield "critic.disjoint", f"must be true: {masks}, and critics with the same training data always agree"
    if critic.warmup_steps >= config.steps:
        yield "critic.warmup_steps", f"{critic.warmup_steps} must be less than steps = {config.steps}"


def check_token_stats(config: "RunConfig") -> Iterator[Problem]:
    """Check that numbers of attention are recorded only where they are computed; functions of the user may need them too."""
    algorithm = config.algorithm
    asked = [name for name in config.record.token_stats if name in ("waad", "fai")]
    named = (algorithm.advantage, algorithm.loss, *config.learner.stages)
    if asked and ATTENTION_RHYTHM not in algorithm.required_streams and not any(":" in name for name in named):
        yield (
            "record.token_stats",
            f"has {asked[0]!r}, and algorithm.rhythm reads no attention; valid are entropy, advantage and log_ratio",
        )


def check_turns(config: "RunConfig") -> Iterator[Problem]:
    """Check that options about turns have several turns to act on."""
    if config.rollout.max_turns > 1:
        return
    algorithm = config.algorithm
    asked = {
        "ratio_level": algorithm.ratio_level,
        "correction.level": algorithm.correction.level,
        "correction.filter_level": algorithm.correction.filter_level,
        **{f"correction.filters.{n}.level": each.level for n, each in enumerate(algorithm.correction.filters)},
    }
    for key, value in asked.items():
        if value == "turn":
            yield f"algorithm.{key}", f"{value!r} needs several turns per trajectory, and rollout.max_turns is 1"


def check_advantage(config: "RunConfig", declared: Declaration | None = None) -> Iterator[Problem]:
    """Check what the advantage function declares against groups, turns and the shaping of rewards.

    Args:
        config: The configuration.
        declared: Declaration of a user's function, which is known once its run starts; None for that of a built-in one.
    """
    algorithm, rollout = config.algorithm, config.rollout
    name, declared = algorithm.advantage, declared or algorithm.advantage_declaration
    if declared.grouped and rollout.group_size == 1:
        yield "rollout.group_size", f"must be 2 or more: {name!r} compares siblings, so every advantage would be 0"
    if declared.per_turn and rollout.max_turns == 1:
        yield "algorithm.advantage", f"{name!r} needs several turns per trajectory, and rollout.max_turns is 1"
    paid = rollout.max_turns > 1 and any(task.environment for task in config.tasks)
    if declared.per_turn or (declared.pays_turns and paid):
        for key in algorithm.reward.without_turns:
            yield (
                f"algorithm.reward.{key}",
                f"{getattr(algorithm.reward, key)!r} changes the reward of a whole trajectory, which cannot be divided among "
                f"its turns, and {name!r} (algorithm.advantage) uses rewards of turns. Leave it out, or use scale",
            )


def check_stages(config: "RunConfig") -> Iterator[Problem]:
    """Check that each configured option is used by a stage."""
    algorithm, stages = config.algorithm, config.learner.stages
    for name in sorted(config.learner.stage_options.keys() - set(stages)):
        key, valid = f"learner.stage_options.{name}", tuple(stages)
        message = f"{name!r} is no stage of this run: learner.stages has {', '.join(valid)}"
        yield Mistake(key, message, config.learner.stage_options[name], valid)
    if (algorithm.reward, algorithm.weight) != (RewardConfig(), LossWeightConfig()) and "rewards" not in stages:
        yield "learner.stages", "lacks 'rewards', which applies algorithm.reward and algorithm.weight"
    if config.critic is not None and "update_critics" not in stages:
        yield "learner.stages", "lacks 'update_critics', which trains the critic"
    if algorithm.reward.overlong_tokens and config.rollout.max_turns > 1:
        yield (
            "algorithm.reward.overlong_tokens",
            "penalizes the length of a response, and a trajectory has several (rollout.max_turns)",
        )
    if algorithm.reward.whiten and config.critic is None:
        yield (
            "algorithm.reward.whiten",
            "is of the rewards that values are compared with, and there are none: add critic: {count: 1}",
        )
    if config.rollout.group_size == 1 and algorithm.reward.baseline == "group":
        yield "algorithm.reward.baseline", "'group' makes every reward 0: a group has 1 sibling (rollout.group_size)"


def check_teachers(config: "RunConfig", *, needs_known: bool = False) -> Iterator[Problem]:
    """Check teachers against the algorithm and the tasks; see `check_critics` for the arguments."""
    if config.algorithm.teacher_coefficient and not config.teachers:
        yield (
            "teachers",
            f"is empty: algorithm {config.algorithm.recipe!r} needs a teacher. Add teachers: [{{path: …}}]",
        )
    is_used = TEACHER_LOGPROBS in config.algorithm.required_streams
    if config.teachers and not is_used and (needs_known or not has_user_functions(config)):
        yield "algorithm.teacher_coefficient", "is 0, so the log-probs of the teachers are not used: set it above 0"
    names = {task.name for task in config.tasks if not task.route}
    for index, teacher in enumerate(config.teachers):
        if is_function(teacher.path):
            yield f"teachers.{index}.path", f"{teacher.path!r} must be {A_MODEL}"
        for unknown in sorted(set(teacher.tasks) - names):
            yield f"teachers.{index}.tasks", f"{unknown!r} is no task of this run. Tasks are {', '.join(sorted(names))}"

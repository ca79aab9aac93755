"""Checks of the learner's mesh, and of the meshes of the other models."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.learning.learner import LEARNERS
from antiphon.run.config_checks.common import Problem

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig


NO_CHECKPOINTING = (
    "cannot be combined with a pipeline and learner.gradient_checkpointing: recomputed layers would use the experts of "
    "another pack"
)


def check_ranks(config: "RunConfig") -> Iterator[Problem]:
    """Check the learner's mesh against algorithm and cluster."""
    learner, algorithm = config.learner, config.algorithm
    yield from ((f"learner.{key}", message) for key, message in learner.problems())
    for at, phase in (("critic", config.critic), ("sft", config.sft)):
        found = (
            phase.optimizer.incompatibilities(config.learner_of("critic" if at == "critic" else "learner").kind)
            if phase
            else ()
        )
        yield from ((f"{at}.optimizer.{key}", message) for key, message in found)
    if algorithm.expert_balance and learner.kind == "deepspeed":
        yield "algorithm.expert_balance", "needs learner.kind: torch or megatron, not 'deepspeed'"
    if config.cluster.debug:
        yield from learner.debug_problems()
    if learner.mesh.world == 1:
        return
    routed = {
        "engine.routed_experts": config.engine.routed_experts,
        "algorithm.expert_balance": algorithm.expert_balance,
    }
    if learner.mesh.pipeline > 1 and learner.gradient_checkpointing:
        for key in (key for key, on in routed.items() if on):
            yield key, NO_CHECKPOINTING


ROLE_KEYS = {
    "reference": "algorithm.kl",
    "critic": "critic",
    "teacher": "teachers",
}  # the key that adds a model of each role


def check_meshes(config: "RunConfig") -> Iterator[Problem]:
    """Check the meshes of models other than the learner."""
    for role, mesh in config.meshes.roles.items():
        at, settings = f"meshes.{role}", config.learner_of(role)
        if role == "reference" and config.learner.lora:
            yield (
                at,
                "is not used with learner.lora: the reference is the learner's own model, on learner.mesh. Leave it out",
            )
        elif not config.counts[role]:
            yield at, f"is not used: the run has no {role} ({ROLE_KEYS[role]}). Leave it out"
        for key, message in settings.problems():
            if key.startswith("mesh."):  # all else is the learner's, too
                yield at + key.removeprefix("mesh"), message
        if config.cluster.debug and mesh.world > 1:
            yield "cluster.debug", f"cannot be combined with {at}: its {mesh.world} ranks are processes"
        balanced = role == "critic" and config.algorithm.expert_balance
        if balanced and mesh.pipeline > 1 and settings.gradient_checkpointing:
            yield f"{at}.pipeline", f"with algorithm.expert_balance: {NO_CHECKPOINTING}"


def check_profile(config: "RunConfig") -> Iterator[Problem]:
    """Check that the steps to profile are steps of the run, and that the learner can be profiled."""
    steps, memory = config.profile.steps, config.profile.memory
    if memory and not steps:
        yield "profile.memory", "is not used without profile.steps, the training steps to profile"
    if memory and config.learner.device.startswith("cpu"):
        yield "profile.memory", f"needs CUDA, and learner.device is {config.learner.device}"
    if steps and max(steps) > config.steps:
        yield "profile.steps", f"{max(steps)} must not exceed steps = {config.steps}"
    if steps and ":" in config.learner.kind:
        yield "profile.steps", f"needs a learner.kind of {', '.join(LEARNERS.known)}, not one of your own"

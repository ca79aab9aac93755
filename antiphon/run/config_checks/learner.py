"""The learner's ranks, and the meshes of the other models."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.learning.config import OPTIONS
from antiphon.run.config_checks.common import Problem

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig


NO_CHECKPOINTING = (
    "routers are told of the pack that comes next: with a pipeline not with learner.gradient_checkpointing"
)


def check_ranks(config: "RunConfig") -> Iterator[Problem]:
    """Check the learner's mesh against algorithm and cluster."""
    learner, algorithm = config.learner, config.algorithm
    yield from ((f"learner.{key}", message) for key, message in learner.problems())
    if config.engine.routed_experts and learner.kind == "megatron":
        yield "engine.routed_experts", "the megatron learner does not replay what experts the engine chose; torch does"
    if algorithm.expert_balance and learner.kind in OPTIONS:
        yield (
            "algorithm.expert_balance",
            f"routers are told to by the torch learner alone, not by {learner.kind!r} (learner.kind)",
        )
    if config.cluster.debug and learner.kind == "megatron":
        yield "cluster.debug", "each megatron learner is a process of its own"
    if learner.mesh.world == 1:
        return
    if config.cluster.debug:
        yield "cluster.debug", f"the {learner.mesh.world} ranks of learner.mesh are processes"
    if algorithm.rhythm.reads_attention and learner.mesh.world > learner.mesh.data and learner.kind in OPTIONS:
        yield (
            "learner.mesh",
            f"attention (algorithm {algorithm.recipe!r}) is read on replicate and shard only by {learner.kind!r}",
        )
    if algorithm.rhythm.reads_attention and learner.mesh.context > 1 and learner.mesh.context_attention == "keys":
        yield (
            "learner.mesh.context_attention",
            f"'keys', and algorithm {algorithm.recipe!r} reads attention: by 'heads' only",
        )
    told = {"engine.routed_experts": config.engine.routed_experts, "algorithm.expert_balance": algorithm.expert_balance}
    if learner.mesh.pipeline > 1 and learner.gradient_checkpointing:
        for key in (key for key, on in told.items() if on):
            yield key, NO_CHECKPOINTING


ROLE_KEYS = {"reference": "algorithm.kl", "critic": "critic", "teacher": "teachers"}  # what a role is there for


def check_meshes(config: "RunConfig") -> Iterator[Problem]:
    """Check the meshes of models other than the learner."""
    for role, mesh in config.meshes.roles.items():
        at, settings = f"meshes.{role}", config.learner_of(role)
        if role == "reference" and config.learner.lora:
            yield (
                at,
                "the reference of adapters (learner.lora) is the learner's own model, on learner.mesh: leave it out",
            )
        elif not config.counts[role]:
            yield at, f"the run has no {role} ({ROLE_KEYS[role]}), whose ranks these would be: leave it out"
        for key, message in settings.problems():
            if key.startswith("mesh."):  # all else is the learner's, too
                yield at + key.removeprefix("mesh"), message
        if config.cluster.debug and mesh.world > 1:
            yield "cluster.debug", f"the {mesh.world} ranks of {at} are processes"
        balanced = role == "critic" and config.algorithm.expert_balance
        if balanced and mesh.pipeline > 1 and settings.gradient_checkpointing:
            yield f"{at}.pipeline", f"{mesh.pipeline}, and algorithm.expert_balance is more than 0: {NO_CHECKPOINTING}"

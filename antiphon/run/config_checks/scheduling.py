"""Sampling, group sizes, and what rollout workers can share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.cluster.config import PlacementConfig
from antiphon.cluster.placement import ANYWHERE
from antiphon.run.config_checks.common import Problem, iterate_engines

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig


def check_sampling(config: "RunConfig") -> Iterator[Problem]:
    """Check that the learner can reproduce the sampling distribution."""
    sampling = config.rollout.sampling
    at = "rollout.sampling"
    if sampling.temperature == 0.0:
        yield (
            f"{at}.temperature",
            "0 is greedy: siblings would all be equal, and their log-probs mean nothing; use more than 0",
        )
    for field, neutral in {"top_p": 1.0, "top_k": 0, "min_p": 0.0}.items():
        value = getattr(sampling, field)
        if value != neutral:
            yield (
                f"{at}.{field}",
                f"{value:g} cuts the distribution, and the learner cannot know what was cut off: the support is not "
                f"recorded. Train on {neutral:g}",
            )


def check_scheduling(config: "RunConfig") -> Iterator[Problem]:
    """Check group sizes, mini-batches and lengths."""
    rollout, learner = config.rollout, config.learner
    if rollout.group_size == 1 and rollout.filter == "spread":
        yield "rollout.filter", "'spread' would drop every group: the score of 1 sibling has no spread"
    if learner.minibatches > rollout.groups_per_step:
        yield (
            "learner.minibatches",
            f"{learner.minibatches} optimiser steps cannot share the {rollout.groups_per_step} groups of a step "
            "(rollout.groups_per_step)",
        )
    for at, engine in iterate_engines(config):
        if engine.max_length and rollout.sampling.max_tokens >= engine.max_length:
            yield (
                "rollout.sampling.max_tokens",
                f"{rollout.sampling.max_tokens} leaves no room for a prompt in {at}.max_length = {engine.max_length}",
            )


def check_minimum_engines(config: "RunConfig") -> Iterator[Problem]:
    """Check that a run may begin with fewer engines."""
    if config.engine.minimum and config.rollout.workers:
        yield "engine.minimum", "each of rollout.workers begins with all of its engines: give 0"
    if config.engine.minimum and config.rollout.deterministic:
        yield "engine.minimum", "who answers what depends on who is there: not with rollout.deterministic"


def check_rollout_workers(config: "RunConfig") -> Iterator[Problem]:
    """Check that everything can be divided among rollout workers."""
    workers, replicas = config.rollout.workers, config.engine.replicas
    if not workers:
        return
    if replicas % workers:
        yield "engine.replicas", f"{replicas} engines cannot be divided evenly among rollout.workers = {workers}"
    if config.engine.also:
        yield "engine.also", "each of rollout.workers has as many engines, all alike: leave it out"
    if any(task.prefers for task in config.tasks):
        yield "tasks.prefers", "each of rollout.workers has engines of one class of devices: leave it out"
    if config.engine.server_options is not None:
        yield "rollout.workers", "servers (engine.kind) are the controller's to ask: give 0"
    if config.rollout.deterministic:
        yield "rollout.workers", "workers do not wait for each other: not with rollout.deterministic"
    if config.weights.channel == "object_store":
        yield (
            "weights.channel",
            "only Ray's own workers read its object store, and engines of rollout.workers are none: use distributed",
        )
    yield from _check_worker_placement(config.placement)
    for index, task in enumerate(config.tasks):
        if task.judge is not None:
            yield f"tasks.{index}.judge", "each of rollout.workers would have judge engines of its own: give 0"


def _check_worker_placement(placement: PlacementConfig) -> Iterator[Problem]:
    for role in ("reward", "environment", "auto"):
        if getattr(placement, role):
            yield (
                f"placement.{role}",
                "rewards and environments run beside their worker: leave it out with rollout.workers",
            )
    for role in ("reference", "critic", "teacher"):
        if placement.roles.get(role) == ANYWHERE:
            yield f"placement.{role}", "'anywhere' is not the node of the learner, where rollout.workers have it be"

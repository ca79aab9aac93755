"""Clusters, placement and servers."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.cluster.placement import ANYWHERE, find_problems
from antiphon.run.config_checks.common import Problem, iterate_engines

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig


def check_cluster(config: "RunConfig") -> Iterator[Problem]:
    """Check the kind of cluster against what runs on it."""
    cluster = config.cluster
    if cluster.debug and cluster.kind == "ray":
        yield "cluster.debug", "Ray's workers are processes; only cluster.kind = local has them as threads"
    if cluster.kind == "local" and config.weights.channel == "object_store":
        yield "weights.channel", "the object store is Ray's, and cluster.kind is local"
    if cluster.address and cluster.kind == "local":
        yield "cluster.address", f"{cluster.address!r} is the address of a Ray, and cluster.kind is local"
    if cluster.kind == "ray" and cluster.address and not re.fullmatch(r"auto|[^/]+:\d+", cluster.address):
        yield "cluster.address", f"{cluster.address!r} is neither 'auto' nor host:port"
    if cluster.kind == "ray" and not config.rollout.workers:  # their engines are processes beside them
        for at, engine in iterate_engines(config):
            if engine.python:
                yield f"{at}.python", f"{engine.python!r}: Ray has one interpreter for all: use cluster.kind = local"


def check_placement(config: "RunConfig") -> Iterator[Problem]:
    """Check the placement of roles on devices."""
    placement, cluster = config.placement, config.cluster
    for role, problem in find_problems(placement):
        yield f"placement.{role}", problem
    if placement.auto:
        yield from _check_auto_placement(config)
    if (placement.auto or placement.roles) and cluster.debug:
        yield "cluster.debug", "threads of one process cannot be placed: leave out placement"
    for index, task in enumerate(config.tasks):
        if task.prefers and not placement.engine:
            yield f"tasks.{index}.prefers", f"{task.prefers!r}: engines have no devices of their own (placement.engine)"
    for role, text in placement.roles.items():
        if text == ANYWHERE and cluster.kind == "local":
            yield f"placement.{role}", "'anywhere' is of a cluster of several nodes, and cluster.kind is local"
        if role in ("learner", "reward") and text == ANYWHERE:
            yield f"placement.{role}", f"{role} is not 'anywhere': give it devices, or leave it beside the controller"
    if placement.engine == ANYWHERE and config.weights.channel == "shared_memory" and not config.weights.directory:
        yield (
            "weights.channel",
            "the shared memory of one node does not reach engines on others (placement.engine): use object_store or "
            "distributed, or name a weights.directory that all nodes see",
        )


def _check_auto_placement(config: "RunConfig") -> Iterator[Problem]:
    if config.placement.roles:
        role = next(iter(config.placement.roles))
        yield "placement.auto", f"the planner places all or nothing, and {role} is placed already"
    if config.engine.also:
        yield "engine.also", "the planner (placement.auto) takes all engines for alike: place the roles"
    if config.cluster.address:
        yield "placement.auto", "the planner divides this machine alone, not a Ray (cluster.address): place the roles"


def check_server_placement(config: "RunConfig") -> Iterator[Problem]:
    """Check that servers are neither placed nor asked to judge."""
    if any(engine.server_options for _, engine in iterate_engines(config)) and (
        config.placement.engine or config.placement.auto
    ):
        yield "placement.engine", "servers (engine.kind) run where they were started: they are not placed"
    if config.engine.server_options is None:
        return
    for index, task in enumerate(config.tasks):
        if task.judge is not None:
            yield f"tasks.{index}.judge", "servers (engine.kind) run the policy, and cannot run a judge besides"

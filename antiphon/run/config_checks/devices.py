"""Checks of clusters, placement and servers."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.cluster.placement import ANYWHERE, find_problems, placement_key
from antiphon.engines.config import NATIVE_DTYPES
from antiphon.learning.config import OPTIONS
from antiphon.run.config_checks.common import Problem, iterate_engines

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig

WITH_DELTAS = ("distributed", "object_store")  # channels with the encoding `delta`


def check_cluster(config: "RunConfig") -> Iterator[Problem]:
    """Check the kind of cluster against what runs on it."""
    cluster = config.cluster
    if cluster.debug and cluster.kind == "ray":
        yield "cluster.debug", "needs cluster.kind: local; workers of Ray are processes, not threads"
    if cluster.kind == "local" and config.weights.channel == "object_store":
        yield "weights.channel", "'object_store' needs cluster.kind: ray"
    if cluster.address and cluster.kind == "local":
        yield "cluster.address", f"{cluster.address!r} needs cluster.kind: ray"
    if cluster.kind == "ray" and cluster.address and not re.fullmatch(r"auto|[^/]+:\d+", cluster.address):
        yield "cluster.address", f"{cluster.address!r} is neither 'auto' nor host:port"
    if cluster.kind == "ray" and not config.rollout.workers:  # their engines are processes beside them
        for at, engine in iterate_engines(config):
            if engine.python:
                yield (
                    f"{at}.python",
                    f"{engine.python!r} needs cluster.kind: local; all workers of Ray use one interpreter",
                )


def check_weights(config: "RunConfig") -> Iterator[Problem]:
    """Check how weights are sent against the channel and the learner."""
    channel, learner = config.weights.channel, config.learner
    if config.weights.encoding == "delta" and channel not in WITH_DELTAS and ":" not in channel:
        yield (
            "weights.encoding",
            f"'delta' needs weights.channel: {' or '.join(WITH_DELTAS)}, or one of your own; it is {channel!r}",
        )
    if config.weights.senders == "all":
        if channel == "device_memory":
            yield (
                "weights.senders",
                "'all' needs another weights.channel than 'device_memory', which is that of one rank",
            )
        if learner.kind in OPTIONS or learner.lora is not None:
            yield "weights.senders", "'all' needs learner.kind: torch, or one of your own, without learner.lora"


def check_dtypes(config: "RunConfig") -> Iterator[Problem]:
    """Check that native engines have dtypes that exist; those of other kinds are their own affair."""
    for at, engine in iterate_engines(config):
        if engine.kind == "native" and engine.dtype not in (*NATIVE_DTYPES, "auto"):
            yield f"{at}.dtype", f"there is no {engine.dtype!r}; valid are {', '.join(NATIVE_DTYPES)} and auto"


def check_placement(config: "RunConfig") -> Iterator[Problem]:
    """Check the placement of roles on devices."""
    placement, cluster = config.placement, config.cluster
    for role, problem in find_problems(config.placements):
        yield placement_key(role), problem
    if placement.auto:
        yield from _check_auto_placement(config)
    if (placement.auto or placement.roles) and cluster.debug:
        yield "cluster.debug", "cannot be combined with placement: threads of one process share its devices"
    for index, task in enumerate(config.tasks):
        if task.prefers and not placement.engine:
            yield (
                f"tasks.{index}.prefers",
                f"{task.prefers!r} needs engines with devices of their own (placement.engine)",
            )
    for role, text in config.placements.items():
        if text == ANYWHERE and cluster.kind == "local":
            yield placement_key(role), "'anywhere' needs cluster.kind: ray"
        if role == "learner" and text == ANYWHERE:
            yield "placement.learner", "cannot be 'anywhere' for the learner: name devices, or leave it out"
    if placement.engine == ANYWHERE and config.weights.channel == "shared_memory" and not config.weights.directory:
        yield (
            "weights.channel",
            "'shared_memory' does not reach engines on other nodes (placement.engine): use object_store or distributed, or "
            "set weights.directory to a folder that all nodes share",
        )


def _check_auto_placement(config: "RunConfig") -> Iterator[Problem]:
    if config.placement.roles:
        role = next(iter(config.placement.roles))
        yield "placement.auto", f"cannot be combined with placement.{role}: the planner places all roles"
    if config.engine.also:
        yield "engine.also", "cannot be combined with placement.auto, which assumes equal engines: place the roles"
    if config.cluster.address:
        yield "placement.auto", "cannot be combined with cluster.address: it divides this machine only. Place the roles"


def check_server_placement(config: "RunConfig") -> Iterator[Problem]:
    """Check that servers are neither placed nor used as judges."""
    if any(engine.server_options for _, engine in iterate_engines(config)) and (
        config.placement.engine or config.placement.auto
    ):
        yield "placement.engine", "cannot be set with servers (engine.kind): they run where they were started"
    if config.engine.server_options is None:
        return
    for index, task in enumerate(config.tasks):
        if task.judge is not None:
            yield f"tasks.{index}.judge", "cannot be combined with servers (engine.kind), which run the policy only"

"""Checks of sampling, group sizes, and of what can be divided among rollout workers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.cluster.config import PlacementConfig
from antiphon.cluster.placement import ANYWHERE
from antiphon.core.types import Sampling
from antiphon.core.types.versions import MAX_SUPPORT
from antiphon.engines.config import EngineKind
from antiphon.engines.request_checks import PENALTIES
from antiphon.engines.server_protocols import SERVER_PROTOCOLS, resolve_protocol
from antiphon.run.config_checks.common import Problem, iterate_engines

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig


def check_sampling(config: "RunConfig") -> Iterator[Problem]:
    """Check that the learner can reproduce the sampling distribution, of the run and of each task."""
    own = config.rollout.sampling.sampling()
    yield from _check_distribution(own, {*own.__slots__}, "rollout.sampling", config)
    for index, task in enumerate(config.tasks):
        if task.weight and (changed := {*task.sampling.changes}):
            yield from _check_distribution(task.sampling.apply(own), changed, f"tasks.{index}.sampling", config)
        if config.rollout.sampler and task.sampling.changes:
            yield f"tasks.{index}.sampling", "cannot be combined with rollout.sampler, which chooses how to sample"
        if config.algorithm.reward.overlong_tokens and task.sampling.max_tokens is not None:
            yield (
                f"tasks.{index}.sampling.max_tokens",
                "cannot be combined with algorithm.reward.overlong_tokens, which counts from rollout.sampling.max_tokens",
            )


def _check_distribution(sampling: Sampling, changed: set[str], at: str, config: "RunConfig") -> Iterator[Problem]:
    if sampling.temperature == 0.0 and "temperature" in changed:
        yield (
            f"{at}.temperature",
            "must be above 0: with greedy sampling all siblings are equal, and log-probs have no meaning",
        )
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    cut = [name for name in neutral if name in changed and getattr(sampling, name) != neutral[name]]
    for name in cut[:1]:
        if not 0 < sampling.top_k <= MAX_SUPPORT:
            yield (
                f"{at}.top_k",
                f"must be 1 to {MAX_SUPPORT} in training with {name}, not {sampling.top_k}: what a token is sampled from is "
                "recorded, so that the learner computes log-probs of the same truncated distribution",
            )
        for engine in (f"{key}.kind" for key, engine in iterate_engines(config) if engine.kind != "native"):
            yield (
                f"{at}.{name}",
                f"needs engines of kind native in training: that of {engine} does not record the support",
            )


def check_evaluation_sampling(config: "RunConfig") -> Iterator[Problem]:
    """Check that engines have the penalties and beams of evaluations, and that there is one sample for a beam search."""
    plans = config.plan_evaluation()
    for index, task in enumerate(config.tasks):
        own, at = task.evaluation.sampling, f"tasks.{index}.evaluation.sampling"
        if own.num_beams in (None, 1):
            for name in ("length_penalty", "early_stopping"):
                if getattr(own, name) is not None:
                    yield f"{at}.{name}", "is not used without a beam search: num_beams must be above 1"
        elif plans[task.name].sampling.num_beams == 1:
            yield (
                f"{at}.num_beams",
                "needs one sample per prompt (evaluation.samples) at temperature 0: a beam search has one result",
            )
        neutral = {**PENALTIES, "num_beams": 1}
        asked = [name for name in neutral if getattr(own, name) not in (None, neutral[name])]
        for engine_at, engine in iterate_engines(config):
            for name in sorted({*asked} - _evaluation_options(engine, {*neutral})):
                yield f"{at}.{name}", f"needs engines that have it, as those of kind native; {engine_at} has not"


def _evaluation_options(engine: EngineKind, every: set[str]) -> set[str]:
    """Return the penalties that engines have, and `num_beams` if they have beam search; `every` if they are your own."""
    servers = engine.server_options
    if servers is not None and servers.flavour in SERVER_PROTOCOLS.shipped:
        return {*resolve_protocol(servers.flavour, "").penalties}
    return {*PENALTIES} if engine.kind == "vllm" else every


def check_scheduling(config: "RunConfig") -> Iterator[Problem]:
    """Check group sizes, mini-batches and lengths."""
    rollout, learner = config.rollout, config.learner
    if rollout.group_size == 1 and rollout.filter == "spread":
        yield (
            "rollout.filter",
            "'spread' would drop every group: 1 sibling (rollout.group_size) has no spread of scores",
        )
    if rollout.on_expiry == "wait" and rollout.order != "ready":
        yield (
            "rollout.on_expiry",
            "'wait' needs rollout.order: ready; in the order fifo a step always waits for the oldest groups",
        )
    if learner.minibatches > rollout.groups_per_step:
        yield (
            "learner.minibatches",
            f"{learner.minibatches} must not exceed rollout.groups_per_step = {rollout.groups_per_step}",
        )
    limits = {"rollout.sampling.max_tokens": rollout.sampling.max_tokens}
    for index, task in enumerate(config.tasks):
        limits[f"tasks.{index}.sampling.max_tokens"] = task.sampling.max_tokens or 0
        limits[f"tasks.{index}.evaluation.sampling.max_tokens"] = task.evaluation.sampling.max_tokens or 0
    for at, engine in iterate_engines(config):
        for key, most in limits.items():
            if engine.max_length and most >= engine.max_length:
                yield key, f"{most} must be less than {at}.max_length = {engine.max_length}, which includes the prompt"


def check_update_interval(config: "RunConfig") -> Iterator[Problem]:
    """Check that samples can be fresh enough in the last step before an update of the engines."""
    every, rollout = config.weights.every, config.rollout
    if every == 1:
        return
    if rollout.in_rounds:
        yield (
            "weights.every",
            f"{every} must be 1 with rollout.policy: {rollout.policy}, whose rounds follow the updates",
        )
    elif rollout.async_ratio < every - 1:
        yield (
            "weights.every",
            f"{every} needs rollout.async_ratio of at least {every - 1}, not {rollout.async_ratio:g}: in the last step before "
            f"an update, engines are {every - 1} training steps behind. This ratio allows {int(rollout.async_ratio) + 1}",
        )


def check_minimum_engines(config: "RunConfig") -> Iterator[Problem]:
    """Check that a run can start with fewer engines than it may have."""
    if config.engine.minimum and config.rollout.workers:
        yield "engine.minimum", "must be 0 with rollout.workers: each worker starts all of its engines"
    if config.engine.minimum and config.rollout.deterministic:
        yield "engine.minimum", "must be 0 with rollout.deterministic: replies depend on the number of engines"


def check_rollout_workers(config: "RunConfig") -> Iterator[Problem]:
    """Check that everything can be divided among rollout workers."""
    workers, replicas = config.rollout.workers, config.engine.replicas
    if not workers:
        return
    if replicas % workers:
        yield "engine.replicas", f"{replicas} engines cannot be divided evenly among rollout.workers = {workers}"
    if config.engine.also:
        yield "engine.also", "cannot be combined with rollout.workers: each worker has equal engines. Leave it out"
    if any(task.prefers for task in config.tasks):
        yield "tasks.prefers", "cannot be combined with rollout.workers: each has one class of devices. Leave it out"
    if config.engine.server_options is not None:
        yield "rollout.workers", "must be 0 with servers (engine.kind): only the controller sends them requests"
    if config.rollout.deterministic:
        yield "rollout.workers", "must be 0 with rollout.deterministic: workers are not synchronized"
    if config.weights.channel == "object_store":
        yield (
            "weights.channel",
            "'object_store' cannot be combined with rollout.workers: their engines are no workers of Ray. Use distributed",
        )
    yield from _check_worker_placement(config.placement)


def _check_worker_placement(placement: PlacementConfig) -> Iterator[Problem]:
    for role in ("reward", "environment", "auto"):
        if getattr(placement, role):
            yield (
                f"placement.{role}",
                "cannot be set with rollout.workers: rewards and environments run on the node of their worker",
            )
    for role in ("reference", "critic", "teacher"):
        if placement.roles.get(role) == ANYWHERE:
            yield f"placement.{role}", "cannot be 'anywhere' with rollout.workers: the model runs on the learner's node"

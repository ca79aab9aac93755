"""Speeds of a run's parts, estimated from the model's size and the limits of devices."""

import math
import time
from collections.abc import Callable
from statistics import fmean

import torch

from antiphon.engines.config import PREALLOCATING_KINDS
from antiphon.run.config import RunConfig
from antiphon.run.memory import TRAINED_BYTES
from antiphon.simulate.device_memory import cache_shards, engine_memory, engine_room
from antiphon.simulate.devices import Device
from antiphon.simulate.engine_speed import EngineSpeed
from antiphon.simulate.learner import LearnerSpeed
from antiphon.simulate.model_facts import ModelFacts, dtype_bytes
from antiphon.simulate.model_shape import Architecture
from antiphon.simulate.speeds import Speeds, make_trace
from antiphon.simulate.workloads import DistributionConfig

EFFICIENCY = 0.4  # share of a device's matrix-product rate that a model reaches; measured of our own engine on CPUs
FORWARD, BACKWARD = 1, 2  # passes
SUM_SECONDS = 1e-5  # latency of a sum over the devices of an engine; an assumption
COPY_RATE = 5e9  # bytes a second between a GPU and unpinned host memory; an assumption
PINNED_COPY_RATE = 25e9  # and pinned host memory; an assumption
HANDOVER = {"shared_memory": 3.6e9, "object_store": 2.76e9, "distributed": 0.49e9}
"""Bytes a second from learner to engine on two CPU cores, which no cluster has confirmed: medians of all runs there were
(`benchmarks/handover.py`), which lie between 2.4 and 5.1, 2.1 and 4.0, 0.3 and 0.73 GB/s."""


def estimate(config: RunConfig, model: ModelFacts, device: Device, lent: int = 0) -> Speeds:
    """Estimate speeds from sizes; `lent` is the number of engines that take turns with the learner.

    Responses are taken to have any length up to the limit.

    An iteration reads all weights, those of all experts too, and the cache; arithmetic reaches a share of the device's rate.
    Several devices of an engine divide both, and add up hidden states twice a layer. Left out: host time, sampling, uneven
    load of experts, optimiser steps, gradients that are summed while they are computed for `context`.
    """
    shape, engine = model.shape, config.engine
    size, ranks = dtype_bytes(engine.dtype), engine.devices_per_engine
    token = 2 * shape.active / (device.operations * EFFICIENCY * ranks) + _all_reduce_seconds(
        shape, size, ranks, device.link
    )
    most = config.rollout.sampling.max_tokens
    weights = 0 if config.learner.lora else shape.parameters * dtype_bytes(config.weights_dtype)
    cached = shape.cached_per_token * size / cache_shards(shape, config)
    switching = _switch_seconds(model, config) if lent else 0.0
    publish = weights / HANDOVER["shared_memory"] / 2
    speed = EngineSpeed(
        iteration=shape.parameters * size / (device.read * ranks) + 2 * shape.layers * SUM_SECONDS * (ranks > 1),
        per_sequence=token,
        per_token=cached / device.read,
        prefill=token,
        load=weights / HANDOVER.get(config.weights.channel, HANDOVER["shared_memory"]) - publish,
    )
    if engine.kind in PREALLOCATING_KINDS and math.isfinite(device.memory):
        room = engine_room(config, device) - engine_memory(model, config, device)["weights"]
        speed = speed.model_copy(update={"memory": max(int(room / cached), 1)})
    return Speeds(
        engine=speed,
        learner=LearnerSpeed(step=switching, per_token=_learner_seconds(model, config, device), publish=publish),
        prompt_tokens=make_trace(model.prompt_tokens),
        response_tokens=DistributionConfig(kind="uniform", mean=most / 2, spread=most / 2, minimum=1),
    )


def _all_reduce_seconds(shape: Architecture, size: int, ranks: int, rate: float, times: int = 2) -> float:
    """Return the seconds of ring all-reduces of one token's hidden states, `times` a layer."""
    return times * shape.layers * 2 * (ranks - 1) / ranks * shape.hidden * size / rate


def _switch_seconds(model: ModelFacts, config: RunConfig) -> float:
    """Return the seconds of a step in which learner and engine move out of a shared device and back."""
    held = max(share.held for share in model.shape.shares(config.learner.mesh)) * TRAINED_BYTES * 3
    weights = model.shape.parameters * dtype_bytes(config.engine.dtype) // config.engine.devices_per_engine
    return 2 * (held + weights) / COPY_RATE


def _learner_seconds(model: ModelFacts, config: RunConfig, device: Device) -> float:
    """Return the seconds per trained token, by all ranks together, with full packs.

    A rank computes its part of a pack: 2 operations a parameter and pass, and 4 a query number and token before in attention;
    backward is two forwards, checkpointing one more. Meanwhile FSDP gathers its layers twice and scatters gradients, in
    float32, once, and copies (`replicate`) sum them: the longer of both counts. Then come sums for `tensor`, two a layer and
    pass, and exchanges for `expert`; a pipeline of p stands still for p - 1 of its packs.
    """
    learner, shape = config.learner, model.shape
    mesh, size, recomputed = learner.mesh, dtype_bytes(learner.dtype), learner.gradient_checkpointing
    passes = FORWARD + BACKWARD + recomputed
    mean = fmean(model.prompt_tokens) + config.rollout.max_turns * config.rollout.sampling.max_tokens / 2
    operations = 2 * shape.active + 4 * shape.layers * shape.queries * mean / 2
    split = mesh.context * mesh.tensor * mesh.pipeline
    compute = learner.tokens_per_pack * passes * operations / (device.operations * EFFICIENCY * split)
    exchange = _all_reduce_seconds(shape, size, mesh.tensor, device.link, times=2 * (2 + recomputed))
    if mesh.expert > 1:
        moved = 2 * (2 + recomputed) * shape.layers * shape.active_experts * shape.hidden * size * (1 - 1 / mesh.expert)
        exchange += moved / device.rate(mesh.expert * mesh.tensor)
    pack = max(compute, _gather_seconds(shape, config, device)) + learner.tokens_per_pack * exchange / (
        mesh.context * mesh.pipeline
    )
    tokens = config.rollout.groups_per_step * config.rollout.group_size * mean / learner.minibatches
    packs = max(tokens / mesh.data / learner.tokens_per_pack, 1)
    bubble = (mesh.pipeline - 1) / (packs * mesh.pipeline_chunks)
    return pack * (1 + bubble) / (learner.tokens_per_pack * mesh.data)


def _gather_seconds(shape: Architecture, config: RunConfig, device: Device) -> float:
    """Return the seconds per pack to gather the fullest rank's parameters twice, and to scatter and sum their gradients."""
    mesh, size, worst = config.learner.mesh, dtype_bytes(config.learner.dtype), 0.0
    near = mesh.shard * mesh.context
    for share in shape.shares(mesh):
        seconds = 0.0
        for numbers, ranks in ((share.experts, near // mesh.expert), (share.computed - share.experts, near)):
            seconds += numbers * (2 * size + TRAINED_BYTES) * (1 - 1 / ranks) / device.rate(near * mesh.tensor)
        copies = share.held * TRAINED_BYTES * 2 * (1 - 1 / mesh.replicate) / device.rate(mesh.world // mesh.pipeline)
        if config.learner.cpu_offload:  # both times from host memory, and gradients back to it
            copies += share.held * TRAINED_BYTES * 3 / PINNED_COPY_RATE
        worst = max(worst, seconds + copies)
    return worst


def measure_this_machine(config: RunConfig) -> Device:
    """Measure this machine's limits in a moment."""
    operations, read = measure_limits(config.engine.device, config.engine.threads)
    return Device(operations=operations, read=read)


def measure_limits(device: str, threads: int) -> tuple[float, float]:
    """Measure floating-point operations and bytes read per second of a device."""
    name = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    square, long = torch.rand(1024, 1024, device=name), torch.rand(1 << 25, device=name)

    def time_work(work: Callable[[], torch.Tensor]) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            work().flatten()[0].item()  # waits for the device
            times.append(time.perf_counter() - began)
        return min(times)

    limits = 2 * 1024**3 / time_work(lambda: square @ square), long.nbytes / time_work(lambda: long.sum())
    torch.set_num_threads(before)
    return limits

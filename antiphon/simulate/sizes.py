"""What sizes alone say of a run: what each device holds, and how fast its parts are. No weights are needed for that, and none
of the devices.

The model is built without memory (torch's meta device) from its config.json: parameters are counted exactly, and cut as the
learner cuts them. All else here is an estimate, whose formula stands where it is made.
"""

import asyncio
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.cluster.placement import companion
from antiphon.engines.config import PREALLOCATING_KINDS
from antiphon.learning.config import OPTIONS, LearnerConfig
from antiphon.learning.mesh_config import MeshConfig
from antiphon.learning.model.loading import build_on_meta
from antiphon.learning.parallel.tensor_parallel import COLUMNS, ROWS
from antiphon.run.config import RunConfig
from antiphon.run.launch import check_meshes, model_directory
from antiphon.run.memory import DTYPE_BYTES, TRAINED_BYTES, memory_estimate
from antiphon.simulate.components import LearnerSpeed
from antiphon.simulate.devices import Device
from antiphon.simulate.engine import EngineSpeed
from antiphon.simulate.planner import Speeds, trace
from antiphon.simulate.workloads import DistributionConfig
from antiphon.tasks.mixture import Mixture
from antiphon.tasks.rendering import Renderer

# --- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter of the model, and how the learner cuts it."""

    shape: tuple[int, ...]
    layers: tuple[int, ...]  # on whose rank it is: its own, the first, the last
    inside: bool = True  # of a layer, not what stands before or after them
    cut: int | None = None  # dimension that `mesh.tensor` divides
    expert: bool = False  # of all experts of a layer, one after another

    def on_a_rank(self, mesh: MeshConfig, *, gathered: bool = False) -> int:
        """Numbers that the first of the ranks has, which has no fewer than others; `gathered`: while it computes."""
        sizes, ranks = list(self.shape), mesh.shard * mesh.context
        if self.cut is not None:
            sizes[self.cut] = -(-sizes[self.cut] // mesh.tensor)
        if self.expert:
            sizes[0] //= mesh.expert
            ranks //= mesh.expert
        if sizes and not gathered:
            sizes[0] = -(-sizes[0] // ranks)
        return math.prod(sizes)


class Share(NamedTuple):
    """What a rank of the learner has of the parameters."""

    held: int  # for good
    computed: int  # of its layers and what is around them, all that it computes with
    around: int  # of that, what is in no layer
    layer: int  # of that, the largest layer
    experts: int  # of that, those of experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder's shape."""

    weights: tuple[Weight, ...]
    layers: int
    hidden: int
    queries: int = 0  # of all heads together
    keys: int = 0  # key heads
    head: int = 0  # numbers of a head
    columns: int = 0  # of the feed-forward layers that a token passes
    vocabulary: int = 0
    experts: int = 1
    chosen: int = 1  # of the experts of a layer, by a token

    @staticmethod
    def read(model: Path) -> "Architecture":
        """Of the model in a directory, of which nothing but config.json is read. `UnsupportedError` if it is no decoder."""
        whole = build_on_meta(model)
        shape = whole.config.get_text_config()
        experts = getattr(shape, "num_experts", None) or getattr(shape, "num_local_experts", None) or 1
        chosen = shape.num_experts_per_tok if experts > 1 else 1
        inner = getattr(shape, "moe_intermediate_size", None) if experts > 1 else None
        return Architecture(
            weights=tuple(_weights(whole)),
            layers=shape.num_hidden_layers,
            hidden=shape.hidden_size,
            queries=shape.num_attention_heads * (head := _head(shape)),
            keys=getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads,
            head=head,
            columns=chosen * (inner or getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size),
            vocabulary=shape.vocab_size,
            experts=experts,
            chosen=chosen,
        )

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def active(self) -> int:
        """Parameters that a token is computed with."""
        idle = sum(math.prod(weight.shape) for weight in self.weights if weight.expert)
        return self.parameters - idle * (self.experts - self.chosen) // self.experts

    @property
    def cached_per_token(self) -> int:
        """Numbers in the KV cache."""
        return 2 * self.layers * self.keys * self.head

    def shares(self, mesh: MeshConfig) -> list[Share]:
        """Of the first rank of each stage of the pipeline, as `ShardedModel` cuts the model."""
        found = []
        per = self.layers // (mesh.pipeline * mesh.pipeline_chunks) or 1
        for place in range(mesh.pipeline):
            own = [
                weight
                for weight in self.weights
                if any(layer // per % mesh.pipeline == place for layer in weight.layers)
            ]
            sizes = Counter[int]()
            for weight in own:
                sizes[weight.layers[0] if weight.inside else -1] += weight.on_a_rank(mesh, gathered=True)
            around = sizes.pop(-1, 0)
            found.append(
                Share(
                    held=sum(weight.on_a_rank(mesh) for weight in own),
                    computed=around + sizes.total(),
                    around=around,
                    layer=max(sizes.values(), default=0),
                    experts=sum(weight.on_a_rank(mesh, gathered=True) for weight in own if weight.expert),
                )
            )
        return found


def _head(shape: Any) -> int:
    size: int = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return size


def _weights(model: Any) -> Iterator[Weight]:
    """Of a model on the meta device."""
    layers = getattr(model.base_model, "layers", ())  # a model that has none of that name is not divided by them
    layer_of = {id(p): (number,) for number, layer in enumerate(layers) for p in layer.parameters()}
    first: tuple[int, ...] = (0,)
    last = (len(layers) - 1,)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends: dict[int, tuple[int, ...]] = {id(head.weight): last} if head is not None else {}
    ends[id(embedding.weight)] = first + last if id(embedding.weight) in ends else first
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    cut = dict.fromkeys(ends, 0)
    for name, module in model.base_model.named_modules():
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style in (COLUMNS, ROWS):
            cut |= {id(p): int(style == ROWS) for p in module.parameters(recurse=False)}
    experts = {
        id(parameter)
        for module in model.modules()
        if isinstance(getattr(module, "num_experts", None), int)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3
    }
    for parameter in model.parameters():
        key = id(parameter)
        yield Weight(
            shape=tuple(parameter.shape),
            layers=layer_of.get(key) or ends.get(key) or last,
            inside=key in layer_of,
            cut=cut.get(key),
            expert=key in experts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a plan needs to know of the model and its prompts."""

    shape: Architecture
    prompt_tokens: tuple[int, ...]  # of some prompts

    def longest(self, config: RunConfig) -> int:
        """Tokens of the longest sequence."""
        longest = max(self.prompt_tokens) + config.rollout.max_turns * config.rollout.sampling.max_tokens
        return min(longest, config.engine.max_length or longest)

    def cache(self, config: RunConfig) -> int:
        """Bytes of the KV cache of an engine whose slots all have the longest sequence."""
        return config.engine.slots * self.longest(config) * self.shape.cached_per_token * _size(config.engine.dtype)

    def memory(self, config: RunConfig) -> dict[str, int]:
        """Bytes of each part of the run, without activations."""
        found, cache = memory_estimate(self.shape.parameters, config), config.engine.replicas * self.cache(config)
        return {"KV caches, at most": cache, **found, "all": found["all"] + cache}


PROMPTS = 256  # that are looked at


def inspect(config: RunConfig) -> ModelFacts:
    """Look at a run's model, which is built or fetched if need be, without its weights where it can be; and at its first
    prompts. `ConfigError` or `UnsupportedError` if the mesh does not suit it."""
    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(_inspect(config, Path(scratch) / "model"))


async def _inspect(config: RunConfig, scratch: Path) -> ModelFacts:
    mixture = Mixture.load(config.tasks, config.seed)
    cluster = LocalCluster(ClusterConfig(), scratch.parent)
    try:
        model = await model_directory(cluster, config.model.path, scratch, config.seed, weights=False)
    finally:
        await cluster.close()
    check_meshes(config, model)
    renderer = Renderer(model)
    return ModelFacts(
        shape=Architecture.read(model),
        prompt_tokens=tuple(len(renderer.encode_prompt(mixture.next().messages)) for _ in range(PROMPTS)),
    )


def _size(dtype: str) -> int:
    return DTYPE_BYTES.get(dtype, 4)


# --- memory of each device ---------------------------------------------------------------------------------------------

ROOM = 0.9  # of a device, that an engine takes which has its own memory: vLLM's gpu_memory_utilization
OTHERS = ("reference", "critic", "teacher")
LOGITS = 12  # bytes of a logit: itself, its probability and its gradient, in float32


def learner_memory(model: ModelFacts, config: RunConfig) -> dict[str, int]:
    """Bytes on the fullest rank of the learner. Exact are weights, gradients and moments; with adapters, these are left out.

    gathered: what FSDP gathers, in the dtype that is computed in: two layers and what is in none; and the gradient of the
        larger of both before it is scattered, in that dtype and in float32. Without FSDP: what autocast keeps cast.
    activations, of T tokens a pack, H hidden, Q of all queries, K of all keys, F columns that a token passes, t ranks of
        `tensor`, in numbers of that dtype: T layers (8 H + (2 Q + 2 K + 4 F) / t), after Korthikanti et al. 2022
        (arXiv 2205.05198) for gated layers, norms in float32 and attention that keeps no scores; with checkpointing T H
        layers, and one layer whole. A mixture also copies a token for each of its experts. The first rank of a pipeline
        has as many packs under way as there are ranks, so that it keeps as much.
    logits: of `logits_chunk` tokens, 12 bytes each.
    """
    learner = config.learner
    found = []
    for share in model.shape.shares(learner.mesh):
        kept = 0 if learner.cpu_offload else share.held * TRAINED_BYTES
        trained = 0 if learner.lora else kept
        rows = {
            "weights": kept,
            "gradients": trained,
            "moments": 2 * trained,
            "gathered": _gathered(share, learner),
            "activations": _activations(model.shape, learner),
            "logits": learner.logits_chunk * -(-model.shape.vocabulary // learner.mesh.tensor) * LOGITS,
        }
        found.append(rows | _beside_learner(model.shape, share, config))
    return max(found, key=lambda rows: sum(rows.values()))


def _gathered(share: Share, learner: LearnerConfig) -> int:
    size = _size(learner.dtype)
    if learner.mesh.data * learner.mesh.context > 1:
        there = share.around + min(2 * share.layer, share.computed - share.around)
        return there * size + max(share.around, share.layer) * (size + TRAINED_BYTES)
    return share.computed * size if size < TRAINED_BYTES else 0


def _activations(shape: Architecture, learner: LearnerConfig) -> int:
    mesh, size = learner.mesh, _size(learner.dtype)
    copies = 2 * shape.chosen * shape.hidden if shape.experts > 1 else 0
    block = 2 * shape.queries + 2 * shape.keys * shape.head + 4 * shape.columns + copies
    layer = 8 * shape.hidden + block // mesh.tensor
    whole = shape.hidden * shape.layers + layer if learner.gradient_checkpointing else layer * shape.layers
    return learner.tokens_per_pack // mesh.context * whole * size


def _beside_learner(shape: Architecture, share: Share, config: RunConfig) -> dict[str, int]:
    """Of models that are placed with the learner, whose devices their ranks are divided among."""
    found = {}
    for role in OTHERS:
        count, mesh = config.counts[role], config.learner_of(role).mesh
        if count and companion(config.placement.roles.get(role, "")) == "learner":
            held = share.held if mesh == config.learner.mesh else max(each.held for each in shape.shares(mesh))
            ranks = -(-count * mesh.world // config.learner.mesh.world)  # on each device
            found[role if role == "reference" else f"{role}s"] = _copies(role, config) * held * TRAINED_BYTES * ranks
    return found


def own_memory(model: ModelFacts, config: RunConfig) -> dict[str, int]:
    """Bytes on the fullest rank of each role that has a mesh of its own: weights, of critics gradients and moments too, what is
    gathered, and of critics activations, as `learner_memory` has them. All are taken for models of the policy's size."""
    found = {}
    for role, mesh in config.meshes.roles.items():
        settings = config.learner_of(role)
        held = 0 if settings.cpu_offload else _copies(role, config) * TRAINED_BYTES
        activations = _activations(model.shape, settings) if role == "critic" else 0
        shares = model.shape.shares(mesh)
        found[f"each {role} rank"] = activations + max(
            share.held * held + _gathered(share, settings) for share in shares
        )
    return found


def _copies(role: str, config: RunConfig) -> int:
    """Numbers for each parameter of a model: critics have a gradient and two moments, too."""
    return 4 if role == "critic" and not config.learner.lora else 1


def engine_memory(model: ModelFacts, config: RunConfig, device: Device) -> dict[str, int]:
    """Bytes on each device of an engine: weights, evenly divided; the KV cache at most, heads divided as far as they can be.
    A kind that has its own memory makes do with what there is."""
    engine = config.engine
    weights = model.shape.parameters * _size(engine.dtype) // engine.devices_per_engine
    cache = model.cache(config) // _cuts(model.shape, config)
    if engine.kind in PREALLOCATING_KINDS:
        cache = min(cache, max(int(_room(config, device)) - weights, 0))
    return {"weights": weights, "KV cache, at most": cache}


def _cuts(shape: Architecture, config: RunConfig) -> int:
    """Parts of an engine's cache: where there are more devices than key heads, some have the same."""
    return min(config.engine.devices_per_engine, shape.keys or 1)


def _room(config: RunConfig, device: Device) -> float:
    return device.memory * float(config.engine.options.get("gpu_memory_utilization", ROOM))


def passing_needs(model: ModelFacts, config: RunConfig) -> dict[str, int]:
    """Bytes on a device of the learner at times when it does not train: a rank of a backend loads the whole model in float32
    before it takes its share, where one of ours reads that alone; as weights are published or saved, one tensor after another
    is whole beside the shares, twice where ranks have pieces of other sizes; and memory of the first device may be how they
    are published."""
    if config.learner.mesh.world == 1:
        return {}
    whole, rows = model.shape.parameters * TRAINED_BYTES, learner_memory(model, config)
    largest = max(math.prod(weight.shape) for weight in model.shape.weights) * TRAINED_BYTES
    published = whole if config.weights.channel == "device_memory" and not config.learner.lora else 0
    found = {"each learner rank, as it loads the model": whole} if config.learner.kind in OPTIONS else {}
    return found | {
        "each learner rank, as it publishes or saves": rows["weights"] + rows["moments"] + 2 * largest + published
    }


def device_memory(model: ModelFacts, config: RunConfig, device: Device) -> dict[str, int]:
    """Bytes on each device, part by part and in all. Those that learner and engines share they have in turns, never both."""
    found: dict[str, int] = {}
    for who, rows in {
        "learner": learner_memory(model, config),
        "engine": engine_memory(model, config, device),
    }.items():
        found |= {f"{who}: {part}": size for part, size in rows.items() if size}
        found[f"{who}, all"] = sum(rows.values())
    return found | own_memory(model, config) | passing_needs(model, config) | {"there is": int(device.memory)}


def find_misfits(model: ModelFacts, config: RunConfig, device: Device) -> Iterator[str]:
    """What does not fit on a device, a line each."""
    engine = engine_memory(model, config, device)
    found = {
        "each learner rank": sum(learner_memory(model, config).values()),
        "each device of an engine": sum(engine.values()),
        **own_memory(model, config),
        **passing_needs(model, config),
    }
    needs = [(who, need, device.memory) for who, need in found.items()]
    if config.engine.kind in PREALLOCATING_KINDS:
        longest = model.cache(config) // config.engine.slots // _cuts(model.shape, config)
        one = "each device of an engine, for one sequence of the longest"
        needs.append((one, engine["weights"] + longest, _room(config, device)))
    for who, need, there in needs:
        if need > there:
            yield f"{who}: needs {need / 2**30:,.0f} GiB, and there are {there / 2**30:,.0f}"


# --- speeds ------------------------------------------------------------------------------------------------------------

EFFICIENCY = 0.4  # of a device's matrix products, that a model reaches; what our own engine reaches on CPUs
FORWARD, BACKWARD = 1, 2  # passes
SUM_SECONDS = 1e-5  # of a sum over the devices of an engine, however little it is; an assumption
COPYING = 5e9  # bytes a second between a GPU and memory of its machine that is not pinned; an assumption
HANDOVER = {"shared_memory": 3.7e9, "object_store": 3.1e9, "distributed": 0.51e9}
"""Bytes a second from learner to engine on two CPU cores, which no cluster has confirmed: medians of all runs there were
(`benchmarks/handover.py`), which lie between 2.4 and 3.9, 2.1 and 3.6, 0.3 and 0.73 GB/s."""


def estimate(config: RunConfig, model: ModelFacts, device: Device, lent: int = 0) -> Speeds:
    """What sizes alone say, when `lent` engines take turns with the learner. Answers are of any length up to the limit.

    An iteration reads all weights, those of all experts too, and the cache; arithmetic goes at a share of the device's own.
    Several devices of an engine divide both, and add up hidden states twice a layer. Left out: host time, sampling, experts
    that have more to do than others, optimiser steps, gradients summed while they are computed for `context`.
    """
    shape, engine = model.shape, config.engine
    size, ranks = _size(engine.dtype), engine.devices_per_engine
    token = 2 * shape.active / (device.operations * EFFICIENCY * ranks) + _sums(shape, size, ranks, device.link)
    most = config.rollout.sampling.max_tokens
    weights = 0 if config.learner.lora else shape.parameters * TRAINED_BYTES
    cached = shape.cached_per_token * size / _cuts(shape, config)
    turns = _turns(model, config) if lent else 0.0
    publish = weights / HANDOVER["shared_memory"] / 2
    speed = EngineSpeed(
        iteration=shape.parameters * size / (device.read * ranks) + 2 * shape.layers * SUM_SECONDS * (ranks > 1),
        per_sequence=token,
        per_token=cached / device.read,
        prefill=token,
        load=weights / HANDOVER.get(config.weights.channel, HANDOVER["shared_memory"]) - publish,
    )
    if engine.kind in PREALLOCATING_KINDS and math.isfinite(device.memory):
        room = _room(config, device) - engine_memory(model, config, device)["weights"]
        speed = speed.model_copy(update={"memory": max(int(room / cached), 1)})
    return Speeds(
        engine=speed,
        learner=LearnerSpeed(step=turns, per_token=_learner_seconds(model, config, device), publish=publish),
        prompt_tokens=trace(model.prompt_tokens),
        response_tokens=DistributionConfig(kind="uniform", mean=most / 2, spread=most / 2, minimum=1),
    )


def _sums(shape: Architecture, size: int, ranks: int, rate: float, times: int = 2) -> float:
    """Seconds in which so many ranks add up a token's hidden states, so many times a layer, around a ring."""
    return times * shape.layers * 2 * (ranks - 1) / ranks * shape.hidden * size / rate


def _turns(model: ModelFacts, config: RunConfig) -> float:
    """Seconds of a step in which learner and engine leave a device to each other, and come back."""
    held = max(share.held for share in model.shape.shares(config.learner.mesh)) * TRAINED_BYTES * 3
    weights = model.shape.parameters * _size(config.engine.dtype) // config.engine.devices_per_engine
    return 2 * (held + weights) / COPYING


def _learner_seconds(model: ModelFacts, config: RunConfig, device: Device) -> float:
    """Seconds of a token that is trained on, by all ranks together; all packs are full.

    A rank computes its part of a pack: 2 operations a parameter and pass, and 4 a query number and token before in attention;
    backward is two forwards, checkpointing one more. Meanwhile FSDP gathers its layers twice and scatters gradients, in
    float32, once, and copies (`replicate`) sum them: the longer of both counts. Then come sums for `tensor`, two a layer and
    pass, and exchanges for `expert`; a pipeline of p stands still for p - 1 of its packs.
    """
    learner, shape = config.learner, model.shape
    mesh, size, again = learner.mesh, _size(learner.dtype), learner.gradient_checkpointing
    passes = FORWARD + BACKWARD + again
    mean = fmean(model.prompt_tokens) + config.rollout.max_turns * config.rollout.sampling.max_tokens / 2
    operations = 2 * shape.active + 4 * shape.layers * shape.queries * mean / 2
    split = mesh.context * mesh.tensor * mesh.pipeline
    compute = learner.tokens_per_pack * passes * operations / (device.operations * EFFICIENCY * split)
    exchange = _sums(shape, size, mesh.tensor, device.link, times=2 * (2 + again))
    if mesh.expert > 1:
        moved = 2 * (2 + again) * shape.layers * shape.chosen * shape.hidden * size * (1 - 1 / mesh.expert)
        exchange += moved / device.rate(mesh.expert * mesh.tensor)
    pack = max(compute, _gathering(shape, config, device)) + learner.tokens_per_pack * exchange / (
        mesh.context * mesh.pipeline
    )
    tokens = config.rollout.groups_per_step * config.rollout.group_size * mean / learner.minibatches
    packs = max(tokens / mesh.data / learner.tokens_per_pack, 1)
    bubble = (mesh.pipeline - 1) / (packs * mesh.pipeline_chunks)
    return pack * (1 + bubble) / (learner.tokens_per_pack * mesh.data)


def _gathering(shape: Architecture, config: RunConfig, device: Device) -> float:
    """Seconds a pack in which the fullest rank's parameters are gathered twice, and their gradients scattered and summed."""
    mesh, size, worst = config.learner.mesh, _size(config.learner.dtype), 0.0
    near = mesh.shard * mesh.context
    for share in shape.shares(mesh):
        seconds = 0.0
        for numbers, ranks in ((share.experts, near // mesh.expert), (share.computed - share.experts, near)):
            seconds += numbers * (2 * size + TRAINED_BYTES) * (1 - 1 / ranks) / device.rate(near * mesh.tensor)
        copies = share.held * TRAINED_BYTES * 2 * (1 - 1 / mesh.replicate) / device.rate(mesh.world // mesh.pipeline)
        worst = max(worst, seconds + copies)
    return worst


def here(config: RunConfig) -> Device:
    """This machine's own, measured in a moment."""
    operations, read = machine_limits(config.engine.device, config.engine.threads)
    return Device(operations=operations, read=read)


def machine_limits(device: str, threads: int) -> tuple[float, float]:
    """Floating-point operations and bytes read a second, measured in a moment."""
    name = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    square, long = torch.rand(1024, 1024, device=name), torch.rand(1 << 25, device=name)

    def seconds(work: Callable[[], torch.Tensor]) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            work().flatten()[0].item()  # waits for the device
            times.append(time.perf_counter() - began)
        return min(times)

    limits = 2 * 1024**3 / seconds(lambda: square @ square), long.nbytes / seconds(lambda: long.sum())
    torch.set_num_threads(before)
    return limits

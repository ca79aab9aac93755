"""Memory of each device of a run, estimated from sizes; the formulas stand where they are used."""

import math
from collections.abc import Iterator

from antiphon.cluster.placement import parse_shared_role
from antiphon.engines.config import PREALLOCATING_KINDS
from antiphon.learning.config import OPTIONS, LearnerConfig
from antiphon.run.config import RunConfig
from antiphon.run.memory import LOGIT_BYTES, TRAINED_BYTES, layer_activations
from antiphon.simulate.devices import Device
from antiphon.simulate.model_facts import ModelFacts, dtype_bytes
from antiphon.simulate.model_shape import Architecture, RankShare

PREALLOCATED_SHARE = 0.9  # of a device, for engines that preallocate: vLLM's gpu_memory_utilization
FEED_FORWARD_GRADIENTS = 4  # tensors as large as a feed-forward layer's inside that its backward pass has at once
NF4_BYTES = 1 / 2 + 4 / 64  # of a weight: its bits, and the scale of its block
OTHER_ROLES = ("reference", "critic", "teacher")


def learner_memory(model: ModelFacts, config: RunConfig) -> dict[str, int]:
    """Return the bytes on the fullest rank of the learner, at their peak.

    Weights, gradients and moments are exact. Adapters are left out; with them, on one rank that computes in
    bfloat16 the model's files are taken to be in it, too (`lora.hold_base_in_bfloat16`). With `cpu_offload` none of these is on
    the device. Of the rest there is as much as at the
    worst moment of a backward pass: at the head, in the last layer, or when FSDP sums the gradients of a layer, or of what is
    outside of layers.

    gathered: what FSDP gathers, in the compute dtype: what is outside of layers all the time, and two layers. Without FSDP:
        what autocast keeps cast.
    activations: `run.memory.layer_activations` of each token of a pack and each layer, in that dtype; with checkpointing the
        hidden states alone, of one layer if others are offloaded, and one layer whole. The first rank of a pipeline has as many
        packs under way as there are ranks, so that it keeps as much.
    temporary: at the head `logits_chunk` tokens' logits, 12 bytes each; in a layer what its backward makes; and gradients
        before they are added or scattered, while FSDP sends them also in float32.
    """
    learner = config.learner
    found = []
    for share in model.shape.shares(learner.mesh, learner.lora):
        kept, trained = (0 if learner.cpu_offload else count * TRAINED_BYTES for count in (share.held, share.trained))
        moment = learner.optimizer.moment_bytes / TRAINED_BYTES
        if _shrinks_base(learner):
            half = TRAINED_BYTES - dtype_bytes(learner.dtype)
            kept -= share.head * half + int(share.linear * (TRAINED_BYTES - NF4_BYTES if _has_nf4(learner) else half))
        rows = {"weights": kept, "gradients": trained, "moments": int(2 * trained * moment)}
        found.append(rows | _in_backward(model.shape, share, learner) | _beside_learner(model.shape, share, config))
    return max(found, key=lambda rows: sum(rows.values()))


def _in_backward(shape: Architecture, share: RankShare, learner: LearnerConfig) -> dict[str, int]:
    """Return what there is beside weights, gradients and moments at the worst moment of a backward pass."""
    size, tokens = dtype_bytes(learner.dtype), learner.tokens_per_pack // learner.mesh.context
    ranks, sharded = learner.mesh.tensor, learner.uses_fsdp
    kept, layer = _activations(shape, learner)
    rows = -(-shape.vocabulary // ranks)
    fresh = 0 if learner.lora else size if sharded else TRAINED_BYTES  # of a gradient, before it is added or scattered
    summed = fresh + TRAINED_BYTES if sharded and fresh else 0  # of one that FSDP sends in single precision
    of_head = rows * shape.hidden * fresh
    later = of_head if sharded else 0  # is kept until the gradients of all that is outside of layers are summed
    at_head = {
        "gathered": _gathered(share, learner, layers=0),
        "activations": kept,
        "temporary": min(learner.logits_chunk, tokens) * rows * LOGIT_BYTES + of_head,
    }
    in_layer = {
        "gathered": _gathered(share, learner, layers=2),
        "activations": kept + layer,
        "temporary": FEED_FORWARD_GRADIENTS * shape.feed_forward // ranks * tokens * size
        + share.layer * fresh
        + later
        + _dequantized(shape, learner),
    }
    summing_layer = {
        "gathered": _gathered(share, learner, layers=2),
        "activations": 0 if learner.activation_offload else kept * (shape.layers - 1) // shape.layers,
        "temporary": share.layer * summed + later,
    }
    summing_rest = {"gathered": 0, "activations": 0, "temporary": share.around * summed}
    return max(at_head, in_layer, summing_layer, summing_rest, key=lambda moment: sum(moment.values()))


def _dequantized(shape: Architecture, learner: LearnerConfig) -> int:
    """Return the bytes of the largest matrix of a layer as it is computed with, if it is held in four bits."""
    return shape.feed_forward * shape.hidden * dtype_bytes(learner.dtype) if _has_nf4(learner) else 0


def _gathered(share: RankShare, learner: LearnerConfig, layers: int) -> int:
    """Return the bytes of what is outside of layers, and of so many layers, in the compute dtype.

    Without FSDP: of what autocast keeps cast.
    """
    size = dtype_bytes(learner.dtype)
    if learner.uses_fsdp:
        return (share.around + min(layers * share.layer, share.computed - share.around)) * size
    cast = share.experts if _shrinks_base(learner) else share.computed
    return cast * size if size < TRAINED_BYTES else 0


def _shrinks_base(learner: LearnerConfig) -> bool:
    """True if weights that adapters are added to are held in fewer bits than trained ones."""
    low = learner.dtype == "bfloat16" or _has_nf4(learner)
    return learner.lora is not None and low and not learner.forms_group


def _has_nf4(learner: LearnerConfig) -> bool:
    return learner.lora is not None and learner.lora.quantize == "nf4"


def _activations(shape: Architecture, learner: LearnerConfig) -> tuple[int, int]:
    """Return the bytes that all layers keep for the backward pass, and those that a layer computes again."""
    mesh, size = learner.mesh, dtype_bytes(learner.dtype)
    wide = size < TRAINED_BYTES and not learner.uses_fsdp
    tokens = learner.tokens_per_pack // mesh.context
    layer = (
        tokens
        * size
        * layer_activations(
            hidden=shape.hidden,
            queries=shape.queries,
            keys=shape.key_heads * shape.head,
            feed_forward=shape.feed_forward,
            experts=shape.active_experts if shape.experts > 1 else 0,
            normed_heads=shape.normed_heads,
            wide=wide,
            ranks=mesh.tensor,
        )
    )
    if not learner.gradient_checkpointing:
        return layer * shape.layers, 0
    kept = 1 if learner.activation_offload else shape.layers
    return tokens * shape.hidden * kept * (TRAINED_BYTES if wide else size), layer


def _beside_learner(shape: Architecture, share: RankShare, config: RunConfig) -> dict[str, int]:
    """Return the bytes of models that share the learner's devices, divided among its ranks."""
    found = {}
    for role in OTHER_ROLES:
        count, mesh = config.counts[role], config.learner_of(role).mesh
        if count and parse_shared_role(config.placement.roles.get(role, "")) == "learner":
            held = share.held if mesh == config.learner.mesh else max(each.held for each in shape.shares(mesh))
            ranks = -(-count * mesh.world // config.learner.mesh.world)  # on each device
            found[role if role == "reference" else f"{role}s"] = int(_bytes_held(role, config) * held) * ranks
    return found


def role_memory(model: ModelFacts, config: RunConfig) -> dict[str, int]:
    """Return the bytes on the fullest rank of each role that has a mesh of its own.

    These are weights and gathered layers, and of critics also gradients, moments and what a backward pass takes, estimated
    as in `learner_memory`. All are taken to be models of the policy's size.
    """
    found = {}
    for role, mesh in config.meshes.roles.items():
        settings = config.learner_of(role)
        held = 0 if settings.cpu_offload else _bytes_held(role, config)
        found[f"each {role} rank"] = max(
            int(share.held * held)
            + (
                sum(_in_backward(model.shape, share, settings).values())
                if role == "critic"
                else _gathered(share, settings, layers=2)
            )
            for share in model.shape.shares(mesh)
        )
    return found


def _bytes_held(role: str, config: RunConfig) -> float:
    """Return the bytes held per parameter: of critics also those of a gradient and two moments."""
    if role == "critic" and config.critic is not None and config.learner.lora is None:
        return 2 * TRAINED_BYTES + 2 * config.critic.optimizer.moment_bytes
    return TRAINED_BYTES


def engine_memory(model: ModelFacts, config: RunConfig, device: Device) -> dict[str, int]:
    """Return the bytes on each device of an engine: weights, evenly divided, and the KV cache at most.

    Heads of the cache are divided as far as possible. An engine that preallocates memory fits its cache into it.
    """
    engine = config.engine
    weights = model.shape.parameters * dtype_bytes(engine.dtype) // engine.devices_per_engine
    cache = model.cache(config) // cache_shards(model.shape, config)
    if engine.kind in PREALLOCATING_KINDS:
        cache = min(cache, max(int(engine_room(config, device)) - weights, 0))
    return {"weights": weights, "KV cache, at most": cache}


def cache_shards(shape: Architecture, config: RunConfig) -> int:
    """Return the number of shards of an engine's cache: with more devices than key heads, some devices hold the same."""
    return min(config.engine.devices_per_engine, shape.key_heads or 1)


def engine_room(config: RunConfig, device: Device) -> float:
    """Return the bytes of a device that an engine preallocates."""
    return device.memory * float(config.engine.options.get("gpu_memory_utilization", PREALLOCATED_SHARE))


def transient_memory(model: ModelFacts, config: RunConfig) -> dict[str, int]:
    """Return the bytes on a device of the learner while it loads, publishes or saves.

    A rank of a backend loads the whole model in float32 before it takes its share; ours read their share alone. To publish or
    save, one tensor after another is whole beside the shares, twice where ranks hold pieces of other sizes. The channel
    `device_memory` publishes from the memory of the first device.
    """
    if not config.learner.forms_group:
        return {}
    whole, rows = model.shape.parameters * TRAINED_BYTES, learner_memory(model, config)
    largest = max(math.prod(weight.shape) for weight in model.shape.weights) * TRAINED_BYTES
    sent = model.shape.parameters * dtype_bytes(config.weights_dtype)
    published = sent if config.weights.channel == "device_memory" and not config.learner.lora else 0
    found = {"each learner rank, as it loads the model": whole} if config.learner.kind in OPTIONS else {}
    return found | {
        "each learner rank, as it publishes or saves": rows["weights"] + rows["moments"] + 2 * largest + published
    }


def device_memory(model: ModelFacts, config: RunConfig, device: Device) -> dict[str, int]:
    """Return the bytes on each device, by part and in all. Learner and engines use a shared device in turns, never both."""
    found: dict[str, int] = {}
    for who, rows in {
        "learner": learner_memory(model, config),
        "engine": engine_memory(model, config, device),
    }.items():
        found |= {f"{who}: {part}": size for part, size in rows.items() if size}
        found[f"{who}, all"] = sum(rows.values())
    found |= role_memory(model, config) | transient_memory(model, config) | {"there is": int(device.memory)}
    return found | host_memory(model, config)


def host_memory(model: ModelFacts, config: RunConfig) -> dict[str, int]:
    """Return the bytes that a rank of the learner keeps in host memory instead of its device's."""
    learner = config.learner
    if not learner.cpu_offload:
        return {}
    each = TRAINED_BYTES + 2 * learner.optimizer.moment_bytes
    sizes = (
        share.held * TRAINED_BYTES + share.trained * each for share in model.shape.shares(learner.mesh, learner.lora)
    )
    return {"each learner rank, in host memory": int(max(sizes))}


def find_misfits(model: ModelFacts, config: RunConfig, device: Device) -> Iterator[str]:
    """Yield a line for each part that does not fit on a device."""
    engine = engine_memory(model, config, device)
    found = {
        "each learner rank": sum(learner_memory(model, config).values()),
        "each device of an engine": sum(engine.values()),
        **role_memory(model, config),
        **transient_memory(model, config),
    }
    needs = [(who, need, device.memory) for who, need in found.items()]
    if config.engine.kind in PREALLOCATING_KINDS:
        longest = model.cache(config) // config.engine.slots // cache_shards(model.shape, config)
        one = "each device of an engine, for one sequence of the longest"
        needs.append((one, engine["weights"] + longest, engine_room(config, device)))
    for who, need, there in needs:
        if need > there:
            yield f"{who}: needs {need / 2**30:,.0f} GiB, and there are {there / 2**30:,.0f}"

"""Estimates of the memory that a run needs."""

from collections.abc import Mapping
from typing import Any

from antiphon.run.config import RunConfig
from antiphon.run.model_files import count_parameters

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "auto": 4,
}  # auto, until it is chosen: at most 4

TRAINED_BYTES = 4  # of a trained parameter, of its gradient and of each moment, whatever the compute type
LOGIT_BYTES = 12  # of a logit, its probability and its gradient, in float32


def layer_activations(
    *,
    hidden: int,
    queries: int,
    keys: int,
    feed_forward: int,
    experts: int = 0,
    normed_heads: bool = False,
    wide: bool = False,
    ranks: int = 1,
) -> int:
    """Return the numbers that a decoder layer keeps of each token until the backward pass, with layers that keep little.

    H hidden, Q of all queries, K of all keys, F feed-forward columns that a token passes, t ranks of `tensor`:

        4 H + (3 Q + 2 K + 2 F) / t

    These are the inputs and outputs of both norms (`learning.model.memory_efficient_layers`), the queries, keys, values and
    outputs of attention, these also as the input of its projection, and gate and up of the feed-forward layer. Norms of
    queries and keys keep Q + K more. A mixture keeps 4 F in place of 2 F, and 2 H for each of the `experts` that a token
    passes. `wide`: under autocast, halves, of a residual stream in single precision, of which each projection keeps a copy.
    """
    kept = 3 * queries + 2 * keys + (4 if experts else 2) * feed_forward + 2 * experts * hidden
    if normed_heads:
        kept += queries + keys
    return (9 if wide else 4) * hidden + kept // ranks


def activations_per_token(shape: Mapping[str, Any], checkpointing: bool) -> int:
    """Return the numbers that a dense decoder keeps of each token, from its config.json; 0 if that says too little."""
    hidden, layers = shape.get("hidden_size", 0), shape.get("num_hidden_layers", 0)
    heads = shape.get("num_attention_heads") or 1
    head = shape.get("head_dim") or hidden // heads
    layer = layer_activations(
        hidden=hidden,
        queries=heads * head,
        keys=(shape.get("num_key_value_heads") or heads) * head,
        feed_forward=shape.get("intermediate_size") or 4 * hidden,
    )
    return hidden * layers + layer if checkpointing else layer * layers


def memory_estimate(parameters: int, config: RunConfig) -> dict[str, int]:
    """Return the bytes that each part of a run takes on all ranks together, and on each rank of the learner.

    Activations, caches, adapters and what is trained beside these are not counted.
    """
    mesh, (weights, gradients) = config.learner.mesh, config.learner.copies
    reference = config.counts["reference"] * config.learner_of("reference").copies[0]
    trained = 0 if config.learner.lora else parameters
    learner = {
        "learner weights": parameters * TRAINED_BYTES * weights,
        "learner gradients": trained * TRAINED_BYTES * gradients,
        "optimiser moments": int(2 * trained * config.learner.optimizer.moment_bytes) * mesh.replicate,
    }
    estimate = {
        **learner,
        "reference weights": parameters * TRAINED_BYTES * reference,
        **_memory_of_critics_and_teachers(parameters, config),
        "engine weights": sum(parameters * DTYPE_BYTES.get(engine.dtype, 4) for engine in config.engine.engine_kinds),
        "weights in transit": trained * DTYPE_BYTES.get(config.weights_dtype, TRAINED_BYTES),
    }
    each = {"each learner rank": sum(learner.values()) // mesh.world} if mesh.world > 1 else {}
    return {**estimate, "all": sum(estimate.values()), **each}


def _memory_of_critics_and_teachers(parameters: int, config: RunConfig) -> dict[str, int]:
    """Return the bytes of critics (weights, gradients, moments) and of teachers."""
    found, critic = {}, config.critic
    if critic is not None:
        own = (count_parameters(critic.path) if critic.path else None) or parameters
        weights, gradients = config.learner_of("critic").copies
        found["critics"] = weights * own * TRAINED_BYTES * critic.count
        if config.learner.lora is None:
            moments = 2 * critic.optimizer.moment_bytes * config.learner_of("critic").mesh.replicate
            found["critics"] += int((gradients * TRAINED_BYTES + moments) * own) * critic.count
    if config.teachers:
        weights = TRAINED_BYTES * config.learner_of("teacher").copies[0]
        found["teachers"] = sum((count_parameters(each.path) or parameters) * weights for each in config.teachers)
    return found

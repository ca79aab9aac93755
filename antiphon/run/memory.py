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
    *, hidden: int, queries: int, keys: int, feed_forward: int, copies: int = 0, ranks: int = 1
) -> int:
    """Return the numbers that a decoder layer keeps of each token until the backward pass.

    8 H + (2 Q + 2 K + 4 F) / t with H hidden, Q of all queries, K of all keys, F feed-forward columns that a token passes and t
    ranks of `tensor`, after Korthikanti et al. 2022 (arXiv 2205.05198) for gated layers, norms in float32 and attention that
    keeps no scores. A mixture of experts also keeps `copies` of the token.
    """
    return 8 * hidden + (2 * queries + 2 * keys + 4 * feed_forward + copies) // ranks


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

    Activations, caches and adapters are not counted.
    """
    mesh, (weights, gradients) = config.learner.mesh, config.learner.copies
    reference = config.counts["reference"] * config.learner_of("reference").copies[0]
    trained = 0 if config.learner.lora else parameters
    learner = {
        "learner weights": parameters * TRAINED_BYTES * weights,
        "learner gradients": trained * TRAINED_BYTES * gradients,
        "optimiser moments": 2 * trained * TRAINED_BYTES * mesh.replicate,
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
        trained = 0 if config.learner.lora else gradients + 2 * config.learner_of("critic").mesh.replicate
        found["critics"] = (weights + trained) * own * TRAINED_BYTES * critic.count
    if config.teachers:
        weights = TRAINED_BYTES * config.learner_of("teacher").copies[0]
        found["teachers"] = sum((count_parameters(each.path) or parameters) * weights for each in config.teachers)
    return found

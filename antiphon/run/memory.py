"""Estimates of the memory that a run needs."""

from antiphon.run.config import RunConfig
from antiphon.run.model_files import count_parameters

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}

TRAINED_BYTES = 4  # of a trained parameter, of its gradient and of each moment, whatever the compute type


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
        "weights in transit": trained * TRAINED_BYTES,
    }
    each = {"each learner rank": sum(learner.values()) // mesh.world} if mesh.world > 1 else {}
    return {**estimate, "all": sum(estimate.values()), **each}


def _memory_of_critics_and_teachers(parameters: int, config: RunConfig) -> dict[str, int]:
    """Return the bytes of critics (weights, gradients, moments) and of teachers."""
    found, critic = {}, config.critic
    if critic is not None:
        own = (count_parameters(critic.path) if critic.path else None) or parameters
        size = TRAINED_BYTES * config.learner_of("critic").mesh.replicate
        found["critics"] = (1 if config.learner.lora else 4) * own * size * critic.count
    if config.teachers:
        weights = TRAINED_BYTES * config.learner_of("teacher").copies[0]
        found["teachers"] = sum((count_parameters(each.path) or parameters) * weights for each in config.teachers)
    return found

"""Options of the DeepSpeed and Megatron learners, and what these cannot train. Importing it imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from antiphon.core.config import Config
from antiphon.learning.mesh_config import MeshConfig, count_experts


class DeepSpeedOptions(Config):
    """`learner.options` of `deepspeed`."""

    stage: Literal[1, 2, 3] = 2
    """Stage of ZeRO: the optimiser state is cut among the ranks of `mesh.shard`, the gradients too, or all parameters too."""


class MegatronOptions(Config):
    """`learner.options` of `megatron`."""

    distributed_optimizer: bool = True
    """Cut the optimiser state among the ranks that have the same parameters."""


MEGATRON_MODELS = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


MEGATRON_POSITIONS = ("default", "linear", "llama3")


def megatron_incompatibilities(shape: Mapping[str, Any], mesh: MeshConfig) -> Iterator[tuple[str, str]]:
    """Why the megatron learner cannot have a model, as its config.json has it: (key, message)."""
    kind, rope = shape.get("model_type"), shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    positions = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in MEGATRON_MODELS:
        yield "kind", f"megatron has the models {', '.join(MEGATRON_MODELS)}, and this is a {kind}; torch has it"
    if positions not in MEGATRON_POSITIONS:
        yield (
            "kind",
            f"megatron has rotary positions {', '.join(MEGATRON_POSITIONS)}, and these are {positions}; torch has it",
        )
    if (act := shape.get("hidden_act", "silu")) != "silu":
        yield "kind", f"megatron has feed-forward blocks gated by silu, and these are by {act}; torch has it"
    if mesh.tensor > 1 and count_experts(shape):
        yield (
            "mesh.tensor",
            "the megatron learner does not divide a mixture of experts so; mesh.expert and mesh.pipeline do",
        )

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


MEGATRON_VERSION = "0.16.1"
MEGATRON_SIGMOID_ROUTERS = ("deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite")
MEGATRON_MODELS = tuple(
    sorted(
        (
            *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
            *("deepseek_v2", "ernie4_5", "gemma", "seed_oss", "smollm3"),
            *MEGATRON_SIGMOID_ROUTERS,
        )
    )
)
MEGATRON_POSITIONS = ("default", "linear", "llama3")
MEGATRON_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


def megatron_incompatibilities(shape: Mapping[str, Any], mesh: MeshConfig) -> Iterator[tuple[str, str]]:
    """Why the megatron learner cannot have a model, as its config.json has it: (key, message)."""
    kind, rope = shape.get("model_type"), shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    positions = rope.get("rope_type") or rope.get("type") or "default"
    own = f"the megatron learner (Megatron-Core {MEGATRON_VERSION})"
    if kind not in MEGATRON_MODELS:
        yield "kind", f"{own} has the models {', '.join(MEGATRON_MODELS)}, and this is a {kind}; torch has it"
    known = (*MEGATRON_POSITIONS, *(("yarn",) if shape.get("kv_lora_rank") else ()))
    if positions not in known:
        yield "kind", f"{own} has rotary positions {', '.join(known)}, and these are {positions}; torch has it"
    if (act := shape.get("hidden_act", "silu")) not in MEGATRON_ACTIVATIONS:
        gates = ", ".join(MEGATRON_ACTIVATIONS)
        yield "kind", f"{own} has feed-forward blocks gated by {gates}, and these are by {act}; torch has it"
    yield from (("kind", f"{own} {message}; torch has it") for message in _unlike_routing(shape))
    if mesh.tensor > 1 and count_experts(shape):
        yield (
            "mesh.tensor",
            "the megatron learner does not divide a mixture of experts so; mesh.expert and mesh.pipeline do",
        )


def _unlike_routing(shape: Mapping[str, Any]) -> Iterator[str]:
    """Yield how experts are chosen, or positions laid out, as Megatron-Core cannot."""
    taken, sigmoid = shape.get("num_experts_per_tok") or 1, shape.get("model_type") in MEGATRON_SIGMOID_ROUTERS
    if sigmoid and not (shape.get("norm_topk_prob", True) and taken > 1):
        yield "divides the scores of several experts by their sum, and this model's are not (norm_topk_prob)"
    groups, of_groups = shape.get("n_group") or 1, shape.get("topk_group") or 1
    judged = 2 if sigmoid else 1  # experts by which a group is judged
    if groups > 1 and shape.get("topk_method") != "greedy" and taken // of_groups != judged:
        yield (
            f"judges a group of experts by its {taken // of_groups} best, num_experts_per_tok // topk_group, and this "
            f"model by {judged}"
        )
    if shape.get("kv_lora_rank") and not shape.get("rope_interleave", True):
        yield "has multi-latent attention with rope_interleave only"

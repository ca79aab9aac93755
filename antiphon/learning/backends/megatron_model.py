"""The settings of Megatron-Core's model for the configuration of a Hugging Face decoder. Imports no megatron."""

import re
from typing import Any

import torch
import torch.nn.functional as F

from antiphon.learning.backends.megatron_names import head_size
from antiphon.learning.config import LearnerConfig
from antiphon.learning.mesh_config import count_experts

_ROUTER = re.compile(r"model\.layers\.(\d+)\.mlp\.gate\.weight")


def transformer_settings(shape: Any, names: set[str], config: LearnerConfig) -> dict[str, Any]:
    """Return the arguments of Megatron's `TransformerConfig`.

    Args:
        shape: Configuration of the model.
        names: Names of its parameters in Hugging Face's model.
        config: Mesh of the learner, and what saves memory.
    """
    mesh, layers, with_experts = config.mesh, shape.num_hidden_layers, sparse_layers(names)
    sparse = [int(layer in with_experts) for layer in range(layers)]
    return dict(
        num_layers=layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=head_size(shape),
        ffn_hidden_size=shape.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        qk_layernorm="model.layers.0.self_attn.q_norm.weight" in names,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        perform_initialization=False,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        context_parallel_size=mesh.context,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,  # gradients are sums
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **(_mixture(shape, sparse, mesh.expert) if any(sparse) else {}),
        **(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            if config.gradient_checkpointing
            else {}
        ),
    )


def _mixture(shape: Any, sparse: list[int], ranks: int) -> dict[str, Any]:
    shared = getattr(shape, "shared_expert_intermediate_size", None)
    return {
        "num_moe_experts": count_experts(shape.to_dict()),
        "moe_layer_freq": sparse,
        "moe_ffn_hidden_size": getattr(shape, "moe_intermediate_size", shape.intermediate_size),
        "moe_router_topk": shape.num_experts_per_tok,
        # Without it, the weights of the chosen experts add up to 1, as those of Mixtral always do.
        "moe_router_pre_softmax": not getattr(shape, "norm_topk_prob", True),
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": shared is not None,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": ranks,
    }


def sparse_layers(names: set[str]) -> list[int]:
    """Return the numbers of the layers with experts, from the names of a Hugging Face model's parameters."""
    return sorted(int(found[1]) for name in names if (found := _ROUTER.fullmatch(name)))


def attention_windows(shape: Any) -> list[int | None]:
    """Return the number of tokens that each layer looks back, [layers]; None if to the beginning."""
    window, layers = getattr(shape, "sliding_window", None), shape.num_hidden_layers
    kinds = getattr(shape, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]

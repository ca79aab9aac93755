"""The settings of Megatron-Core's model for the configuration of a Hugging Face decoder. Imports no megatron."""

import re
from typing import Any

import torch
from transformers.activations import ACT2FN

from antiphon.learning.backend_options import MEGATRON_SIGMOID_ROUTERS
from antiphon.learning.backends.megatron_names import head_size, is_latent
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
        qk_layernorm="model.layers.0.self_attn.q_norm.weight" in names or is_latent(shape),
        rotary_interleaved=has_interleaved_positions(shape),
        no_rope_freq=[1 - rotates for rotates in getattr(shape, "no_rope_layers", None) or ()] or None,
        gated_linear_unit=True,
        activation_func=ACT2FN[shape.hidden_act],
        add_bias_linear=False,
        add_qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        perform_initialization=False,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        context_parallel_size=mesh.context,
        virtual_pipeline_model_parallel_size=mesh.pipeline_chunks if mesh.pipeline_chunks > 1 else None,
        pipeline_dtype=torch.float32,
        # What ranks of an interleaved pipeline of two send each other at once would come in another order in a batch.
        overlap_p2p_comm=mesh.pipeline_chunks > 1,
        batch_p2p_comm=mesh.pipeline_chunks == 1,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,  # gradients are sums
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **(_latent(shape) if is_latent(shape) else {}),
        **(_mixture(shape, names, sparse, mesh.expert) if any(sparse) else {}),
        **(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            if config.gradient_checkpointing
            else {}
        ),
    )


def has_interleaved_positions(shape: Any) -> bool:
    """Return True if neighbouring dimensions of a head are rotated together, and not those of its two halves."""
    return bool(shape.model_type == "ernie4_5")  # multi-latent attention lays them out itself


def _latent(shape: Any) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_head_dim": shape.qk_nope_head_dim,
        "qk_pos_emb_head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "rope_type": "rope",  # whatever it is: see `LatentPositions`
    }


def _mixture(shape: Any, names: set[str], sparse: list[int], ranks: int) -> dict[str, Any]:
    width = getattr(shape, "moe_intermediate_size", shape.intermediate_size)
    alone = width * (getattr(shape, "n_shared_experts", None) or 0)  # without a gate
    divided = getattr(shape, "norm_topk_prob", True) and shape.model_type != "deepseek_v2"  # which does not read it
    sigmoid = shape.model_type in MEGATRON_SIGMOID_ROUTERS
    groups = getattr(shape, "n_group", None) or 1 if getattr(shape, "topk_method", "") != "greedy" else 1
    return {
        "num_moe_experts": count_experts(shape.to_dict()),
        "moe_layer_freq": sparse,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": shape.num_experts_per_tok,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_bias_update_rate": 0.0,  # it stays what it was
        # Without it, the weights of the chosen experts add up to 1, as those of Mixtral always do.
        "moe_router_pre_softmax": not sigmoid and not divided,
        "moe_router_topk_scaling_factor": getattr(shape, "routed_scaling_factor", None),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": shape.topk_group if groups > 1 else None,
        "moe_shared_expert_intermediate_size": getattr(shape, "shared_expert_intermediate_size", alone) or None,
        "moe_shared_expert_gate": any(".shared_expert_gate." in name for name in names),
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

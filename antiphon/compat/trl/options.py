"""The fields of TRL's GRPOConfig: those that are mapped to keys, those that change nothing here, and those that are refused."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Mapped(NamedTuple):
    """A field that has a counterpart: TRL's default, and the keys that it sets."""

    default: Any
    counterpart: str


MAPPED: Mapping[str, Mapped] = {
    "output_dir": Mapped(None, "`record.directory` and `name`; by default `trainer_output`"),
    "per_device_train_batch_size": Mapped(8, "with the next two: `rollout.groups_per_step`"),
    "gradient_accumulation_steps": Mapped(
        1, "see `per_device_train_batch_size`; micro-batches are `learner.tokens_per_pack`"
    ),
    "num_generations": Mapped(8, "`rollout.group_size`"),
    "generation_batch_size": Mapped(
        None, "`rollout.groups_per_step` · `rollout.group_size`, and `learner.minibatches`"
    ),
    "steps_per_generation": Mapped(None, "as `generation_batch_size`, in micro-batches"),
    "num_iterations": Mapped(1, "`learner.epochs`"),
    "num_train_epochs": Mapped(3.0, "`steps`, with the number of prompts"),
    "max_steps": Mapped(-1, "`steps`, with the optimizer steps of each (`learner.minibatches`, `learner.epochs`)"),
    "learning_rate": Mapped(1e-6, "`learner.optimizer.learning_rate`"),
    "lr_scheduler_type": Mapped(
        "linear", "`learner.optimizer.schedule`: `linear`, `cosine`, `constant`, `constant_with_warmup`"
    ),
    "warmup_steps": Mapped(
        0, "`learner.optimizer.warmup_steps`; below 1 it is a share of all steps; with `constant` it is 0"
    ),
    "weight_decay": Mapped(0.0, "`learner.optimizer.weight_decay`"),
    "adam_beta1": Mapped(0.9, "`learner.optimizer.betas`"),
    "adam_beta2": Mapped(0.999, "`learner.optimizer.betas`"),
    "adam_epsilon": Mapped(1e-8, "`learner.optimizer.eps`"),
    "max_grad_norm": Mapped(1.0, "`learner.optimizer.max_grad_norm`"),
    "bf16": Mapped(None, "`learner.dtype`: true is `bfloat16`, anything else `float32`"),
    "optim": Mapped("adamw_torch_fused", "AdamW; other optimizers are refused"),
    "gradient_checkpointing": Mapped(True, "`learner.gradient_checkpointing`"),
    "use_cpu": Mapped(False, "`learner.device: cpu`"),
    "seed": Mapped(42, "`seed`"),
    "max_completion_length": Mapped(512, "`rollout.sampling.max_tokens`"),
    "temperature": Mapped(1.0, "`rollout.sampling.temperature`"),
    "top_p": Mapped(1.0, "`rollout.sampling.top_p`; needs `top_k`"),
    "top_k": Mapped(0, "`rollout.sampling.top_k`"),
    "min_p": Mapped(None, "`rollout.sampling.min_p`; needs `top_k`"),
    "shuffle_dataset": Mapped(True, "`tasks.0.prompts.shuffle`"),
    "beta": Mapped(0.0, "`algorithm.kl.coefficient`; needs `use_bias_correction_kl=False`"),
    "use_bias_correction_kl": Mapped(True, "only `False` with `beta`: the divergence is k3 without importance weights"),
    "epsilon": Mapped(0.2, "`algorithm.clip_low`"),
    "epsilon_high": Mapped(None, "`algorithm.clip_high`; with `cispo`, 1 + `clip_high`"),
    "delta": Mapped(None, "`algorithm.dual_clip`"),
    "importance_sampling_level": Mapped("token", "`algorithm.ratio_level`"),
    "reward_weights": Mapped(None, "weights of the parts of the reward"),
    "scale_rewards": Mapped(
        "group", "`algorithm.advantage`: `group` is `grpo`, `none` is `dr_grpo`, `batch` is `lite_ppo`"
    ),
    "loss_type": Mapped(
        "dapo",
        "`algorithm.loss` and `algorithm.aggregation`: `grpo` is `sequence_mean_token_mean`, `dapo`, `bnpo` are `token_mean`, "
        "`dr_grpo` is `sequence_mean_token_sum_norm`, `cispo` is the loss `cispo`; others are refused",
    ),
    "mask_truncated_completions": Mapped(False, "`algorithm.weight.mask_truncated`"),
    "entropy_coef": Mapped(0.0, "`algorithm.entropy_coefficient`"),
    "use_vllm": Mapped(False, "`engine.kind: vllm`; otherwise `native`"),
    "eval_strategy": Mapped(
        "no", "with `eval_steps`: `evaluation.every`; `no` evaluates before and after, if there is data"
    ),
    "eval_steps": Mapped(None, "`evaluation.every`"),
    "save_strategy": Mapped("steps", "with `save_steps`: `checkpoint.every`; `no` writes only the last one"),
    "save_steps": Mapped(500, "`checkpoint.every`"),
    "save_total_limit": Mapped(None, "`checkpoint.keep_last`; by default 2"),
    "report_to": Mapped("none", "`record.trackers`"),
    "disable_tqdm": Mapped(None, "`record.live: off`"),
    "resume_from_checkpoint": Mapped(None, "`--resume`: from the run's newest checkpoint"),
}

_MEMORY = "speed or memory of TRL's training loop; sequences are packed here, not padded"
_LOGS = "logging: every step is recorded, with all completions"
_DATA = "loading of data; prompts are read once"
_EVALUATION = "a setting of TRL's evaluation; use the section `evaluation`"
_CHECKPOINTS = "files of TRL's checkpoints; here each is whole, with the model in Hugging Face's format"
_VLLM = "settings of vLLM in TRL; here `engine.options` are those of its EngineArgs, and weights go through `weights.channel`"
_CORRECTION = (
    "importance weights for what an engine rounds otherwise are `algorithm.correction`, which is off by default"
)
_ARGUMENTS = "is read by scripts, not by the trainer"
_NOT_SET = "has an effect in TRL only with another field, which is refused"

NO_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "torch_compile_backend",
            "torch_compile_mode",
            "torch_compile",
            "torch_empty_cache_steps",
            "tf32",
            "use_cache",
        ),
        _MEMORY,
    ),
    **dict.fromkeys(("activation_checkpointing", "activation_checkpointing_kwargs"), _MEMORY),
    **dict.fromkeys(("gradient_checkpointing_kwargs", "pad_to_multiple_of", "cache_implementation"), _MEMORY),
    **dict.fromkeys(("use_transformers_continuous_batching", "transformers_continuous_batching_config"), _MEMORY),
    **dict.fromkeys(("use_transformers_paged", "ds3_gather_for_generation", "average_tokens_across_devices"), _MEMORY),
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), _MEMORY),
    **dict.fromkeys(("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node"), _LOGS),
    **dict.fromkeys(
        ("logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level", "log_level_replica"), _LOGS
    ),
    **dict.fromkeys(("log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts"), _LOGS),
    **dict.fromkeys(("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _LOGS),
    **dict.fromkeys(("skip_memory_metrics", "debug", "log_completions_hub_repo"), _LOGS),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"), _DATA),
    **dict.fromkeys(("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"), _DATA),
    **dict.fromkeys(("dataloader_drop_last", "remove_unused_columns", "label_names", "length_column_name"), _DATA),
    **dict.fromkeys(("data_seed", "ignore_data_skip"), _DATA),
    **dict.fromkeys(("eval_delay", "per_device_eval_batch_size", "prediction_loss_only", "eval_on_start"), _EVALUATION),
    **dict.fromkeys(("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"), _EVALUATION),
    **dict.fromkeys(("include_for_metrics", "batch_eval_metrics", "num_generations_eval"), _EVALUATION),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), _EVALUATION),
    **dict.fromkeys(("save_only_model", "save_on_each_node", "enable_jit_checkpoint"), _CHECKPOINTS),
    **dict.fromkeys(("restore_callback_states_from_checkpoint", "hub_revision", "hub_strategy"), _CHECKPOINTS),
    **dict.fromkeys(("hub_always_push", "hub_token", "hub_private_repo", "hub_model_id"), _CHECKPOINTS),
    **dict.fromkeys(("vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_base_url"), _VLLM),
    **dict.fromkeys(("vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"), _VLLM),
    **dict.fromkeys(("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"), _VLLM),
    **dict.fromkeys(("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"), _CORRECTION),
    **dict.fromkeys(("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"), _CORRECTION),
    **dict.fromkeys(("vllm_importance_sampling_cap",), _CORRECTION),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "local_rank"), _ARGUMENTS),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps", "max_tool_calling_iterations"), _NOT_SET),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos"), _NOT_SET),
    **dict.fromkeys(("vespo_k_neg", "vespo_lambda_neg", "entropy_coef_min", "entropy_coef_max"), _NOT_SET),
    **dict.fromkeys(("entropy_coef_delta", "entropy_target", "metric_for_best_model", "greater_is_better"), _NOT_SET),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), _NOT_SET),
    **dict.fromkeys(("ddp_static_graph", "ddp_backend", "ddp_timeout"), _NOT_SET),
}

_MESH = "several devices are `learner.mesh` and `placement`"
_OPTIMIZER = "the optimizer is AdamW; `learner.kind` names a learner of your own"

REFUSED: Mapping[str, str] = {
    "lr_scheduler_kwargs": "use the keys of `learner.optimizer`",
    **dict.fromkeys(("optim_args", "optim_target_modules"), _OPTIMIZER),
    "label_smoothing_factor": "it changes the likelihood that is trained on",
    "fp16": "computation is in `float32` or `bfloat16` (`learner.dtype`)",
    "neftune_noise_alpha": "noise in embeddings would make log-probs differ from those of the engines",
    "auto_find_batch_size": "micro-batches are sized by the available memory",
    "full_determinism": "use `rollout.deterministic`",
    "accelerator_config": _MESH,
    "parallelism_config": _MESH,
    "fsdp": _MESH,
    "fsdp_config": _MESH,
    "deepspeed": "use `learner.kind: deepspeed`",
    "train_sampling_strategy": "prompts are shuffled, or not: `shuffle_dataset`",
    "push_to_hub": "nothing is sent anywhere; `antiphon export` copies the trained model",
    "load_best_model_at_end": "`checkpoint.keep_every` keeps checkpoints, and `antiphon eval` compares them",
    "model_init_kwargs": "give `model` as an object, loaded as you wish",
    "trust_remote_code": "only models of transformers are loaded",
    "router_aux_loss_coef": "use `algorithm.expert_balance`",
    "disable_dropout": "dropout is never active",
    "cast_lm_head_to_fp32": "the head is multiplied in the precision of `learner.dtype`, and all after it is in `float32`",
    "generation_kwargs": "`rollout.sampling` has the parameters of sampling",
    "chat_template_kwargs": "change the tokenizer's chat template",
    "repetition_penalty": "it samples from another distribution than the one that is trained",
    "vllm_structured_outputs_regex": "it samples from another distribution than the one that is trained",
    "multi_objective_aggregation": "rewards are summed and then normalized",
    "sync_ref_model": "the reference is the model that the run began with",
    "top_entropy_quantile": "use `algorithm.rhythm`, or a stage of your own that sets weights",
    "use_adaptive_entropy": "`algorithm.entropy_coefficient` is constant",
    "off_policy_mask_threshold": "use `algorithm.correction`, or `rollout.async_ratio`, which bounds the age of samples",
}

# Fields of earlier releases of TRL, which its scripts still set.
FORMER: Mapping[str, str] = {
    "max_prompt_length": "`engine.max_length` bounds prompt and completion together",
    "warmup_ratio": "`warmup_steps` below 1 is a share of all steps",
    "logging_dir": "trackers write into the run's directory",
    "overwrite_output_dir": "a run in `output_dir` is replaced, unless it is resumed",
    "save_safetensors": "checkpoints are safetensors always",
    "evaluation_strategy": "it is `eval_strategy` now",
}


def render_table() -> str:
    """Return the table of all fields for `docs/from_trl.md`."""
    rows = [(name, "mapped", option.counterpart) for name, option in MAPPED.items()]
    rows += [(name, "no effect", reason) for name, reason in NO_EFFECT.items()]
    rows += [(name, "refused", reason) for name, reason in REFUSED.items()]
    lines = [f"| `{name}` | {status} | {text} |" for name, status, text in rows]
    return "\n".join(["| field | here | counterpart, or reason |", "|---|---|---|", *lines])

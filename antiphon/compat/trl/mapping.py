"""From the fields of TRL's GRPOConfig to the keys of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.compat.trl.config import MAIN
from antiphon.core.errors import ConfigError

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
ADVANTAGES = {"group": "grpo", True: "grpo", "none": "dr_grpo", False: "dr_grpo", "batch": "lite_ppo"}
AGGREGATIONS = {
    "grpo": "sequence_mean_token_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "sequence_mean_token_sum_norm",
    "cispo": "token_mean",
}
DEFAULT_OUTPUT = "trainer_output"


class Sizes:
    """Batch sizes of TRL in the terms of a run.

    Attributes:
        groups: Groups per training step.
        updates: Optimizer steps per training step in one pass.
        passes: Passes over the groups of a training step.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Compute them; `ConfigError` if they do not divide as TRL demands."""
        micro, accumulated = fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]
        for name, value in (("per_device_train_batch_size", micro), ("gradient_accumulation_steps", accumulated)):
            if value < 1:
                refuse(name, value, "must be 1 or more")
        size, steps = fields["generation_batch_size"], fields["steps_per_generation"]
        if size is not None and steps is not None:
            refuse("steps_per_generation", steps, "cannot be set beside generation_batch_size")
        if size is None:
            size = micro * (steps or accumulated)
        group = fields["num_generations"]
        if group < 2:
            refuse("num_generations", group, "must be 2 or more, to compare siblings")
        for name, divisor in (("num_generations", group), ("per_device_train_batch_size", micro)):
            if size % divisor:
                refuse("generation_batch_size", size, f"must be a multiple of {name} = {divisor}")
        if size // micro % accumulated:
            message = f"must divide the {size // micro} micro-batches of a generation batch of {size}"
            refuse("gradient_accumulation_steps", accumulated, message)
        self.groups, self.updates, self.passes = size // group, size // micro // accumulated, fields["num_iterations"]

    def steps(self, fields: Mapping[str, Any], prompts: int) -> int:
        """Return the training steps for `max_steps` optimizer steps, or for `num_train_epochs` of this many prompts."""
        if fields["max_steps"] > 0:
            return -(-fields["max_steps"] // (self.updates * self.passes))
        steps = int(fields["num_train_epochs"] * (prompts // self.groups))
        if not steps:
            message = f"{prompts} prompts are too few for a step, which takes {self.groups}"
            refuse("num_train_epochs", fields["num_train_epochs"], message)
        return steps


def map_fields(fields: Mapping[str, Any], prompts: int) -> dict[str, Any]:
    """Return the configuration of a run, but for its model and task.

    Args:
        fields: All mapped fields.
        prompts: Number of prompts for training.

    Raises:
        ConfigError: A value has no counterpart.
    """
    if not str(fields["optim"]).startswith("adamw"):
        refuse("optim", fields["optim"], "must be AdamW; `learner.kind` names a learner of your own")
    sizes = Sizes(fields)
    steps = sizes.steps(fields, prompts)
    output = Path(fields["output_dir"] or DEFAULT_OUTPUT).expanduser()
    trackers = fields["report_to"] if isinstance(fields["report_to"], list | tuple) else [fields["report_to"]]
    return {
        "name": output.name,
        "seed": fields["seed"],
        "steps": steps,
        "rollout": {
            "groups_per_step": sizes.groups,
            "group_size": fields["num_generations"],
            "async_ratio": 0.0,  # as TRL; a change of this key alone makes the run asynchronous
            "sampling": {
                "max_tokens": fields["max_completion_length"],
                "temperature": float(fields["temperature"]),
                "top_p": float(fields["top_p"]),
                "top_k": max(fields["top_k"] or 0, 0),  # -1 is vLLM's word for none
                "min_p": float(fields["min_p"] or 0.0),
            },
        },
        "algorithm": _map_algorithm(fields),
        "learner": {
            "minibatches": sizes.updates,
            "epochs": sizes.passes,
            "dtype": "bfloat16" if fields["bf16"] else "float32",
            "gradient_checkpointing": bool(fields["gradient_checkpointing"]),
            "device": "cpu" if fields["use_cpu"] else "auto",
            "optimizer": _map_optimizer(fields, steps * sizes.updates * sizes.passes),
        },
        "engine": {"kind": "vllm" if fields["use_vllm"] else "native"},
        "check": {"prompts": 0},  # a trainer of TRL starts with any reward, such as one of the length alone
        "evaluation": {"every": _every(fields, "eval", sizes)},
        "checkpoint": {"every": _every(fields, "save", sizes), "keep_last": fields["save_total_limit"] or 2},
        "record": {
            "directory": str(output.parent),
            "trackers": [name for name in trackers if name not in (None, "none")],
            "live": "off" if fields["disable_tqdm"] else "auto",
        },
    }


def _map_algorithm(fields: Mapping[str, Any]) -> dict[str, Any]:
    loss, low = choose(fields, "loss_type", AGGREGATIONS), fields["epsilon"]
    high = low if fields["epsilon_high"] is None else fields["epsilon_high"]
    is_cispo = fields["loss_type"] == "cispo"
    if is_cispo and high < 1:
        refuse(
            "epsilon_high", high, "must be 1 or more with cispo, where it is the largest importance weight, such as 5.0"
        )
    if fields["beta"] and fields["use_bias_correction_kl"]:
        refuse("use_bias_correction_kl", True, "must be False with beta: the divergence has no importance weights here")
    level = choose(fields, "importance_sampling_level", {"token": "token", "sequence": "sequence"})
    return {
        "loss": "cispo" if is_cispo else "ppo_clip",
        "advantage": choose(fields, "scale_rewards", ADVANTAGES),
        "aggregation": loss,
        "clip_low": 1.0 if is_cispo else float(low),
        "clip_high": float(high - 1 if is_cispo else high),
        "dual_clip": float(fields["delta"] or 0.0),
        "ratio_level": level,
        "kl": {"coefficient": float(fields["beta"])},
        "weight": {"mask_truncated": bool(fields["mask_truncated_completions"])},
        "entropy_coefficient": float(fields["entropy_coef"]),
    }


def _map_optimizer(fields: Mapping[str, Any], updates: int) -> dict[str, Any]:
    # The schedule `constant` of transformers has no warm-up.
    warmup = 0 if fields["lr_scheduler_type"] == "constant" else fields["warmup_steps"]
    return {
        "learning_rate": float(fields["learning_rate"]),
        "schedule": choose(fields, "lr_scheduler_type", SCHEDULES),
        "warmup_steps": int(-(-warmup * updates // 1)) if 0 < warmup < 1 else int(warmup),
        "betas": [float(fields["adam_beta1"]), float(fields["adam_beta2"])],
        "eps": float(fields["adam_epsilon"]),
        "weight_decay": float(fields["weight_decay"]),
        "max_grad_norm": float(fields["max_grad_norm"] or "inf"),  # 0 and None: gradients are not clipped
    }


def _every(fields: Mapping[str, Any], what: str, sizes: Sizes) -> int:
    """Return the training steps between evaluations or checkpoints, from optimizer steps; 0 for none."""
    strategy, steps = fields[f"{what}_strategy"], fields[f"{what}_steps"]
    if choose(fields, f"{what}_strategy", {"no": False, "steps": True}) is False:
        return 0
    if not steps or steps < 1:
        refuse(f"{what}_steps", steps, f"must be a number of steps with {what}_strategy={strategy!r}")
    return max(1, int(steps) // (sizes.updates * sizes.passes))


def choose(fields: Mapping[str, Any], name: str, known: Mapping[Any, Any]) -> Any:
    """Return the counterpart of a field's value; `ConfigError` if it has none."""
    if fields[name] not in known:
        refuse(name, fields[name], "has no counterpart", valid=[str(each) for each in known])
    return known[fields[name]]


def refuse(name: str, value: Any, message: str, valid: list[str] | None = None) -> None:
    """Raise the `ConfigError` about a field's value."""
    listed = f"; valid are {', '.join(valid)}" if valid else ""
    raise ConfigError(f"{value!r} {message}{listed}", key=f"{MAIN}.{name}", value=value, valid=valid or ())

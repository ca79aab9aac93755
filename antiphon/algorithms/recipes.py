"""The algorithms of the field, by what each sets apart from the defaults of `AlgorithmConfig`. A recipe is a row; every key
of it can be given in the configuration as well, and then that holds."""

from collections.abc import Mapping
from typing import Any

RECIPES: Mapping[str, dict[str, Any]] = {
    # Shao et al. 2024, with all tokens of equal weight; the paper's is `aggregation: sequence_mean_token_mean`.
    "grpo": {"advantage": "grpo", "loss": "ppo_clip"},
    # Yu et al. 2025, section 3; dynamic sampling is `rollout.filter: spread`.
    "dapo": {"advantage": "grpo", "loss": "ppo_clip", "clip_high": 0.28, "mask_truncated": True},
    # Liu et al. 2025: no division by the deviation, none by the length.
    "dr_grpo": {"advantage": "dr_grpo", "loss": "ppo_clip", "aggregation": "sequence_mean_token_sum_norm"},
    # Ahmadian et al. 2024.
    "rloo": {"advantage": "rloo", "loss": "policy_gradient", "aggregation": "sequence_mean_token_sum"},
    # Zheng et al. 2025; bounds of its section on experiments.
    "gspo": {
        "advantage": "grpo",
        "loss": "ppo_clip",
        "ratio_level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean_token_mean",
    },
    # MiniMax 2025: only the upper bound counts; which is not published, so it is DAPO's.
    "cispo": {"advantage": "grpo", "loss": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    "tis": {"advantage": "grpo", "loss": "tis"},
    # Le Roux et al. 2025.
    "topr": {"advantage": "dr_grpo", "loss": "topr"},
    # Fu et al. 2025; its public code bounds the weight by 5.
    "decoupled_ppo": {"advantage": "grpo", "loss": "ppo_clip", "correction": {"level": "token", "high": 5.0}},
    # Kimi 2025.
    "kimi": {"advantage": "dr_grpo", "loss": "kimi", "kimi_tau": 0.1, "aggregation": "sequence_mean_token_sum"},
}

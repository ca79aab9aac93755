"""The algorithms of the field, by what each sets apart from the defaults of `AlgorithmConfig`.

A recipe is a row; every key of it can be given in the configuration as well, and then that holds.
"""

from collections.abc import Mapping
from typing import Any

RECIPES: Mapping[str, dict[str, Any]] = {
    # Shao et al. 2024, with all tokens of equal weight; the paper's is `aggregation: sequence_mean_token_mean`.
    "grpo": {"advantage": "grpo", "loss": "ppo_clip"},
    # Yu et al. 2025, section 3; dynamic sampling is `rollout.filter: spread`.
    "dapo": {"advantage": "grpo", "loss": "ppo_clip", "clip_high": 0.28, "weight": {"mask_truncated": True}},
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
    # Li et al. 2025, "Attention illuminates LLM reasoning"; `rhythm: {kind: local}` and `{kind: global}` are its other rules.
    "rhythm": {"advantage": "grpo", "loss": "ppo_clip", "rhythm": {"kind": "coupled"}},
    # Williams 1992; Hu 2025, whose penalty takes a reference: `kl: {place: reward, estimator: k1, coefficient: 0.01}`.
    "reinforce": {"advantage": "reinforce", "loss": "policy_gradient"},
    "reinforce++": {"advantage": "reinforce_plus_plus", "loss": "ppo_clip"},
    "reinforce++_baseline": {"advantage": "reinforce_plus_plus_baseline", "loss": "ppo_clip"},
    # Liu et al. 2025, "Tricks or traps".
    "lite_ppo": {"advantage": "lite_ppo", "loss": "ppo_clip"},
    # After RAFT (Dong et al. 2023): only what is better than its group, by how much.
    "raft": {"advantage": "dr_grpo", "loss": "topr", "negative_weight": 0.0},
    # Named in ROLL, where both weights are 1 until they are set; half for what was bad is ours.
    "weighted_topr": {"advantage": "dr_grpo", "loss": "topr", "positive_weight": 1.0, "negative_weight": 0.5},
    # Schulman et al. 2017, with a critic of the actor's kind; λ = 1 as verl and Open-Reasoner-Zero have it for language models.
    "ppo": {"advantage": "gae", "loss": "ppo_clip", "advantage_whiten": True},
    # Liu et al. 2025: `critic: {path: a smaller model, count: 2, disjoint: true, warmup_steps: 10}`. Shares of tokens are the
    # paper's; the weight of the entropy is not published.
    "asyppo": {
        "advantage": "gae",
        "loss": "ppo_clip",
        "clip_high": 0.28,
        "advantage_whiten": True,
        "agreement_mask": 0.2,
        "disagreement_mask": 0.2,
        "entropy_coefficient": 1e-3,
    },
    # Lu et al. 2025, "On-policy distillation": what the teachers say and nothing else; with `advantage: grpo` both.
    "opd": {"advantage": "nothing", "loss": "ppo_clip", "teacher_coefficient": 1.0},
    # Wang et al. 2025, "ROLL", for agents: turns are paid on their own.
    "step_reinforce": {"advantage": "step_reinforce", "loss": "ppo_clip", "turn_gamma": 0.95},
    # Feng et al. 2025.
    "gigpo": {"advantage": "gigpo", "loss": "ppo_clip", "turn_gamma": 0.95},
}

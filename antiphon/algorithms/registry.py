"""The built-in advantages and losses by name. Importing it imports no torch."""

from antiphon.registry import Registry

ADVANTAGES = Registry(
    "advantage",
    {"grpo": "antiphon.algorithms.advantages:grpo", "dr_grpo": "antiphon.algorithms.advantages:dr_grpo"},
)
LOSSES = Registry("loss", {"ppo_clip": "antiphon.algorithms.losses:ppo_clip", "sft": "antiphon.algorithms.losses:sft"})

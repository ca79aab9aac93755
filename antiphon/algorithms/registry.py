"""The built-in advantages and losses by name. Importing it imports no torch."""

from antiphon.core.registry import Registry

_ADVANTAGES = (
    "grpo dr_grpo rloo reinforce reinforce_plus_plus reinforce_plus_plus_baseline lite_ppo turn_reinforce step_reinforce gigpo "
    "gae"
)
_LOSSES = "ppo_clip policy_gradient tis topr cispo kimi sft"

ADVANTAGES = Registry(
    "advantage",
    {name: f"antiphon.algorithms.advantages:{name}" for name in _ADVANTAGES.split()}
    | {"nothing": "antiphon.algorithms.advantages:zero"},
)
LOSSES = Registry("loss", {name: f"antiphon.algorithms.losses:{name}" for name in _LOSSES.split()})

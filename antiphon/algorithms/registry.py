"""The built-in advantages and losses by name. Importing it imports no torch."""

from antiphon.algorithms.declarations import UNDECLARED, Declaration, declaration_of
from antiphon.core.registry import Registry

_ADVANTAGES = "grpo dr_grpo rloo reinforce reinforce_plus_plus reinforce_plus_plus_baseline lite_ppo gae"
_TURN_ADVANTAGES = "turn_reinforce step_reinforce gigpo"
_LOSSES = "ppo_clip policy_gradient tis topr cispo kimi sft"

ADVANTAGES = Registry(
    "advantage",
    {name: f"antiphon.algorithms.advantages:{name}" for name in _ADVANTAGES.split()}
    | {name: f"antiphon.algorithms.turn_advantages:{name}" for name in _TURN_ADVANTAGES.split()}
    | {"nothing": "antiphon.algorithms.advantages:zero"},
)
LOSSES = Registry("loss", {name: f"antiphon.algorithms.losses:{name}" for name in _LOSSES.split()})


def built_in_declaration(registry: Registry, name: str) -> Declaration:
    """Return what a built-in function declares, and the default for any other name.

    A user's function is not imported: reading a configuration must run no code that it names. What that function declares is
    read when its run starts.
    """
    return declaration_of(registry.resolve(name)) if name in registry.built_in else UNDECLARED

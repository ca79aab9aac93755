"""The built-in advantages, losses and streams by name. Importing it imports no torch.

The YAML names a function of your own as `package.module:function` in the same places.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from antiphon.algorithms.declarations import UNDECLARED, Declaration, declaration_of
from antiphon.core.errors import ConfigError
from antiphon.core.registry import Registry, bind_options
from antiphon.core.types import STREAMS, StreamSpec
from antiphon.core.user_errors import name_user_errors

if TYPE_CHECKING:
    from antiphon.algorithms.config import AlgorithmConfig

_ADVANTAGES = "grpo dr_grpo rloo reinforce reinforce_plus_plus reinforce_plus_plus_baseline lite_ppo gae"
_TURN_ADVANTAGES = "turn_reinforce step_reinforce gigpo"
_LOSSES = "ppo_clip policy_gradient tis topr cispo kimi sft"

ADVANTAGES = Registry(
    "advantage",
    {name: f"antiphon.algorithms.advantages:{name}" for name in _ADVANTAGES.split()}
    | {name: f"antiphon.algorithms.turn_advantages:{name}" for name in _TURN_ADVANTAGES.split()}
    | {"nothing": "antiphon.algorithms.advantages:zero"},
    callables=True,
)
LOSSES = Registry("loss", {name: f"antiphon.algorithms.losses:{name}" for name in _LOSSES.split()}, callables=True)
STREAM_SPECS = Registry("stream", {name: f"antiphon.core.types:{name.upper()}" for name in STREAMS})


def built_in_declaration(registry: Registry, name: str) -> Declaration:
    """Return what a built-in function declares, and the default for any other name.

    A user's function is not imported: reading a configuration must run no code that it names. What that function declares is
    read when its run starts (`run/config_checks/user_functions.py`).
    """
    return declaration_of(registry.resolve(name)) if name in registry.known else UNDECLARED


def resolve_loss(algorithm: "AlgorithmConfig") -> Any:
    """Import the loss function of an algorithm, and bind its options; `ConfigError` if it cannot be called with them."""
    return _resolve(LOSSES, algorithm.loss, algorithm.loss_options, "algorithm.loss")


def resolve_advantage(algorithm: "AlgorithmConfig") -> Any:
    """Import the advantage function of an algorithm as `resolve_loss` imports its loss."""
    return _resolve(ADVANTAGES, algorithm.advantage, algorithm.advantage_options, "algorithm.advantage")


def _resolve(registry: Registry, name: str, options: Mapping[str, Any], key: str) -> Any:
    function = registry.resolve(name, key)
    if name not in registry.shipped:
        function = name_user_errors(function, key, name)
    return bind_options(function, options, f"{key}_options")


def resolve_streams(algorithm: "AlgorithmConfig") -> list[StreamSpec]:
    """Import the streams that `algorithm.streams` names."""
    specs = []
    for index, name in enumerate(algorithm.streams):
        spec = STREAM_SPECS.resolve(name, f"algorithm.streams.{index}")
        if not isinstance(spec, StreamSpec):
            raise ConfigError(f"{name!r} is no StreamSpec, but {spec!r}", key=f"algorithm.streams.{index}", value=name)
        specs.append(spec)
    return specs

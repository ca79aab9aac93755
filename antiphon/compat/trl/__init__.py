"""TRL's GRPOTrainer and GRPOConfig, which train with Antiphon. `docs/from_trl.md` has both side by side.

    from antiphon.compat.trl import GRPOConfig, GRPOTrainer

TRL itself need not be installed; a `GRPOConfig` of TRL is taken as well.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.compat.trl.config import GRPOConfig
    from antiphon.compat.trl.trainer import GRPOTrainer, TrainOutput

_MODULES = {"GRPOConfig": "config", "GRPOTrainer": "trainer", "TrainOutput": "trainer"}

__all__ = ["GRPOConfig", "GRPOTrainer", "TrainOutput"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: importing a package imports no machinery."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value

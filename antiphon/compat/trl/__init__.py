"""TRL's GRPOTrainer and GRPOConfig, which train with Antiphon. `docs/from_trl.md` has both side by side.

    from antiphon.compat.trl import GRPOConfig, GRPOTrainer

TRL itself need not be installed; a `GRPOConfig` of TRL is taken as well.
"""

from antiphon.compat.trl.config import GRPOConfig
from antiphon.compat.trl.trainer import GRPOTrainer, TrainOutput

__all__ = ["GRPOConfig", "GRPOTrainer", "TrainOutput"]

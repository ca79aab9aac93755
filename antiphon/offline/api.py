"""The commands that train on fixed data, as functions for scripts and notebooks. `docs/offline.md` has their keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.offline import run
from antiphon.offline.config import DistillConfig, DpoConfig, OfflineConfig, RewardModelConfig
from antiphon.run.api import Result
from antiphon.run.compose import load_changed

Source = str | Path | Mapping[str, Any] | OfflineConfig


def dpo(config: Source | None = None, *, overwrite: bool = False, resume: bool = False, **changes: Any) -> Result:
    """Train a policy on preference pairs, as `antiphon dpo` does, and return when the run has ended.

    Args:
        config: A YAML file, a mapping with the same keys, or a `DpoConfig`.
        overwrite: Replace the run of this name, if there is one.
        resume: Go on with the run of this name from its newest checkpoint.
        changes: Values of keys. A mapping changes the keys that it has and leaves the others of the section.

    Raises:
        ConfigError: The configuration is wrong, or the run exists already.
        AntiphonError: Another error that ended the run.
    """
    found = load_changed(config, (), changes, model=DpoConfig)
    return Result.read(found.record.directory, found.name, run.dpo(found, overwrite=overwrite, resume=resume))


def reward_model(
    config: Source | None = None, *, overwrite: bool = False, resume: bool = False, **changes: Any
) -> Result:
    """Train a reward model on preference pairs, as `antiphon reward-model` does; arguments are those of `dpo`."""
    found = load_changed(config, (), changes, model=RewardModelConfig)
    return Result.read(found.record.directory, found.name, run.reward_model(found, overwrite=overwrite, resume=resume))


def distill(config: Source | None = None, *, overwrite: bool = False, resume: bool = False, **changes: Any) -> Result:
    """Train a student to match its teacher's tokens, as `antiphon distill` does; arguments are those of `dpo`."""
    found = load_changed(config, (), changes, model=DistillConfig)
    return Result.read(found.record.directory, found.name, run.distill(found, overwrite=overwrite, resume=resume))

"""Commands that train on fixed data: dpo, reward-model, distill."""

import typer

from antiphon.cli.arguments import ConfigPath, DryRun, Overrides, Overwrite, Resume
from antiphon.cli.configs import limit_threads, load_config, print_config, refuse_both, require_models
from antiphon.cli.errors import exit_on_error
from antiphon.cli.tables import print_derived


def dpo(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Train a policy on preference pairs with DPO or IPO."""
    _train_offline("DpoConfig", "dpo", config, overrides, dry_run, overwrite, resume)


def reward_model(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Train a reward model on preference pairs."""
    _train_offline("RewardModelConfig", "reward_model", config, overrides, dry_run, overwrite, resume)


def distill(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Train a student to match a teacher's token distributions on the reference responses of the prompts."""
    _train_offline("DistillConfig", "distill", config, overrides, dry_run, overwrite, resume)


def _train_offline(
    kind: str, function: str, path: str, overrides: list[str] | None, dry_run: bool, overwrite: bool, resume: bool
) -> None:
    """Run a function of `antiphon.offline.run` with a configuration of the class `kind`."""
    with exit_on_error():
        limit_threads()
        from antiphon.offline import config as offline_config

        config = load_config(path, overrides, getattr(offline_config, kind))
        refuse_both(overwrite, resume)
        if dry_run:
            print_config(config, path, overrides)
            print_derived(config.derived())
            return
        require_models(config.models)
        from antiphon.offline import run as offline

        raise typer.Exit(getattr(offline, function)(config, overwrite=overwrite, resume=resume))

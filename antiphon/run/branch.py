"""A run that begins at a checkpoint of another run, with a configuration that may differ in more than a resume allows."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from antiphon.algorithms.rewards import Moments, restore_algorithm_state
from antiphon.core.config import dump, load
from antiphon.core.errors import ConfigError, Mistake
from antiphon.record import safe_files
from antiphon.record.branch import begin_branch, find_checkpoint
from antiphon.record.run_dir import convert_write_errors
from antiphon.record.run_start import RunStart
from antiphon.run.compose import require_attached_objects
from antiphon.run.config import RunConfig
from antiphon.run.config_changes import list_changes
from antiphon.tasks.mixture import Mixture

# Keys that decide which weights a checkpoint has, or that only what came before it has read; with what is below them.
FIXED = {
    "model": "a checkpoint has the weights of this model alone",
    "learner.lora": "a checkpoint has the weights of these adapters alone",
    "critic.path": "a checkpoint has the weights of this critic alone",
    "critic.count": "a checkpoint has the weights of so many critics",
    "sft": "the warm start was before the checkpoint",
}


def default_overrides(source: Path, step: int) -> list[str]:
    """Return the changes of a run's configuration for a new run beside it, with `_at_STEP` appended to its name."""
    path = source.absolute()
    return [f"record.directory={json.dumps(str(path.parent))}", f"name={json.dumps(f'{path.name}_at_{step}')}"]


def prepare_branch(source: Path, step: int, config: RunConfig, *, overwrite: bool = False) -> None:
    """Lay out a run that begins at a checkpoint of another one, so that a resume begins it.

    Args:
        source: Directory of the other run, which is not changed.
        step: Step of the checkpoint.
        config: Configuration of the new run.
        overwrite: Replace the run of this name, if there is one.

    Raises:
        ConfigError: The step has no whole checkpoint, the configuration changes a key of `FIXED`, or the new run exists.
    """
    before = load(safe_files.resolve_file(source, "config.yaml"), model=RunConfig, bases=False)
    mistakes = [*_list_fixed(before, config)]
    if config.steps <= step:
        message = f"must be above {step}, the step of the checkpoint: it counts from the beginning of the other run"
        mistakes.append(Mistake("steps", message, config.steps))
    if mistakes:
        raise ConfigError.from_mistakes(mistakes)
    require_attached_objects(config, has_model=(source / "model").is_dir())
    mixture = Mixture.load(config.tasks, config.seed).state()
    point, state = find_checkpoint(source, step)
    path = Path(config.record.directory, config.name)
    if path.resolve() == source.resolve():
        raise ConfigError("is the other run; give the new one another name", key="name", value=config.name)
    start = RunStart(path.parent, path.name, overwrite=overwrite)
    with convert_write_errors(path), start, convert_write_errors(path):  # of the start, and of what it then undoes
        start.directory.write_config(dump(config))
        begin_branch(point, _adapt_state(state, before, config, mixture), start.directory)
        start.confirm()


def _list_fixed(before: RunConfig, config: RunConfig) -> Iterator[Mistake]:
    """Yield the changes that a branch may not make."""
    has_critics = before.critic is not None and config.critic is not None
    for key, was, value in list_changes(before, config):
        for fixed, reason in FIXED.items():
            if f"{key}.".startswith(f"{fixed}.") and (has_critics or not key.startswith("critic.")):
                yield Mistake(key, f"was {was!r} and is {value!r} now, which a branch may not change: {reason}", value)
    if config.critic and not before.critic:
        yield Mistake("critic", "is new, which a branch may not change: the checkpoint has no critic", config.critic)


def _adapt_state(
    state: dict[str, Any], before: RunConfig, config: RunConfig, mixture: dict[str, Any]
) -> dict[str, Any]:
    """Return a checkpoint's state without those parts that a changed configuration makes void.

    Args:
        state: State of the other run.
        before: Its configuration.
        config: The new configuration.
        mixture: State of the new configuration's prompts before the first draw.
    """
    scheduler, progress = dict(state["scheduler"]), dict(state["progress"])
    algorithm_state = restore_algorithm_state(state.get("controllers"))
    drawn = mixture["prompts"] == state["mixture"]["prompts"] and _data(before) == _data(config)
    if not drawn:
        scheduler |= {"live": [], "deferred": []}
    if before.tasks != config.tasks:
        algorithm_state.rewards = Moments()
    if before.algorithm.kl != config.algorithm.kl:
        algorithm_state.kl = None
    if _evaluation(before) != _evaluation(config):
        progress |= {"before": None, "measures": {}}
    return state | {
        "mixture": state["mixture"] if drawn else mixture,
        "scheduler": scheduler,
        "progress": progress,
        "controllers": asdict(algorithm_state),
    }


def _data(config: RunConfig) -> Any:
    """Return what the order of the prompts depends on."""
    return config.seed, [(task.name, task.weight, task.prompts, task.route, task.curriculum) for task in config.tasks]


def _evaluation(config: RunConfig) -> Any:
    """Return what the accuracy on the test prompts depends on, besides the model."""
    settings, rollout = config.evaluation, config.rollout
    return (
        config.seed,
        config.tasks,
        (settings.samples, settings.temperature, settings.limit),
        (rollout.sampling, rollout.max_turns, rollout.tool_format),
    )

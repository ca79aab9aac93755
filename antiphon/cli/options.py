"""The command that explains configuration keys: options."""

from typing import Annotated

import typer

from antiphon.cli.errors import exit_on_error
from antiphon.core.errors import ConfigError

MODELS = {
    "train": "antiphon.run.config:RunConfig",
    "sft": "antiphon.run.config:RunConfig",
    "dpo": "antiphon.offline.config:DpoConfig",
    "reward-model": "antiphon.offline.config:RewardModelConfig",
    "distill": "antiphon.offline.config:DistillConfig",
}


def options(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A key or section, such as rollout.group_size or learner.optimizer.")
    ] = "",
    command: Annotated[
        str, typer.Option("--command", help=f"Command whose configuration is meant: {', '.join(MODELS)}.")
    ] = "train",
) -> None:
    """Explain configuration keys: type, bounds, unit, default and meaning; all keys if none is given."""
    with exit_on_error():
        from difflib import get_close_matches
        from importlib import import_module

        from antiphon.inspect.options import find_options, list_options

        if command not in MODELS:
            raise ConfigError(f"{command!r} has no configuration; valid are {', '.join(MODELS)}", key="--command")
        module, _, name = MODELS[command].partition(":")
        model = getattr(import_module(module), name)
        found = find_options(model, key)
        if not found:
            similar = get_close_matches(key, [option.key for option in list_options(model)], 3, 0.5)
            hint = f"; similar are {', '.join(similar)}" if similar else ""
            raise ConfigError(f"there is no such key{hint}", key=key, suggestions=similar)
        print("\n".join(map(str, found)))
        if len(found) > 1:
            print(f"{len(found)} keys, without sections; keys of the items of a list are counted once")

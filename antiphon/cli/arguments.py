"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the file, such as rollout.group_size=4."),
]
Settings = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, such as port=8000.")]
SettingsFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the resolved configuration with the place that gives each value, and derived sizes; then exit.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing run of the same name.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run from its newest checkpoint.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, such as runs/tiny_arithmetic.")]
CodeFolder = Annotated[
    Path | None, typer.Option("--code", help="Folder of the Python modules that the run's configuration names.")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import, start and open everything that the run's configuration names.")
]
API = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="Ask the model of this name behind an API of OpenAI's chat protocol.",
        show_default=False,
    ),
]
APIKey = Annotated[
    str, typer.Option(metavar="VARIABLE", help="Environment variable with the key of --api.", show_default=False)
]
APISettings = Annotated[
    str, typer.Option(metavar="JSON", help="Further fields of each request to --api; null leaves a field of ours out.")
]

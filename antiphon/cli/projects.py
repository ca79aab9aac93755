"""Commands that start a user off: demo, init, recipes."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from antiphon.cli.arguments import Overrides
from antiphon.cli.errors import exit_on_error
from antiphon.cli.tables import print_table
from antiphon.core.errors import ConfigError

DEMO, STARTER = "tiny_arithmetic", "starter"
NEEDS = "# Needs: "  # begins the line of a recipe's configuration that has the command to install what it needs
NOT_COPIED = shutil.ignore_patterns("*.png", "__pycache__")


def recipes_folder() -> Path:
    """Return the folder of the recipes: part of the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def find_recipe(name: str) -> Path:
    """Return the folder of a recipe; raise `ConfigError` if there is none of that name."""
    names = list_recipes()
    if name not in names:
        raise ConfigError(
            f"there is no recipe {name!r}; valid are {', '.join(names)}", key="--recipe", value=name, valid=names
        )
    return recipes_folder() / name


def list_recipes() -> dict[str, str]:
    """Return what each recipe shows: the first line of each of its configurations, by the recipe's name."""
    found: dict[str, list[str]] = {}
    for file in sorted(recipes_folder().glob("*/*.yaml")):
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        found.setdefault(file.parent.name, []).append(first.removeprefix("# "))
    return {name: "\n".join(lines) for name, lines in found.items()}


def _installs(folder: Path) -> list[str]:
    """Return the commands that install what a recipe needs beyond Antiphon's own dependencies."""
    lines = [line for file in sorted(folder.glob("*.yaml")) for line in file.read_text(encoding="utf-8").splitlines()]
    return list(dict.fromkeys(line.removeprefix(NEEDS) for line in lines if line.startswith(NEEDS)))


def demo(overrides: Overrides = None) -> None:
    """Train a small model to add numbers, on a CPU in minutes; the run in runs/tiny_arithmetic is replaced."""
    from antiphon.cli.train import train

    train(str(find_recipe(DEMO) / "config.yaml"), overrides, overwrite=True)


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; it must be new or empty.")],
    recipe: Annotated[str, typer.Option(help="Recipe to begin with; `antiphon recipes` lists them.")] = STARTER,
) -> None:
    """Write a project that trains at once: configuration, reward, data and a README."""
    with exit_on_error():
        source = find_recipe(recipe)
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(
                f"{directory} is not an empty folder; nothing was written", key="DIR", value=str(directory)
            )
        shutil.copytree(source, directory, ignore=NOT_COPIED, dirs_exist_ok=True)
        if (config := directory / "config.yaml").is_file():
            config.rename(directory / "run.yaml")
            for other in directory.glob("*.yaml"):  # which may change it
                other.write_text(other.read_text(encoding="utf-8").replace("base: config.yaml", "base: run.yaml"))
        runs = sorted(file.name for file in directory.glob("*.yaml"))
        print(f"{directory}: {', '.join(sorted(file.name for file in directory.iterdir()))}")
        print(f"next: {' && '.join([f'cd {directory}', *_installs(directory), f'antiphon train {runs[0]}'])}")


def recipes() -> None:
    """List the recipes that `antiphon init` can begin with."""
    with exit_on_error():
        print_table("recipe", "what it shows", list_recipes())

"""The `antiphon` command: all its subcommands, one module for each family.

Commands import what they need inside their functions, so that `antiphon --help` answers at once.
"""

from typing import Annotated

import typer

from antiphon import __version__
from antiphon.cli.dashboard import dashboard, plot
from antiphon.cli.dashboard_beside import CommandWithDashboard
from antiphon.cli.data import data
from antiphon.cli.doctor import doctor
from antiphon.cli.generate import generate
from antiphon.cli.inspect import audit, diff, export, regrade, replay, samples, why
from antiphon.cli.offline import distill, dpo, reward_model
from antiphon.cli.options import options
from antiphon.cli.plan import plan, simulate
from antiphon.cli.projects import demo, init, recipes
from antiphon.cli.serve import sandbox, serve
from antiphon.cli.train import branch, check, evaluate, sft, train

app = typer.Typer(
    help="Asynchronous reinforcement-learning post-training for language models and agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _print_version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"antiphon {__version__}")
        raise typer.Exit


app.command()(demo)
app.command()(init)
app.command()(recipes)
app.command()(options)
app.command(cls=CommandWithDashboard)(train)
app.command()(branch)
app.command()(sft)
app.command()(dpo)
app.command(name="reward-model")(reward_model)
app.command()(distill)
app.command(name="eval")(evaluate)
app.command()(generate)
app.add_typer(data, name="data")
app.command()(simulate)
app.command()(plan)
app.command()(check)
app.command()(audit)
app.command()(why)
app.command()(samples)
app.command()(diff)
app.command()(replay)
app.command()(regrade)
app.command()(export)
app.add_typer(dashboard, name="dashboard")
app.command()(plot)
app.command()(serve)
app.add_typer(sandbox, name="sandbox")
app.command()(doctor)


def main() -> None:
    """Run the `antiphon` command."""
    app()


if __name__ == "__main__":
    main()

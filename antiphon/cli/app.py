"""The `antiphon` command: all its subcommands, one module for each family.

Commands import what they need inside their functions, so that `antiphon --help` answers at once.
"""

from typing import Annotated

import typer

from antiphon import __version__
from antiphon.cli import doctor, inspect, offline, plan, serve, train

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


app.command()(train.train)
app.command()(train.sft)
app.command()(offline.dpo)
app.command(name="reward-model")(offline.reward_model)
app.command()(offline.distill)
app.command(name="eval")(train.evaluate)
app.command()(plan.simulate)
app.command()(plan.plan)
app.command()(train.check)
app.command()(inspect.audit)
app.command()(inspect.why)
app.command()(inspect.diff)
app.command()(inspect.replay)
app.command()(inspect.regrade)
app.command()(inspect.export)
app.command()(serve.serve)
app.add_typer(serve.sandbox, name="sandbox")
app.command()(doctor.doctor)


def main() -> None:
    """Run the `antiphon` command."""
    app()


if __name__ == "__main__":
    main()

"""Commands that show runs: dashboard, in a browser, and plot, as a file."""

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from antiphon.cli.errors import exit_on_error, forbid_imports_from
from antiphon.cli.tables import print_line


def dashboard(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS]", help="Folder of runs, or the directory of one run.")] = Path(
        "runs"
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than this machine's are for trusted networks.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8765,
    prefix: Annotated[str, typer.Option(help="Path at which a proxy shows the dashboard, such as /antiphon.")] = "",
) -> None:
    """Show runs in a browser: curves, rollouts token by token, timelines and the record. Nothing is written into a run."""
    with exit_on_error():
        forbid_imports_from(runs)
        from antiphon.dashboard.server import is_local, serve

        if not is_local(host):
            print_line(f"{host} can be reached from other machines, and what they read is not encrypted")
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        serve(
            runs,
            base / "antiphon" / "dashboard",
            host=host,
            port=port,
            token=secrets.token_urlsafe(24),
            prefix=prefix,
            announce=print_line,
        )


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs.")],
    out: Annotated[Path, typer.Option(help="File to write, such as reward.svg, reward.png or reward.csv.")],
    chart: Annotated[
        str, typer.Option(help="A chart of the dashboard, such as reward, entropy or age, or any metric.")
    ] = "reward",
    x: Annotated[str, typer.Option(help="step or time.")] = "step",
    seeds: Annotated[
        bool, typer.Option("--seeds", help="Draw runs that differ in the seed alone as their mean with a band.")
    ] = False,
) -> None:
    """Draw a chart of the dashboard into a file: SVG or PNG for papers, CSV for other tools."""
    with exit_on_error(*runs):
        from antiphon.dashboard.plot import plot_runs

        plot_runs(runs, out, chart=chart, axis=x, seeds=seeds)

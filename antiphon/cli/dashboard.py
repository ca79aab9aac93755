"""Commands that show runs: dashboard, in a browser, and plot, as a file."""

import os
import secrets
import threading
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from typer.core import TyperGroup

from antiphon.cli.arguments import RunPath
from antiphon.cli.dashboard_beside import end_with_stdin
from antiphon.cli.errors import exit_on_error, forbid_imports_from
from antiphon.cli.serve import SERVE_TOKEN_VARIABLE
from antiphon.cli.tables import print_line


class _ShowByDefault(TyperGroup):
    """A group whose command `show` need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `show` before arguments that begin with no command."""
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["show", *args])


dashboard = typer.Typer(
    cls=_ShowByDefault,
    help="Show runs in a browser, from a server or as a folder of pages; `antiphon dashboard [RUNS]` serves.",
)


@dashboard.command()
def show(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS]", help="Folder of runs, or the directory of one run.")] = Path(
        "runs"
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than this machine's are for trusted networks.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8765,
    prefix: Annotated[str, typer.Option(help="Path at which a proxy shows the dashboard, such as /antiphon.")] = "",
    model_server: Annotated[
        str,
        typer.Option(
            help="URL of a model server for the chat page, such as http://127.0.0.1:8000/v1 of `antiphon serve`. "
            f"Its token is taken from {SERVE_TOKEN_VARIABLE}."
        ),
    ] = "",
    beside: Annotated[str, typer.Option(hidden=True, help="The run that this process was started for.")] = "",
) -> None:
    """Serve runs: curves, rollouts token by token, timelines and the record. Only your notes are written into a run."""
    with exit_on_error():
        forbid_imports_from(runs)
        from antiphon.dashboard.model_server import ModelServer
        from antiphon.dashboard.server import is_local, serve

        if not is_local(host):
            print_line(f"{host} can be reached from other machines, and what they read is not encrypted")
        if beside:
            threading.Thread(target=end_with_stdin, daemon=True, name="end with the run").start()
        serve_token = os.environ.pop(SERVE_TOKEN_VARIABLE, "")
        serve(
            runs,
            _find_cache(),
            host=host,
            port=port,
            token=secrets.token_urlsafe(24),
            prefix=prefix,
            model_server=ModelServer(model_server, serve_token) if model_server else None,
            announce=lambda address: print_line(address.replace("/?", f"/now/{quote(beside)}?") if beside else address),
        )


@dashboard.command()
def bundle(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="Folder to create.")],
) -> None:
    """Write the pages of a run into a folder that opens in any browser without a server."""
    with exit_on_error(run):
        from antiphon.dashboard.bundle import write_bundle

        found = write_bundle(run, out, _find_cache())
        print_line(f"{found.pages} pages, {found.bytes / 1e6:.1f} MB; open {found.folder / 'index.html'}")


def _find_cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "antiphon" / "dashboard"


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs.")],
    out: Annotated[Path, typer.Option(help="File to write, such as reward.svg, reward.png or reward.csv.")],
    chart: Annotated[
        str, typer.Option(help="A chart of the dashboard, such as reward, entropy or age, or any metric.")
    ] = "reward",
    x: Annotated[str, typer.Option(help="step, version or time.")] = "step",
    seeds: Annotated[
        bool, typer.Option("--seeds", help="Draw runs that differ in the seed alone as their mean with a band.")
    ] = False,
) -> None:
    """Draw a chart of the dashboard into a file: SVG or PNG for papers, CSV for other tools."""
    with exit_on_error(*runs):
        from antiphon.dashboard.plot import plot_runs

        plot_runs(runs, out, chart=chart, axis=x, seeds=seeds)

"""The dashboard beside a run, which `antiphon train --dashboard` starts as a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from antiphon.cli.tables import print_line

STOP_SECONDS = 5  # for a dashboard to end with its run


class CommandWithDashboard(TyperCommand):
    """A command with an option `--dashboard [PORT]`, whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, `--dashboard` without a number as `--dashboard=0`, which takes a free port."""
        given = [*args, ""]
        alone = [
            place
            for place, arg in enumerate(args)
            if arg == "--dashboard" and not re.fullmatch(r"[0-9]+", given[place + 1])
        ]
        return super().parse_args(ctx, [f"{arg}=0" if place in alone else arg for place, arg in enumerate(args)])


Dashboard = Annotated[
    int | None,
    typer.Option(
        "--dashboard",
        metavar="[PORT]",
        help="Show the run in a browser while it goes on, at 127.0.0.1 and this port; by default a free one.",
        min=0,
        max=65535,
    ),
]


@contextmanager
def dashboard_beside(folder: Path, name: str, port: int | None) -> Iterator[None]:
    """Serve a folder of runs in a process of its own for as long as the context is open.

    A dashboard that cannot start, or that ends, is one line of output: the run goes on.

    Args:
        folder: The folder; it is made if there is none.
        name: The run whose page the printed address opens.
        port: Port on 127.0.0.1; None serves nothing.
    """
    process = None if port is None else _start(folder, name, port)
    try:
        yield
    finally:
        if process is not None:
            _stop(process)


def _start(folder: Path, name: str, port: int) -> "subprocess.Popen[str] | None":
    command = [sys.executable, "-m", "antiphon", "dashboard", str(folder), "--port", str(port), "--beside", name]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # the first Ctrl-C lets the run finish its step: the dashboard shows it until then
        )
    except OSError as error:
        print_line(f"no dashboard: {error}")
        return None
    threading.Thread(target=_print_output, args=(process,), daemon=True, name="dashboard").start()
    return process


def _print_output(process: "subprocess.Popen[str]") -> None:
    """Print what a dashboard says: its address, or why there is none."""
    assert process.stdout is not None
    for line in process.stdout:
        print_line(f"dashboard: {line.strip()}")


def _stop(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()
        process.wait(STOP_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()


def end_with_stdin() -> None:
    """End this process when its standard input ends: the process that started it has ended, however it did."""
    while os.read(0, 1024):  # `sys.stdin` would be locked while Python shuts down
        pass
    os.kill(os.getpid(), signal.SIGTERM)

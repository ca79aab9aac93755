"""The dashboard that `antiphon train --dashboard` starts: it lives as long as the run, and its failures are not the run's."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import httpx
import pytest
from typer.testing import CliRunner

from antiphon.cli.app import app

# A run: it prints a line, and goes on until its input ends.
RUN = """
import sys
from pathlib import Path
from antiphon.cli.dashboard_beside import dashboard_beside
port = int(sys.argv[2]) if len(sys.argv) > 2 else None
with dashboard_beside(Path(sys.argv[1]), "simulated", port):
    print("the run begins", flush=True)
    sys.stdin.read()
    print("the run ends", flush=True)
"""
ADDRESS = re.compile(r"dashboard: (http://127\.0\.0\.1:\d+)/now/simulated\?token=([\w-]{32})\n")


@pytest.fixture
def start(tmp_path):
    """Start a run with a dashboard beside it."""
    started = []

    def begin(folder, *port):
        command = [sys.executable, "-c", RUN, str(folder), *map(str, port)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def read_address(process):
    """Return address and token of the dashboard, and its process; the run began before or after it printed them."""
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert "the run begins\n" in lines
    return next(found.groups() for line in lines if (found := ADDRESS.fullmatch(line)))


def is_served(address, token):
    with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {token}"}) as client:
        try:
            return client.get(f"{address}/now/simulated").status_code == 200
        except httpx.TransportError:
            return False


def test_dashboard_serves_the_run_and_ends_with_it(start, runs):
    process = start(runs, 0)
    address, token = read_address(process)
    assert is_served(address, token)
    assert process.communicate()[0] == "the run ends\n"
    assert process.returncode == 0
    assert not is_served(address, token)


def test_dashboard_ends_with_a_run_that_is_killed(start, runs):
    process = start(runs, 0)
    address, token = read_address(process)
    headers = {"Authorization": f"Bearer {token}"}
    # The stream of changes stays open until the server ends.
    with (
        httpx.Client(trust_env=False, headers=headers, timeout=60) as client,
        client.stream("GET", f"{address}/live/simulated") as stream,
    ):
        assert stream.status_code == 200
        process.send_signal(signal.SIGKILL)
        with suppress(httpx.TransportError):
            for _ in stream.iter_raw():
                pass
    process.wait()
    assert not is_served(address, token)


def test_dashboard_that_cannot_start_is_one_line_and_the_run_goes_on(start, runs):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start(runs, taken.getsockname()[1])
        lines = {process.stdout.readline(), process.stdout.readline()}
        assert "the run begins\n" in lines
        assert any(line.startswith("dashboard: antiphon: --host, --port") for line in lines)
        assert process.communicate()[0] == "the run ends\n"
    assert process.returncode == 0


def test_folder_of_the_first_run_is_made(start, tmp_path):
    process = start(tmp_path / "new" / "runs", 0)
    address, token = read_address(process)
    assert not is_served(address, token)  # the run is not there yet
    assert process.communicate()[0] == "the run ends\n"


def test_run_without_a_dashboard_starts_none(start, runs):
    process = start(runs)
    assert process.communicate()[0] == "the run begins\nthe run ends\n"


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        (["CONFIG", "--dashboard", "--dry-run"], True),
        (["--dashboard", "CONFIG", "--dry-run"], True),
        (["CONFIG", "--dry-run", "--dashboard"], True),
        (["CONFIG", "--dashboard", "9000", "steps=3", "--dry-run"], True),
        (["CONFIG", "--dashboard", "steps=3", "--dry-run"], True),
        (["CONFIG", "--dashboard=0", "--dry-run"], True),
        (["CONFIG", "--dashboard", "70000", "--dry-run"], False),
        (["CONFIG", "--dashboard=x", "--dry-run"], False),
    ],
)
def test_port_may_be_left_out(project, arguments, accepted):
    config = str(project.config())
    ran = CliRunner().invoke(app, ["train", *(config if each == "CONFIG" else each for each in arguments)])
    assert (ran.exit_code == 0) == accepted, ran.output
    if not accepted:
        assert "--dashboard" in ran.output
    elif "steps=3" in arguments:
        assert re.search(r"^steps: 3\b", ran.output, re.MULTILINE)

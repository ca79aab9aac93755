"""A real run in the browser: its picture lives while it trains, stops when it is killed, and lives again when it is resumed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.browser.serving import launched, served
from tests.unit.dashboard.sites import TOKEN

pytest.importorskip("playwright.sync_api", reason="not installed on this system: playwright")
pytestmark = pytest.mark.commands("chromium")
PATIENCE = 180_000  # milliseconds for which the page is watched for a change; nothing is judged by its speed


@pytest.fixture
def train(project):
    """Start `antiphon train` of a run that does not end by itself; whatever is left of it is killed in the end."""
    config = project.config(
        steps=10_000, rollout={"async_ratio": 1, "timeout": 120}, checkpoint={"every": 1}, engine={"replicas": 2}
    )
    started = []

    def start(*options):
        command = [sys.executable, "-m", "antiphon", "train", str(config), *options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_killed_and_resumed_run_is_followed_without_reload(project, train, tmp_path):
    run = project.folder / "runs" / "run"
    process = train()
    while not (run / "live.json").exists():  # the run makes its folder, and says nothing before it begins
        assert process.poll() is None
        time.sleep(0.1)
    with served(run.parent, tmp_path / "cache") as address, launched() as browser:
        page, problems = browser.new_page(), []
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(f"{address}/now/run?token={TOKEN}")
        page.locator(".pulse.live").wait_for()
        page.evaluate("window.same = true")
        page.locator(".events .step", has_text="published version").first.wait_for()
        assert page.locator(".loop .engine").count() == 2
        assert page.locator(".loop.frozen").count() == 0

        process.send_signal(signal.SIGSTOP)
        page.locator(".pulse.stalled").wait_for()
        process.send_signal(signal.SIGCONT)
        page.locator(".pulse.live").wait_for()

        process.send_signal(signal.SIGKILL)
        process.wait()
        page.locator(".pulse.ended", has_text="--resume").wait_for()
        assert page.locator(".loop.frozen").count() == 1
        assert page.locator(".trail .pill").inner_text() == "stopped"

        train("--resume")
        page.locator(".pulse.live").wait_for()
        page.locator(".events .resume", has_text="lineage 1").wait_for()
        before = page.locator(".loop .learner .big").text_content()
        page.wait_for_function(
            "before => document.querySelector('.loop .learner .big').textContent !== before", arg=before
        )
        assert page.locator(".loop.frozen").count() == 0
        assert page.evaluate("window.same"), "the page was not loaded again"
        assert problems == []

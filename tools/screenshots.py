"""Pictures of the dashboard for its page in the docs: a real run while it runs and afterwards, in a chromium of the system.

    python tools/screenshots.py [--out docs/images/dashboard] [--steps 150]

Two runs of the tiny recipe that differ in the learning rate. One is looked at while it runs, and its checkpoint is served for
the chat. Look at each picture before you commit it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
TOKEN = "a-token-for-pictures"
RECORD = ["record.events=true", "record.token_stats=[advantage,entropy,log_ratio]", "evaluation.limit=100"]


def start(*arguments: object) -> "subprocess.Popen[str]":
    """Start a command of Antiphon."""
    environment = {**os.environ, "ANTIPHON_SERVE_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "antiphon", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def train(folder: Path, name: str, steps: int, *settings: str) -> "subprocess.Popen[str]":
    """Start a run."""
    run = [f"name={name}", f"record.directory={folder}", f"steps={steps}", "evaluation.minimum_accuracy=0"]
    return start("train", CONFIG, *run, *RECORD, *settings)


def wait_for(process: "subprocess.Popen[str]", pattern: str) -> str:
    """Return the first group of the first line that matches."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found[1] if found.groups() else found[0]
    sys.exit(f"{process.args} ended with {process.wait()} before it printed {pattern!r}")


@contextmanager
def running(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """End a process afterwards."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def shoot(page: Page, address: str, path: str, file: Path, height: int = 900) -> None:
    """Open a path and take a picture of it."""
    page.set_viewport_size({"width": 1280, "height": height})
    page.goto(f"{address}{path}")
    page.wait_for_load_state("load")
    page.wait_for_timeout(1500)  # charts draw, and a live page has its first state
    page.locator("[data-part=audit][data-poll]").wait_for(state="detached")  # an audit takes a while
    used = page.locator("body").bounding_box()["height"]
    page.screenshot(path=file, clip={"x": 0, "y": 0, "width": 1280, "height": min(height, used)})


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "dashboard")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, sync_playwright() as tool:
        folder, out = Path(place) / "runs", options.out
        folder.mkdir()
        browser = tool.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        train(folder, "higher_rate", options.steps, "learner.optimizer.learning_rate=1e-3").communicate()
        run = train(folder, "tiny_arithmetic", options.steps, "engine.replicas=2")
        with running(start("dashboard", folder, "--port", 0)) as server:
            address, token = re.match(r"(.*)/\?token=(.*)", wait_for(server, r"http://\S+")).groups()
            light, dark = (browser.new_page(color_scheme=scheme) for scheme in ("light", "dark"))
            for page in (light, dark):
                page.goto(f"{address}/runs?token={token}")
            wait_for(run, rf"step +{options.steps // 2}/{options.steps} ")
            shoot(light, address, "/now/tiny_arithmetic", out / "now.png", 1100)
            shoot(dark, address, "/now/tiny_arithmetic", out / "now_dark.png", 1100)
            run.communicate()
            rows = f"{address}/api/rollouts/tiny_arithmetic"
            page = light.request.get(f"{rows}?status=trained&tokens_min=3").json()
            while page["searchable"] < 1:
                light.wait_for_timeout(200)
                page = light.request.get(f"{rows}?status=trained&tokens_min=3").json()
            attempt = next(row["id"] for row in page["rows"] if row["score"])
            group = re.split(r"[:.]", attempt)[1]
            last = light.request.get(f"{address}/api/timeline/tiny_arithmetic").json()["last"]
            for name, path in {
                "runs": "/runs",
                "run": "/run/tiny_arithmetic",
                "rollouts": "/rollouts/tiny_arithmetic?status=trained",
                "attempt": f"/attempt/tiny_arithmetic?id={attempt}&color=logprob",
                "group": f"/group/tiny_arithmetic?group={group}",
                "timeline": f"/timeline/tiny_arithmetic?start={last - 14}&stop={last - 4}",
                "record": "/record/tiny_arithmetic",
                "compare": "/compare?run=tiny_arithmetic&run=higher_rate",
            }.items():
                shoot(light, address, path, out / f"{name}.png")
            light.set_viewport_size({"width": 390, "height": 844})
            light.goto(f"{address}/run/tiny_arithmetic")
            light.wait_for_timeout(1500)
            light.screenshot(path=out / "phone.png")
        with running(start("serve", folder / "tiny_arithmetic", "port=0")) as models:
            url = wait_for(models, r"http://\S+/v1")
            with running(start("dashboard", folder, "--port", 0, "--model-server", url)) as server:
                address, token = re.match(r"(.*)/\?token=(.*)", wait_for(server, r"http://\S+")).groups()
                light.goto(f"{address}/runs?token={token}")
                shoot(light, address, f"/chat/tiny_arithmetic?id={attempt}", out / "chat.png")
                light.get_by_role("button", name="Sample answers").click()
                light.locator(".answers").wait_for()
                light.screenshot(path=out / "chat.png")
        browser.close()


if __name__ == "__main__":
    main()

"""Runs and dashboards for tests: simulated runs with a tokenizer, and a client that has the token."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models

from antiphon.core.types import Trajectory
from antiphon.dashboard.app import create_app
from antiphon.dashboard.site import Site
from antiphon.record import trajectories
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import ScenarioConfig

TOKEN = "the-token-of-the-tests"
SCENARIO = {
    "name": "simulated",
    "steps": 6,
    "rollout": {
        "groups_per_step": 4,
        "group_size": 3,
        "async_ratio": 1.5,
        "redundancy": 1,
        "extra_groups": 2,
        "order": "ready",
        "filter": "spread",
        "max_attempts": 1,
        "sampling": {"max_tokens": 200},
    },
    "engines": {"count": 2, "speed": {"slots": 8}},
    "learner": {"step": 1.0},
    "response_tokens": {"kind": "lognormal", "mean": 30, "spread": 0.8},
    "faults": [{"point": "reward.lost", "chance": 0.15}],
    "checkpoint": {"every": 2},
}
WORDS = ["one", " two", " three", " four", "<b>five</b>", " six", "\n"]


def make_run(root: Path, name: str = "simulated", events: bool = True, **changes) -> Path:
    """Simulate a run with events and give it a tokenizer of `WORDS`."""
    root.mkdir(parents=True, exist_ok=True)
    scenario = ScenarioConfig.model_validate(SCENARIO | {"name": name} | changes)
    with (root / "events").open("w", encoding="utf-8") as sink:
        simulate(scenario, sink, keep=root)
    run = root / name
    (root / "events").rename(run / "events.jsonl" if events else root / ".events")
    write_tokenizer(run, WORDS)
    change_tokens(run, vary_tokens)
    return run


def vary_tokens(number: int, tokens: np.ndarray) -> np.ndarray:
    """Return tokens of `WORDS`: in their order in every third trajectory, else every second of them."""
    return ((1 if number % 3 == 0 else 2) * np.arange(len(tokens)) + number) % len(WORDS)


def write_tokenizer(run: Path, words: list[str]) -> None:
    """Give a run a tokenizer in which each text is one token."""
    (run / "model").mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, words[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(run / "model" / "tokenizer.json"))


def change_tokens(run: Path, change) -> None:
    """Replace the tokens of all trajectories by what `change(number, tokens)` returns, in place."""
    number = 0
    for path in sorted((run / "rollouts").glob("*.parquet")):
        found: list[Trajectory] = []
        for trajectory in trajectories.read(path).values():
            segments = []
            for segment in trajectory.segments:
                segments.append(replace(segment, tokens=np.asarray(change(number, segment.tokens), np.int32)))
            found.append(replace(trajectory, payload=tuple(segments)))
            number += 1
        trajectories.write(path, 0, found)


def open_dashboard(folder: Path, cache: Path, token: str = TOKEN, prefix: str = "") -> TestClient:
    """Return a client of a dashboard; use it in a `with` statement. It sends the token."""
    app = create_app(Site.make(folder, cache), token, prefix, "test")
    return TestClient(app, headers={"Authorization": f"Bearer {token}"}, raise_server_exceptions=True)


def wait_until_indexed(client: TestClient, name: str) -> dict:
    """Return the page of all rollouts once the whole run is in the index, texts included."""
    while True:
        # On a busy machine the first answers say that the index is being built.
        page = client.get(f"/api/rollouts/{name}").json()
        if page.get("copied") == 1 and (page["searchable"] == 1 or page["problem"]):
            return page
        time.sleep(0.02)  # the index is built by a thread that tells nobody when it is done


def copy_run(run: Path, folder: Path, name: str) -> Path:
    """Copy a run into a folder under another name."""
    return Path(shutil.copytree(run, folder / name))


def read_lines(path: Path) -> list[dict]:
    """Return the lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

"""How fast the dashboard is over a run of a million attempts, what it takes of the machine, and what it costs live runs.

    python benchmarks/dashboard.py [--keep DIR]

A run of 10,000 steps of 100 attempts is made by the writers of real runs, and a real `antiphon dashboard` is asked over HTTP:
first pages without an index, then all pages with random filters, then searches. Times are those of a client that has the whole
answer; beside them is that of a bare server that answers `hello`. Then three runs do a step a second while ten pages follow
them. The attack suite of the tests is run, and every test of it that fails counts as executed.
`--keep` keeps the run and its index in a folder, and uses those that are there.
"""

import argparse
import asyncio
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlencode

import numpy as np
import psutil
from _big_run import LiveRun, make_run
from _common import ROOT, table, write_result

MEASURES = (
    "antiphon.dashboard",
    "antiphon.inspect.token_texts",
    "antiphon.record.reader",
    "antiphon.record.safe_files",
)
CONFIG = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
STEPS, LONG = 10_000, 60_000  # steps of the run; tokens of each attempt of its last step
REQUESTS = 40  # of each page
LIVE_RUNS, LIVE_PAGES, LIVE_SECONDS = 3, 10, 30
UPDATE_SECONDS = 2.0  # that a page lets pass between two updates, as in live.js
CHARTS_IN_VIEW = ("reward", "accuracy", "length", "truncated", "entropy", "clip")
SUITE = ("tests/unit/dashboard/test_hostile_texts.py", "tests/unit/dashboard/test_security.py")
HELLO = """
import uvicorn
async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})
uvicorn.run(app, port=%d, log_level="error")
"""


@dataclass
class Server:
    """A server in a process of its own, and a connection to it."""

    process: psutil.Process
    host: str
    token: str = ""
    connection: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        self.connection = self.connect()

    def connect(self) -> http.client.HTTPConnection:
        """Return another connection."""
        return http.client.HTTPConnection(self.host, timeout=60)

    def get(self, path: str, connection: http.client.HTTPConnection | None = None) -> tuple[float, bytes]:
        """Return the seconds until the whole answer was there, and the answer."""
        connection = connection or self.connection
        began = time.perf_counter()
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            answer = connection.getresponse()
        except (ConnectionError, http.client.HTTPException):  # the server has closed it, unused for some seconds
            connection.close()
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            answer = connection.getresponse()
        body = answer.read()
        seconds = time.perf_counter() - began
        if answer.status != 200:
            sys.exit(f"{path} was answered with {answer.status}: {body[-500:]!r}")
        return seconds, body

    def peak_mib(self) -> float:
        """Return the most memory that it had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024

    def cpu_seconds(self) -> float:
        """Return the seconds of a core that it took."""
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def dashboard(folder: Path, cache: Path) -> Iterator[Server]:
    """Serve a folder by the command."""
    command = [sys.executable, "-m", "antiphon", "dashboard", str(folder), "--port", "0"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline()
        found = re.search(r"http://([^/]+)/\?token=(\S+)", line)
        if found is None:
            sys.exit(f"{' '.join(command)} printed {line!r}")
        yield Server(psutil.Process(process.pid), *found.groups())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@contextmanager
def hello() -> Iterator[Server]:
    """Serve a page that says hello."""
    port = 18_765
    process = subprocess.Popen([sys.executable, "-c", HELLO % port])
    try:
        server = Server(psutil.Process(process.pid), f"127.0.0.1:{port}")
        for _ in range(100):
            try:
                server.get("/")
                break
            except OSError:
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait()


def random_pages(seed: int, steps: int) -> dict[str, list[str]]:
    """Return addresses of all pages with random filters, by the page's name."""
    draw = random.Random(seed)
    groups = steps * 25
    filters = (
        lambda: ("status", draw.choice(["trained", "filtered", "stale", "failed"])),
        lambda: ("task", draw.choice(["addition", "puzzles", "code", "search"])),
        lambda: ("step", draw.randint(1, steps)),
        lambda: ("age", draw.randint(0, 3)),
        lambda: ("score_min", round(draw.random(), 1)),
        lambda: ("tokens_min", draw.randint(20, 300)),
        lambda: ("q", f"word{int(draw.expovariate(1 / 200)) % 1998}"),
        lambda: ("page", draw.randint(0, 20)),
    )

    def rollouts() -> str:
        chosen = dict(each() for each in draw.sample(filters, draw.randint(0, 3)))
        sort = draw.choice(["newest", "best", "worst", "longest", "shortest", "oldest"])
        return f"/rollouts/million?{urlencode({**chosen, 'sort': sort})}"

    def attempt() -> str:
        name = f"0:{draw.randrange(groups)}.{draw.randrange(4)}.0"
        return f"/attempt/million?id={name}&color={draw.choice(['', 'logprob', 'version'])}"

    def timeline() -> str:
        start = draw.uniform(0, 10 * steps)
        return f"/timeline/million?start={start}&stop={start + 10 ** draw.uniform(0, 5)}"

    makers = {
        "runs": lambda: "/runs",
        "run": lambda: f"/run/million?x={draw.choice(['step', 'time'])}",
        "rollouts": rollouts,
        "group": lambda: f"/group/million?group={draw.randrange(groups)}",
        "attempt": attempt,
        "long attempt": lambda: (
            f"/attempt/million?id=0:{groups - 1 - draw.randrange(20)}.3.0&from={draw.randrange(50_000)}"
        ),
        "record": lambda: "/record/million",
        "timeline": timeline,
        "chart": lambda: f"/api/chart/million?chart={draw.choice(CHARTS_IN_VIEW)}&smooth={draw.randint(1, 300)}",
        "compare": lambda: "/compare?run=million&run=live_0",
        "compared chart": lambda: f"/api/compared-chart?run=million&run=live_0&chart={draw.choice(CHARTS_IN_VIEW)}",
    }
    return {name: [make() for _ in range(REQUESTS)] for name, make in makers.items()}


def measure_pages(server: Server, steps: int) -> dict[str, float]:
    """Milliseconds at the 95th percentile, of all pages together and of each."""
    found = {}
    for name, addresses in random_pages(0, steps).items():
        timed = sorted((1e3 * server.get(address)[0], address) for address in addresses)
        found[name] = [milliseconds for milliseconds, _ in timed]
        print(
            f"{name}: {np.percentile(found[name], 50):.1f} ms, p95 {np.percentile(found[name], 95):.1f} ms; {timed[-1]}",
            flush=True,
        )
    slow = {f"page_p95_ms_{name.replace(' ', '_')}": float(np.percentile(each, 95)) for name, each in found.items()}
    return {"page_p95_ms": float(np.percentile(np.concatenate(list(found.values())), 95)), **slow}


def measure_search(server: Server) -> float:
    """Seconds of the slowest of several searches: frequent and rare words, phrases, and other orders."""
    slowest = 0.0
    for words in (
        "word0",
        "word1999",
        "word1",
        '"word3 word5"',
        "word0 word1 word2",
        '"word0 word1 word2 word3"',
        "word1500",
    ):
        for sort in ("newest", "best", "longest"):
            seconds, _ = server.get(f"/rollouts/million?q={quote(words)}&sort={sort}")
            slowest = max(slowest, seconds)
            print(f"search {words} by {sort}: {seconds:.3f} s", flush=True)
    return slowest


def wait_until_indexed(server: Server) -> None:
    """Return when the whole run is in the index."""
    while True:
        connection = server.connect()  # the server closes those that are not used for some seconds
        page = json.loads(server.get("/api/rollouts/million", connection)[1])
        has_events = not json.loads(server.get("/api/timeline/million", connection)[1])["reading"]
        connection.close()
        if page["copied"] == 1 and page["searchable"] == 1 and has_events:
            return
        time.sleep(10)  # to ask takes a part of the machine


def follow(server: Server, name: str, stop: threading.Event, updates: list[int]) -> None:
    """Do what an open page does: listen to changes, and fetch the page and the charts in view again."""
    stream, connection = server.connect(), server.connect()
    stream.request("GET", f"/live/{name}", headers={"Authorization": f"Bearer {server.token}"})
    answer, last = stream.getresponse(), 0.0
    while not stop.is_set() and (line := answer.readline()):
        if not line.startswith(b"data:") or time.monotonic() - last < UPDATE_SECONDS:
            continue
        last = time.monotonic()
        server.get(f"/run/{name}", connection)
        for chart in CHARTS_IN_VIEW:
            server.get(f"/api/chart/{name}?chart={chart}", connection)
        updates.append(1)


def measure_live(server: Server, runs: Sequence[LiveRun], seconds: float) -> float:
    """CPU-seconds that the server takes a second and core, with ten pages open on three runs that do a step a second."""
    stop, updates = threading.Event(), []
    pages = [
        threading.Thread(target=follow, args=(server, f"live_{number % len(runs)}", stop, updates), daemon=True)
        for number in range(LIVE_PAGES)
    ]
    for page in pages:
        page.start()

    async def train() -> float:
        for _ in range(5):  # pages have come up
            await asyncio.gather(*(run.step() for run in runs), asyncio.sleep(1))
        before, began = server.cpu_seconds(), time.monotonic()
        while time.monotonic() - began < seconds:
            await asyncio.gather(*(run.step() for run in runs), asyncio.sleep(1))
        return (server.cpu_seconds() - before) / (time.monotonic() - began)

    share = asyncio.run(train()) / (os.cpu_count() or 1)
    stop.set()
    print(f"live: {share:.4f} of the machine, {len(updates)} updates of {LIVE_PAGES} pages", flush=True)
    return share


def count_attacks() -> dict[str, float]:
    """Number of hostile texts and requests in the attack suite, and of its tests that fail."""
    sys.path.insert(0, str(ROOT))
    from tests.unit.dashboard.test_hostile_texts import HOSTILE
    from tests.unit.dashboard.test_security import HARMLESS, INVALID, OUTSIDE

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *SUITE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    failed = sum(int(number) for number in re.findall(r"(\d+) (?:failed|errors?)", done.stdout.splitlines()[-1]))
    if done.returncode and not failed:
        sys.exit(done.stdout[-2000:] + done.stderr[-1000:])
    return {"hostile_inputs": len({*HOSTILE, *OUTSIDE, *INVALID, *HARMLESS}), "hostile_executed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        place = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder, cache = place / "runs", place / "cache"
        if not (folder / "million" / "summary.json").exists():
            make_run(folder, options.steps, CONFIG, long_tokens=LONG)
        live = [stack.enter_context(LiveRun(folder, f"live_{number}", CONFIG)) for number in range(LIVE_RUNS)]
        asyncio.run(live[0].step())
        figures = count_attacks()
        with tempfile.TemporaryDirectory() as empty, dashboard(folder, Path(empty)) as server:
            first = [
                "/runs",
                "/run/million",
                "/rollouts/million",
                "/timeline/million",
                "/attempt/million?id=0:1000.0.0",
            ]
            cold = [server.get(address)[0] for address in first]
            print("cold:", [f"{seconds:.3f} s" for seconds in cold], flush=True)
            figures["open_seconds_1m_attempts"] = max(cold)
            building = [
                server.get(address)[0] for each in random_pages(1, options.steps).values() for address in each[:5]
            ]
            figures["page_p95_ms_while_indexing"] = 1e3 * float(np.percentile(building, 95))
            peaks = [server.peak_mib()]
        with dashboard(folder, cache) as server:
            began = time.monotonic()
            wait_until_indexed(server)
            server.connection = server.connect()
            print(f"indexed in {time.monotonic() - began:.0f} s, {server.peak_mib():.0f} MiB", flush=True)
            figures |= measure_pages(server, options.steps)
            figures["search_seconds"] = measure_search(server)
            figures["cost_to_training_share"] = measure_live(server, live, LIVE_SECONDS)
            figures["peak_mib"] = max(*peaks, server.peak_mib())
        with hello() as server:
            figures["hello_p95_ms"] = 1e3 * float(np.percentile([server.get("/")[0] for _ in range(200)], 95))
    figures |= {"attempts": 100 * options.steps, "steps": options.steps}
    print(table(["figure", "value"], [[key, f"{value:.4g}"] for key, value in figures.items()]))
    if options.steps == STEPS:
        print(
            "written:", write_result("dashboard", figures, command="python benchmarks/dashboard.py", measures=MEASURES)
        )


if __name__ == "__main__":
    main()

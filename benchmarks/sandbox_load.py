"""The sandbox service under load: many clients, and boxes that are killed at random under them.

    python benchmarks/sandbox_load.py [--requests 10000] [--clients 64] [--kills 200]

Every request must be answered, or refused with a reason; in the end no process, mount, control group or directory may be
left. Server and clients share the machine. Figures: `requests_per_second`, `p50_ms`, `p99_ms`, `refused`, `lost`, `kills`,
`left_behind`.
"""

import argparse
import asyncio
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

MEASURES = (
    "antiphon.sandbox.service",
    "antiphon.sandbox.sessions.shell_sandbox",
)

TOKEN = "a-token-of-the-load"
SANDBOX = "/apis/envs/sandbox/v1"


class Service:
    """A service in a process of its own, with a directory for temporary files of its own."""

    def __init__(self, *arguments: str, token: str = TOKEN, path: tuple[str, ...] = ()) -> None:
        """`arguments` of `antiphon sandbox serve`; `path`: more of the import path."""
        self.folder = Path(tempfile.mkdtemp(prefix="antiphon-service-"))
        self.folder.chmod(0o711)  # boxes are made by another user, where we are root
        self.log = self.folder / "log.txt"
        environment = {
            **os.environ,
            "ANTIPHON_SANDBOX_TOKEN": token,
            "PYTHONPATH": os.pathsep.join([*path, *filter(None, sys.path)]),
            "TMPDIR": str(self.folder),
        }
        command = [sys.executable, "-m", "antiphon", "sandbox", "serve", "port=0", *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url.startswith("http"):
            raise RuntimeError(f"the service did not start: {self.log.read_text()}")
        self._rooms = {path.name for path in self.folder.glob("antiphon-boxes-*/*")}
        self._children: list[psutil.Process] = []

    def boxes(self) -> list[psutil.Process]:
        """The bubblewrap of each box, also of those that are being made."""
        return [child for child in self.children(recursive=False) if _name(child) == "bwrap"]

    def children(self, *, recursive: bool = True) -> list[psutil.Process]:
        """What the service has started and what that has started."""
        return psutil.Process(self.process.pid).children(recursive=recursive)

    def end(self, number: int = signal.SIGTERM) -> int:
        """End the service; its exit code."""
        self._children = self.children()
        self.process.send_signal(number)
        code = self.process.wait(120)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def left(self) -> list[str]:
        """What there still is of a service that has ended."""
        _, alive = psutil.wait_procs(self._children, 20)
        left = [f"process {child.pid}" for child in alive]
        others = (other for other in psutil.process_iter(["cmdline"]) if other.pid != self.process.pid)
        left += [
            f"process {other.pid}" for other in others if str(self.folder) in " ".join(other.info["cmdline"] or ())
        ]
        left += [str(path) for path in self.folder.glob("antiphon-boxes-*/*")]
        left += [line for line in Path("/proc/mounts").read_text().splitlines() if str(self.folder) in line]
        groups = Path("/sys/fs/cgroup").glob("**/antiphon-*")
        return left + [str(path) for path in groups if path.name in self._rooms]

    def close(self) -> None:
        """Kill it if it still runs, and remove its directory."""
        if self.process.poll() is None:
            self.end(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


@dataclass
class Outcome:
    """What became of all requests."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # (operation, HTTP status)
    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds, by operation
    unclear: list[str] = field(default_factory=list)  # answers that say neither a result nor why not
    lost: int = 0
    kills: int = 0
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)


class Client:
    """Does one thing after the other with one sandbox, and starts another when it has lost it."""

    def __init__(self, http: httpx.AsyncClient, draw: random.Random, outcome: Outcome) -> None:
        self._http = http
        self._draw = draw
        self._outcome = outcome
        self._sandbox = ""
        self._session = False

    async def act(self) -> None:
        """One request."""
        if not self._sandbox:
            status, result = await self._ask("start", image="load", memory="64m", disk="16m")
            self._sandbox = result["sandbox_id"] if status == 200 else ""
            return
        if not self._session:
            status, _ = await self._ask("create_session", sandbox_id=self._sandbox)
            self._session = status == 200
        else:
            operation, body = self._draw.choices(_OPERATIONS, weights=_WEIGHTS)[0]
            status, _ = await self._ask(operation, sandbox_id=self._sandbox, **body)
        if status in (404, 409, 410) or (status == 200 and self._outcome_was_stop):
            self._sandbox, self._session = "", False

    async def _ask(self, operation: str, **body: object) -> tuple[int, dict]:
        began = time.perf_counter()
        self._outcome_was_stop = operation == "stop"
        try:
            answer = await self._http.post(f"{SANDBOX}/{operation}", json=body)
        except httpx.HTTPError as error:
            self._outcome.lost += 1
            self._outcome.unclear.append(f"{operation}: {error!r}")
            self._sandbox, self._session = "", False
            return 0, {}
        self._outcome.latencies[operation].append(time.perf_counter() - began)
        self._outcome.answers[operation, answer.status_code] += 1
        told = answer.json()
        if (told["status"] == "Success") != (answer.status_code == 200) or (
            told["status"] != "Success" and not told["error"]
        ):
            self._outcome.unclear.append(f"{operation}: {answer.status_code} {answer.text}")
        return answer.status_code, told["result"]


_OPERATIONS: list[tuple[str, dict[str, object]]] = [
    ("run_in_session", {"command": "echo $((6 * 7)); cd /tmp", "check": "ignore"}),
    ("execute", {"command": ["sh", "-c", "head -c 2000 /dev/zero | wc -c"]}),
    ("write_file", {"path": "a/file", "content": "text\n" * 50}),
    ("read_file", {"path": "/etc/passwd"}),
    ("stop", {}),
]
_WEIGHTS = [45, 20, 15, 15, 5]


async def load(requests: int, clients: int, kills: int, seed: int) -> Outcome:
    """Send so many requests from so many clients at once, and kill so many boxes meanwhile."""
    outcome = Outcome()
    service = Service("warm=4", "sandboxes=48", "sandbox_memory=64", "sandbox_disk=16", "stopped_minutes=0.2")
    try:
        draw = random.Random(seed)
        due = sorted((draw.randrange(requests) for _ in range(kills)), reverse=True)
        numbers = itertools.count()

        async def send(client: Client) -> None:
            while (number := next(numbers)) < requests:
                while due and due[-1] <= number and _kill(service, draw):  # else before the next request
                    due.pop()
                    outcome.kills += 1
                await client.act()

        began = time.perf_counter()
        # without expiry: httpcore may close a connection that it has just lent out
        limits = httpx.Limits(max_connections=clients, keepalive_expiry=None)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            httpx.AsyncClient(base_url=service.url, headers=headers, timeout=120, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(clients):
                group.create_task(send(Client(http, random.Random(draw.random()), outcome)))
        outcome.seconds = time.perf_counter() - began
        code = service.end()
        outcome.left = service.left() + ([f"exit code {code}"] if code else [])
        outcome.left += [f"log: {line}" for line in service.log.read_text().splitlines()]
    finally:
        service.close()
    return outcome


def _kill(service: Service, draw: random.Random) -> bool:
    """Kill bubblewrap, or what it has started; False if there is no box, or the one chosen ended by itself."""
    boxes = service.boxes()
    if not boxes:
        return False
    victim = draw.choice(boxes)
    try:
        inside = victim.children()
        (draw.choice(inside) if inside and draw.random() < 0.5 else victim).kill()
    except psutil.NoSuchProcess:
        return False
    return True


def main() -> None:
    """Run it and print the table."""
    from _common import table, write_result

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    outcome = asyncio.run(load(arguments.requests, arguments.clients, arguments.kills, arguments.seed))
    rows = []
    for operation, times in sorted(outcome.latencies.items()):
        statuses = Counter({status: number for (name, status), number in outcome.answers.items() if name == operation})
        refused = "  ".join(f"{status}: {number}" for status, number in sorted(statuses.items()) if status != 200)
        p50, p99 = (1000 * _quantile(times, share) for share in (0.5, 0.99))
        rows.append([operation, str(len(times)), str(statuses[200]), f"{p50:.0f}", f"{p99:.0f}", refused or "-"])
    print(table(["operation", "answers", "done", "p50 ms", "p99 ms", "refused"], rows))
    everything = [latency for times in outcome.latencies.values() for latency in times]
    figures = {
        "requests": arguments.requests,
        "requests_per_second": len(everything) / outcome.seconds,
        "p50_ms": 1000 * _quantile(everything, 0.5),
        "p99_ms": 1000 * _quantile(everything, 0.99),
        "refused": sum(number for (_, status), number in outcome.answers.items() if status != 200),
        "server_errors": sum(number for (_, status), number in outcome.answers.items() if status >= 500),
        "lost": outcome.lost,
        "kills": outcome.kills,
        "left_behind": len(outcome.left),
    }
    for name, value in figures.items():
        print(f"{name:<22}{value:>12,.1f}")
    for problem in (*outcome.unclear[:20], *outcome.left[:20]):
        print(problem)
    print(write_result("sandbox_load", figures, arguments.out, measures=MEASURES))


def _quantile(values: list[float], share: float) -> float:
    return (
        statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]
        if len(values) > 1
        else values[0]
    )


if __name__ == "__main__":
    main()

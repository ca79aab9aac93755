"""How fast weights pass from learner to engine, over all runs of `weights.py` that were ever committed: median and spread.

    python benchmarks/handover.py

The planner's constants (`HANDOVER` in `antiphon/simulate/speed_estimate.py`) are these medians; one run says
what the machine did in one hour.
"""

import json
import subprocess
from statistics import median

from _common import ROOT, table, write_result

WAYS = ("shared_memory", "object_store", "distributed")
RESULT = "benchmarks/results/cpu-2core/weights.json"
MEASURES = ("antiphon.weights", "antiphon.engines.native.weights")


def git(*words: str) -> str:
    """Run git and return its output."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Collect the runs, print the table, write the result."""
    commits = git("log", "--format=%H", "--", RESULT).split()
    runs = [json.loads(git("show", f"{commit}:{RESULT}"))["figures"] for commit in commits]
    figures: dict[str, float] = {"runs": len(runs)}
    rows = []
    for way in WAYS:
        speeds = [run[f"{way}_gigabytes_per_second"] for run in runs]
        figures |= {way: median(speeds), f"{way}_least": min(speeds), f"{way}_most": max(speeds)}
        rows.append([way, f"{median(speeds):.2f}", f"{min(speeds):.2f}", f"{max(speeds):.2f}"])
    print(table(["GB/s", "median", "least", "most"], rows))
    print("written:", write_result("handover", figures, measures=MEASURES))


if __name__ == "__main__":
    main()

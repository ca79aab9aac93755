"""Rollouts beside the loop and in rollout workers: groups a second, and what is left for the controller to do.

    python benchmarks/shards.py [--rounds 3]

A run of many short episodes, on the model and tasks of `kills.py`: one turn that is graded, or up to four in a world, of four
tokens each, on two engines. Beside the loop, then in two workers, round by round, each with a seed of its own. The controller's
part is processor time of its process a group, from the fifth step to the last. On two cores all share the processor: what shows
is what workers take from the controller, and not what more machines would make of it.
"""

import argparse
import subprocess
import time
from pathlib import Path
from statistics import fmean

import psutil
from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import Peak, run

from antiphon.inspect.audit import audit

CONFIG = ROOT / "benchmarks" / "kills" / "config.yaml"
GROUPS, FIRST, LAST = 16, 5, 30
SETTINGS = (
    f"steps={LAST}",
    f"rollout.groups_per_step={GROUPS}",
    "rollout.sampling.max_tokens=4",
    "algorithm={}",
    "critic=null",
    "teachers=[]",
    "tasks.0.reward=parts:digits",
    "tasks.0.judge=null",
    "learner.kind=torch",
    "engine.kind=native",
    "engine.slots=128",
    "checkpoint.every=0",
)


class Controller(Peak):
    """Processor time of the controller's own process as steps are recorded."""

    def __init__(self, metrics: Path) -> None:
        super().__init__()
        self.metrics = metrics
        self.seen: dict[int, tuple[float, float]] = {}  # step -> (second, processor seconds)

    def watch(self, process: "subprocess.Popen[bytes]") -> None:
        """See `Peak.watch`."""
        self.metrics.unlink(missing_ok=True)
        controller = psutil.Process(process.pid)
        while process.poll() is None:
            steps = self.metrics.read_text().count("\n") if self.metrics.exists() else 0
            if controller.status() != psutil.STATUS_ZOMBIE:
                used = controller.cpu_times()
                self.seen.setdefault(steps, (time.perf_counter(), used.user + used.system))
            time.sleep(0.02)

    def between(self) -> tuple[float, float]:
        """Groups a second, and processor milliseconds a group."""
        first = min(step for step in self.seen if step >= FIRST)
        groups = (LAST - first) * GROUPS
        seconds, used = (end - begin for begin, end in zip(self.seen[first], self.seen[LAST], strict=True))
        return groups / seconds, used / groups * 1000


def main() -> None:
    """All runs; print the table, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--runs", type=Path, default=Path("runs/shards"))
    options = arguments.parse_args()
    found: dict[int, list[tuple[float, float]]] = {0: [], 2: []}
    broken = 0
    for number in range(options.rounds):
        for workers, each in found.items():
            name = f"{workers}-{number}"
            peak = Controller(options.runs / name / "metrics.jsonl")
            overrides = (*SETTINGS, f"rollout.workers={workers}", f"seed={number}")
            broken += len(
                audit(run("train", CONFIG, name, *overrides, runs=options.runs, peak=peak).directory).violations
            )
            each.append(peak.between())
    figures = {"violations": float(broken)}
    for workers, each in found.items():
        speeds, costs = zip(*each, strict=True)
        figures |= {f"{workers}_groups_a_second": fmean(speeds), f"{workers}_controller_ms_a_group": fmean(costs)}
    pairs = list(zip(found[0], found[2], strict=True))
    figures["speed_ratio"] = fmean(there[0] / here[0] for here, there in pairs)
    figures["controller_ratio"] = fmean(there[1] / here[1] for here, there in pairs)
    rows = [
        [str(w), f"{figures[f'{w}_groups_a_second']:.1f}", f"{figures[f'{w}_controller_ms_a_group']:.2f}"]
        for w in found
    ]
    print(table(["workers", "groups/s", "controller, ms a group"], rows))
    print("written:", write_result("shards", figures, measures=WHOLE_RUN))


if __name__ == "__main__":
    main()

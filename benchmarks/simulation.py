"""Do the promises of scheduling hold, and would we notice if they did not?

    python benchmarks/simulation.py

Plays 1,000 drawn scenarios with faults (`antiphon simulate --chaos`), each checked event by event. Then breaks each promise on
purpose: a copy of the package with one line changed must fail the same check, within as many seeds.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _common import ROOT, SIMULATION, table, write_result

MEASURES = (
    *SIMULATION,
    "antiphon.simulate.chaos",
    "antiphon.simulate.chaos_scenario",
    "antiphon.simulate.invariants",
)


@dataclass(frozen=True)
class Mutant:
    """One promise, and the change that breaks it."""

    promise: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant("age", "rollout/config.py", "return _ceil(self.async_ratio)", "return _ceil(self.async_ratio) + 1"),
    Mutant(
        "share of the greatest age",
        "rollout/config.py",
        "return _ceil(fraction * self.groups_per_step) if fraction else self.groups_per_step",
        "return self.groups_per_step",
    ),
    Mutant(
        "live groups",
        "rollout/config.py",
        "* self.groups_per_step) + self.extra_groups",
        "* self.groups_per_step) + self.extra_groups + 1",
    ),
    Mutant(
        "minimum version",
        "rollout/engine_state.py",
        "[top for held in list(self._heaps) if held >= version and (top := self._top(held, share))]",
        "[top for held in list(self._heaps) if (top := self._top(held, share))]",
    ),
    Mutant(
        "first in, first out",
        "rollout/freshness.py",
        "islice(groups, size)",
        "islice(complete.values(), size)",
    ),
    Mutant("no attempt lost", "rollout/admission.py", "self._end(group, redundant, AttemptStatus.REDUNDANT)", "pass"),
    Mutant(
        "none counted twice",
        "rollout/admission.py",
        "self._end(group, group.with_status(AttemptStatus.FINISHED) + group.with_status(AttemptStatus.RUNNING), status)",
        "self._end(group, tuple(group.attempts), status)",
    ),
    Mutant(
        "retries are new attempts",
        "rollout/admission.py",
        "attempt.sibling, attempt.attempt + 1)",
        "attempt.sibling, attempt.attempt)",
    ),
    Mutant(
        "size of a group",
        "rollout/admission.py",
        "if group.finished < self.config.group_size:",
        "if group.finished < self.config.group_size - 1:",
    ),
    Mutant(
        "trained once",
        "rollout/admission.py",
        "            self._release(group, AttemptStatus.TRAINED)",
        "            group.state = GroupState.COMPLETE\n            self._complete[group.id] = group",
    ),
    Mutant("aborted means aborted", "rollout/scheduler.py", "                task.cancel()", "                pass"),
    Mutant("progress after a filter", "rollout/scheduler.py", "            self.admission.filter(group)\n", ""),
    Mutant("progress after a crash", "rollout/pool.py", "return handle.partial()", "raise"),
    Mutant(
        "progress after a hang",
        "rollout/engine_supervisor.py",
        'self.on_engine_lost(member, WorkerDiedError(f"an engine did not',
        'return\n            self.on_engine_lost(member, WorkerDiedError(f"an engine did not',
    ),
    Mutant(
        "dead engines get nothing",
        "rollout/engine_supervisor.py",
        "member.open = False\n        member.engine.kill()",
        "member.engine.kill()",
    ),
    Mutant(
        "weights that are refused are not used",
        "rollout/engine_supervisor.py",
        "except WeightsError as error:",
        "except FloatingPointError as error:",
    ),
    Mutant(
        "slots come back",
        "rollout/admission.py",
        "            del self._groups[group.id]\n        self._taken",
        "            pass\n        self._taken",
    ),
    Mutant(
        "deadlines",
        "core/deadlines.py",
        "loop.call_later(deadline, self._expire, deadline)",
        "loop.call_later(10 * deadline, self._expire, deadline)",
    ),
]


def played(package: Path, seeds: int, first: int = 0) -> subprocess.CompletedProcess[str]:
    """The check, on a package that lies in `package`."""
    command = [sys.executable, "-m", "antiphon", "simulate", "--chaos", str(seeds), "--seed", str(first)]
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(
            command, cwd=package, env=environment, capture_output=True, text=True, timeout=60 + seeds, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", "no end")


def caught(mutant: Mutant, seeds: int) -> str:
    """What the check says of the mutant; empty if nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "antiphon"
        shutil.copytree(ROOT / "antiphon", copy, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / mutant.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.promise}: {mutant.old!r} is {text.count(mutant.old)} times in {mutant.file}")
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        result = played(Path(scratch), seeds)
        lines = (result.stderr or result.stdout).strip().splitlines()
        return lines[-1][:110] if result.returncode else ""


def main() -> None:
    """Seeds first, then mutants; the result says how many were caught."""
    parser = argparse.ArgumentParser(description="Seeds with faults, and mutants.")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--only", default="", help="only mutants whose promise contains this, and no seeds")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    began = time.perf_counter()
    if not args.only:
        result = played(ROOT, args.seeds)
        print(result.stdout, result.stderr)
        if result.returncode:
            sys.exit(1)
    spent = time.perf_counter() - began
    rows = []
    for mutant in (m for m in MUTANTS if args.only in m.promise):
        rows.append([mutant.promise, caught(mutant, args.seeds) or "NOT CAUGHT"])
        print(rows[-1], flush=True)
    print(table(["promise that was broken", "what the check said"], rows))
    found = sum(row[1] != "NOT CAUGHT" for row in rows)
    figures = {"seeds": args.seeds, "seconds": spent, "invariants_mutated": len(rows), "mutants_caught": found}
    if not args.only:
        print("written:", write_result("simulation", figures, args.out, measures=MEASURES))
    sys.exit(found < len(rows))


if __name__ == "__main__":
    main()

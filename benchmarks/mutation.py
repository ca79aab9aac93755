"""Small mistakes made on purpose, one at a time, room by room: how many do the tests notice?

python benchmarks/mutation.py --seed 0 --mutants 150
python benchmarks/mutation.py --rooms algorithms --mutants 500

A mutant has one fault of `antiphon_envs.mini_swe.mutants`. Changes that are none by their form alone are not drawn:
`strict` of zip, and the order of what `max` and its like are given. Others that mean the same as the original count as
survivors like all others, and are explained one by one in `mutants/survivors.yaml`. One that is explained there is not
tried: it counts as one that survived. Tests are run as they are, except that hypothesis tries a fifth of the examples and
does not look for the shortest one that fails: what survives here may not survive the whole suite.

Trials are kept in `.mutation/`, so that a draw that was stopped goes on where it was. A mutant that was noticed is not tried
again while its file and the test file that noticed it are as they were, whatever else has changed; one that survived is, after
any change of the sources or of its room's tests.
"""

import argparse
import difflib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import yaml
from _common import ROOT, device_name, table, write_result
from mutants.rooms import CORE, ROOMS
from mutants.trials import SURVIVED, Mutant, Reach, Trial, draw, reach_of, settle, tried

MEASURES = (
    "antiphon.algorithms",
    "antiphon.rollout",
    "antiphon.record",
    "antiphon.learning",
    "antiphon.weights",
    "antiphon.tasks.grading",
)
FLOOR = 0.9  # of the mutants drawn, that tests must notice
STATE = ROOT / ".mutation"
EXPLAINED = ROOT / "benchmarks" / "mutants" / "survivors.yaml"


class State:
    """What was seen of a room, on disk."""

    def __init__(self, room: str) -> None:
        self._room = room
        digest = hashlib.sha256()
        for path in sorted([*(ROOT / "antiphon").rglob("*.py"), *ROOMS[room].all_test_files()]):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
        STATE.mkdir(exist_ok=True)
        self._now = digest.hexdigest()[:12]  # of sources and tests
        self._trials = STATE / f"{room}.jsonl"
        self.reaches = STATE / f"{room}-{self._now}.json"

    def ends(self) -> dict[str, str]:
        """Return how trials ended whose ends still hold, by the mutants' keys."""
        lines = self._trials.read_text(encoding="utf-8").splitlines() if self._trials.exists() else []
        found = {}
        for key, end, of, test_file, test_digest in map(json.loads, lines):
            if of == self._now or (not end.startswith(SURVIVED) and digest_of(test_file) == test_digest):
                found[key] = end
        return found

    def add(self, mutant: Mutant, trial: Trial) -> None:
        """Keep how a trial ended."""
        row = [mutant.key, trial.end, self._now, trial.test_file, digest_of(trial.test_file)]
        with self._trials.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def reach(self, pool: ProcessPoolExecutor) -> "Future[Reach]":
        """Return what the room's tests reach, from a run of them if none is kept."""
        if not self.reaches.exists():
            return pool.submit(reach_of, self._room, self.reaches)
        kept: Future[Reach] = Future()
        kept.set_result(Reach.read(self.reaches))
        return kept


def digest_of(test_file: str) -> str:
    """Return a digest of a test file, of none if its name is empty; empty if it is not there."""
    path = ROOT / test_file
    content = path.read_bytes() if path.is_file() else b""
    return hashlib.sha256(content).hexdigest()[:12] if content or not test_file else ""


def changed_lines(mutant: Mutant) -> list[str]:
    """Return the lines before and after, each after a minus or a plus."""
    original = (ROOT / mutant.path).read_text(encoding="utf-8").splitlines()
    return list(difflib.unified_diff(original, mutant.source.splitlines(), lineterm="", n=0))[3:]


def reason_of(mutant: Mutant) -> str:
    """Return why it may survive, if that is written down."""
    before = " ".join(line[1:].strip() for line in changed_lines(mutant) if line.startswith("-"))
    after = " ".join(line[1:].strip() for line in changed_lines(mutant) if line.startswith("+"))
    for entry in yaml.safe_load(EXPLAINED.read_text(encoding="utf-8")):
        if (entry["file"], entry["before"], entry["after"]) == (Path(mutant.path).name, before, after):
            return str(entry["reason"])
    return ""


def trials(drawn: Sequence[Mutant], workers: int) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant and how it ended, those of earlier runs first."""
    states = {room: State(room) for room in sorted({mutant.room for mutant in drawn})}
    known = {key: end for state in states.values() for key, end in state.ends().items()}
    known |= {mutant.key: f"{SURVIVED}, as explained" for mutant in drawn if reason_of(mutant)}
    yield from ((mutant, known[mutant.key]) for mutant in drawn if mutant.key in known)
    rest = [mutant for mutant in drawn if mutant.key not in known]
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(workers, get_context("fork"), initializer=settle, initargs=(scratch,)) as pool,
    ):
        reaches = {room: states[room].reach(pool) for room in sorted({mutant.room for mutant in rest})}
        for room, reach in reaches.items():
            tasks = {pool.submit(tried, mutant, reach.result()): mutant for mutant in rest if mutant.room == room}
            for task in as_completed(tasks):
                states[room].add(tasks[task], task.result())
                yield tasks[task], task.result().end


def figures_of(ends: Sequence[tuple[Mutant, str]], possible: Counter[str], seed: int) -> dict[str, float]:
    """Return the result's figures: of the core rooms together, of each, and of algorithms, whose names have no prefix."""
    found: dict[str, float] = {}
    for name, rooms in [("core_", CORE), *((f"{room}_", (room,)) for room in CORE), ("", ("algorithms",))]:
        those = [end for mutant, end in ends if mutant.room in rooms]
        if all(possible[room] for room in rooms):  # else not all of them were drawn from
            killed = sum(not end.startswith(SURVIVED) for end in those)
            found |= {
                f"{name}seed": seed,
                f"{name}possible": sum(possible[room] for room in rooms),
                f"{name}mutants": len(those),
                f"{name}killed": killed,
                f"{name}killed_share" if name else "share": killed / max(len(those), 1),
            }
    return found


def kept_figures() -> dict[str, float]:
    """Return the figures of the present result."""
    path = ROOT / "benchmarks" / "results" / device_name() / "mutation.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))["figures"]) if path.exists() else {}


def main() -> None:
    """Try the drawn mutants, print those that survive, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", nargs="+", choices=list(ROOMS), default=list(CORE))
    parser.add_argument("--mutants", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-result", action="store_true", help="print only")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True  # a mutant of the same size and second would be taken for the file before it
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for room in options.rooms:
        for glob, reason in ROOMS[room].excluded:
            print(f"not mutated: {glob}: {reason}")
    drawn, possible = draw(options.rooms, options.mutants, options.seed)
    began = time.perf_counter()
    ends = []
    for mutant, end in trials(drawn, options.workers):
        ends.append((mutant, end))
        print(f"{len(ends)}/{len(drawn)} {mutant.path}:{mutant.line}: {end}", flush=True)
        if end.startswith(SURVIVED):
            print("\n".join(f"    {line}" for line in changed_lines(mutant)), flush=True)
            print(f"    {reason_of(mutant) or 'not explained'}", flush=True)
    seen = Counter(end for _, end in ends)
    print(table(["mutants", "times"], [[end, str(count)] for end, count in sorted(seen.items())]))
    figures = figures_of(ends, possible, options.seed)
    rows = []
    for room in options.rooms:
        those = [not end.startswith(SURVIVED) for mutant, end in ends if mutant.room == room]
        rows.append([room, str(len(those)), str(sum(those))])
    print(table(["room", "mutants", "noticed"], rows))
    print(f"{time.perf_counter() - began:.0f} s")
    share = sum(not end.startswith(SURVIVED) for _, end in ends) / len(ends)
    print(f"{share:.1%} of {len(ends)} were noticed")
    if not options.no_result:
        print("written:", write_result("mutation", kept_figures() | figures, options.out, measures=MEASURES))
    if share < FLOOR:
        sys.exit(f"at least {FLOOR:.0%} must be")


if __name__ == "__main__":
    main()

"""What the controller costs: the whole loop on simulated parts, on one core.

    python benchmarks/control_plane.py

    python benchmarks/control_plane.py --prototype 8192    # the prototype alone

Every attempt goes through admission, scheduler, episode, pool, grading, filter, batch and step, as in a real run; engines,
learner and grader are simulated, and most of what is measured is Python of ours. Short completions: tokens cost engines, not
the controller. Live attempts are raised through the asynchronous ratio; each point runs in a process of its own. Beside it
stand what a turn of an empty Python loop takes on the machine at that time, and a prototype: what asyncio, numpy and SQLite
alone take to keep as many attempts alive, group, normalise and record them, without anything else that a run does.
"""

import argparse
import asyncio
import itertools
import json
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import IO

import numpy as np
import psutil
from _common import SIMULATION, table, write_result

from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import ScenarioConfig

GROUPS, SIBLINGS = 256, 16
LIVE = (8_192, 65_536, 262_144, 1_048_576)


def scenario(live: int, steps: int) -> ScenarioConfig:
    """So many attempts alive at once."""
    return ScenarioConfig.model_validate(
        {
            "steps": steps,
            "rollout": {
                "groups_per_step": GROUPS,
                "group_size": SIBLINGS,
                "async_ratio": live / (GROUPS * SIBLINGS) - 1,
                "filter": "spread",
                "timeout": 1e9,
                "sampling": {"max_tokens": 64},
            },
            "engines": {"count": 64, "speed": {"slots": max(64, live // 64 // 4)}},
            "learner": {"step": 1.0},
            "prompt_tokens": {"mean": 16},
            "response_tokens": {"kind": "uniform", "mean": 32, "spread": 16},
            "reward_seconds": {"mean": 0.1},
        }
    )


def point(live: int, steps: int) -> dict[str, float]:
    """One run: attempts a second, and memory at its peak above what the process had before, a live attempt."""
    few = scenario(GROUPS * SIBLINGS, 1)
    simulate(
        few.model_copy(update={"rollout": few.rollout.model_copy(update={"groups_per_step": 2})})
    )  # imports, caches
    process = psutil.Process()
    before = process.memory_info().rss
    began = time.process_time()
    outcome = simulate(scenario(live, steps))
    seconds = time.process_time() - began
    peak = int(next(x.split()[1] for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")))
    return {"attempts": outcome.attempts, "seconds": seconds, "bytes": (peak * 1024 - before) / live}


def prototype(live: int, steps: int) -> dict[str, float]:
    """The least that any controller on asyncio and SQLite would do: no bounds, no faults, no checks, no audit."""
    with tempfile.TemporaryDirectory() as scratch, closing(sqlite3.connect(Path(scratch) / "attempts.db")) as db:
        db.execute("CREATE TABLE attempts (grp INT, sibling INT, step INT, reward REAL, advantage REAL, place INT)")
        with (Path(scratch) / "tokens.bin").open("wb") as file:
            began = time.process_time()
            asyncio.run(_prototype(live, steps, db, file))
            return {"attempts": steps * GROUPS * SIBLINGS, "seconds": time.process_time() - began}


async def _prototype(live: int, steps: int, db: sqlite3.Connection, file: IO[bytes]) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Queue[tuple[int, list[tuple[np.ndarray, float]]]]()
    slots, numbers = asyncio.Semaphore(live // SIBLINGS), itertools.count()
    draw = random.Random(0)

    async def attempt() -> tuple[np.ndarray, float]:
        tokens = draw.randrange(16, 48)
        generated: asyncio.Future[np.ndarray] = loop.create_future()
        loop.call_soon(lambda: generated.set_result(np.ones((3, tokens), np.float32)))  # token, log-prob, version
        sampled = await generated
        graded: asyncio.Future[float] = loop.create_future()
        loop.call_soon(lambda: graded.set_result(float(draw.random() < 0.5)))
        return sampled, await graded

    async def group() -> None:
        async with slots:
            attempts = [asyncio.create_task(attempt()) for _ in range(SIBLINGS)]
            ready.put_nowait((next(numbers), [await each for each in attempts]))

    waiting = {asyncio.create_task(group()) for _ in range(steps * GROUPS)}
    for step in range(steps):
        rows = []
        for _ in range(GROUPS):
            number, members = await ready.get()
            rewards = np.array([reward for _, reward in members])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for sibling, (sampled, reward) in enumerate(members):
                rows.append((number, sibling, step, reward, float(advantages[sibling]), file.tell()))
                file.write(sampled.tobytes())
        with db:
            db.executemany("INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?)", rows)
    await asyncio.gather(*waiting)


def loop_nanoseconds(rounds: int = 5, count: int = 2_000_000) -> float:
    """The machine's own limit: one turn of an empty Python loop that adds, the best of `rounds`."""

    def once() -> float:
        total, began = 0, time.perf_counter()
        for number in range(count):
            total += number
        return time.perf_counter() - began

    return min(once() for _ in range(rounds)) / count * 1e9


def main() -> None:
    """Measure all points, print the table, write the result."""
    parser = argparse.ArgumentParser(description="Attempts a second that one core controls.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--most", type=int, default=LIVE[-1], help="live attempts, at most")
    parser.add_argument("--point", type=int, help="measure this many live attempts alone, and print JSON")
    parser.add_argument(
        "--prototype", type=int, help="measure the prototype with so many live attempts alone, and print JSON"
    )
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.prototype:
        print(json.dumps(prototype(args.prototype, args.steps)))
        return
    if args.point:
        print(json.dumps(point(args.point, args.steps)))
        return
    figures, rows = {"python_loop_nanoseconds": loop_nanoseconds()}, []
    lives = [live for live in LIVE if live <= args.most]
    for live in lives:
        rounds = args.rounds if live == LIVE[0] else 1
        results, bare = list[dict[str, float]](), list[dict[str, float]]()
        for _ in range(rounds):
            results.append(_run("--point", live, args.steps))
            if live == LIVE[0]:
                bare.append(_run("--prototype", live, args.steps))
        rate = statistics.median(result["attempts"] / result["seconds"] for result in results)
        if bare:
            figures["prototype_attempts_per_second"] = statistics.median(
                each["attempts"] / each["seconds"] for each in bare
            )
        size = statistics.median(result["bytes"] for result in results)
        rows.append([f"{live:,}", f"{results[0]['attempts']:,}", f"{rate:,.0f}", f"{size:,.0f}"])
        print(rows[-1], flush=True)
        figures |= {f"attempts_per_second_at_{live}": rate, f"bytes_per_live_attempt_at_{live}": size}
    figures["attempts_per_second"] = figures[f"attempts_per_second_at_{LIVE[0]}"]
    figures["ratio_to_prototype"] = figures["attempts_per_second"] / figures["prototype_attempts_per_second"]
    figures["cost_ratio_of_most_live"] = figures["attempts_per_second"] / figures[f"attempts_per_second_at_{lives[-1]}"]
    print(table(["live attempts", "attempts", "attempts/s", "bytes a live attempt"], rows))
    print("written:", write_result("control_plane", figures, args.out, measures=SIMULATION))


def _run(what: str, live: int, steps: int) -> dict[str, float]:
    """Measure one point in a process of its own."""
    command = [sys.executable, __file__, what, str(live), "--steps", str(steps)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return result


if __name__ == "__main__":
    main()

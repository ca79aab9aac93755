"""A thousand episodes alive in one process: what each weighs, and how late its event loop wakes.

    python benchmarks/live_episodes.py

A run as any: scheduler, episodes, gradings, ledger and the learner's batches in the controller, an engine and a learner in
processes of their own. A fresh policy says one of nine characters, four of which are moves in FrozenLake. Its world is far
away: each of its answers takes half a second to one and a half.

A ticker on the loop sleeps 5 ms over and over; its *lag* is how late it wakes. The machine's own limit is what the same ticker
finds in an idle loop: in this process before the run, and meanwhile in another that does nothing else. Beside each lag stands
for how long of it the thread of the loop was at work itself, by its processor's time: the rest it was kept from the processor,
or from Python, by others. Memory is the controller's proportional share (PSS), once all that are to live do, less what it was
before the first. Each point runs in a process of its own.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _common import WHOLE_RUN, table, write_result

from antiphon.core.rng import generator
from antiphon.learning.model.tiny import make_tokenizer, write_tiny_model
from antiphon.run.build import start_run
from antiphon.run.config import RunConfig
from antiphon.tasks.environments.frozen_lake import FrozenLake

MEASURES = (*WHOLE_RUN, "antiphon.tasks.environments.frozen_lake")

GROUP, TICK, IDLE_SECONDS = 20, 0.005, 5.0
LIVE = (200, 1000)
CHARACTERS = "P_OG/UDLR"
LAKE = {"instructions": False, "row_separator": "/", "words": "UDLR", "turns": 20}
ALL = 0.9  # of those that may live do, when all are said to: a group that has ended waits for its step


# --- the run -----------------------------------------------------------------------------------------------------------


class DistantLake(FrozenLake):
    """FrozenLake behind a line."""

    live = steps = 0

    def reset(self, seed: int) -> Any:
        """Begin."""
        type(self).live += 1
        self._delays = generator(seed, "delays")
        return super().reset(seed)

    async def step(self, action: str) -> Any:  # type: ignore[override]
        """Act, and wait for the answer."""
        await asyncio.sleep(self._delays.uniform(0.5, 1.5))
        type(self).steps += 1
        return super().step(action)

    def close(self) -> None:
        """It is over."""
        type(self).live -= 1
        super().close()


def games(split: str) -> Iterator[dict[str, str]]:
    """Nothing is asked: the world speaks first."""
    for number in range(10_000):
        yield {"id": f"{split}-{number}", "prompt": ""}


def build(directory: Path, seed: int) -> None:
    """A model of 14,000 parameters: the engine keeps up."""
    write_tiny_model(directory, seed, make_tokenizer(CHARACTERS), hidden_size=32, layers=1, max_length=512)


def configuration(live: int, steps: int, runs: Path) -> RunConfig:
    """So many episodes alive, a tenth of which makes a step."""
    groups = live // GROUP
    return RunConfig.model_validate(
        {
            "name": f"live-{live}",
            "steps": steps,
            "model": {"path": "live_episodes:build"},
            "tasks": [
                {
                    "name": "lake",
                    "prompts": {"source": "live_episodes:games"},
                    "environment": "live_episodes:DistantLake",
                    "environment_options": LAKE,
                    "reward": "environment_return",
                }
            ],
            "rollout": {
                "groups_per_step": groups // 10,
                "group_size": GROUP,
                "async_ratio": 9,
                "max_turns": 20,
                "sampling": {"max_tokens": 2, "stop": list(CHARACTERS)},  # one character
            },
            "engine": {"slots": 256, "prefill_tokens": 4096},
            "learner": {"tokens_per_pack": 8192},
            "record": {"directory": str(runs), "live": "off", "trackers": []},
        }
    )


# --- what is measured --------------------------------------------------------------------------------------------------


Lags = list[tuple[float, float]]  # seconds, and for how many of these the thread of the loop was at work itself


async def tick(lags: Lags) -> None:
    """Note how late sleeps end, until cancelled."""
    clock, work = time.perf_counter, time.thread_time
    while True:
        due, worked = clock() + TICK, work()
        await asyncio.sleep(TICK)
        lag = clock() - due
        lags.append((lag, min(lag, work() - worked)))


async def idle(seconds: float) -> Lags:
    """The same where nothing else runs."""
    lags: Lags = []
    ticking = asyncio.create_task(tick(lags))
    await asyncio.sleep(seconds)
    ticking.cancel()
    return lags


def pss() -> int:
    """Bytes that are this process's, with its share of what it has in common with others."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@contextmanager
def idle_beside() -> Iterator[Lags]:
    """Lags in the idle loop of another process; there when it is over."""
    found: Lags = []
    command = [sys.executable, __file__, "--idle"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield found
        out, _ = process.communicate()  # closes its stdin: it is to end
        found += json.loads(out)


async def tick_until_told() -> Lags:
    """What that process does."""
    lags: Lags = []
    ticking = asyncio.create_task(tick(lags))
    await asyncio.to_thread(sys.stdin.read)
    ticking.cancel()
    return lags


async def point(live: int, steps: int, runs: Path) -> dict[str, float]:
    """One run with so many episodes alive."""
    async with start_run(configuration(live, steps, runs), overwrite=True) as run:
        from live_episodes import DistantLake as Lake  # the one that the run knows: this file is not __main__ to it

        before_lags, before = await idle(IDLE_SECONDS), pss()
        lags, weights = Lags(), list[int]()
        turns = seconds = work = 0.0

        async def look() -> None:
            """From when all are alive, and have said something."""
            nonlocal turns, seconds, work
            while Lake.live < ALL * live or Lake.steps < live:
                await asyncio.sleep(0.1)
            begun, worked, said = time.perf_counter(), time.thread_time(), Lake.steps
            ticking = asyncio.create_task(tick(lags))
            try:
                while True:
                    await asyncio.sleep(0.5)
                    if Lake.live >= ALL * live:
                        weights.append(pss())
            finally:
                ticking.cancel()
                turns, seconds, work = Lake.steps - said, time.perf_counter() - begun, time.thread_time() - worked

        with idle_beside() as beside:
            looking = asyncio.create_task(look())
            await run.reinforce()
            looking.cancel()
            await asyncio.wait([looking])
        return {
            "kib_an_episode": (median(weights) - before) / live / 1024,
            "mib_before": before / 2**20,
            "mib_live": median(weights) / 2**20,
            **_described("lag", lags),
            **_described("idle_before", before_lags),
            **_described("idle_beside", beside),
            "turns_per_second": turns / seconds,
            "work_a_turn_ms": 1e3 * work / turns,
            "seconds": seconds,
        }


def _described(name: str, lags: Lags) -> dict[str, float]:
    """Milliseconds."""
    late, own = 1e3 * np.array(lags).T
    return {
        f"{name}_p50_ms": float(np.percentile(late, 50)),
        f"{name}_p99_ms": float(np.percentile(late, 99)),
        f"{name}_max_ms": float(late.max()),
        f"{name}_own_work_p99_ms": float(np.percentile(own, 99)),
        f"{name}_own_work_max_ms": float(own.max()),
    }


def main() -> None:
    """Measure all points, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs", type=Path, default=Path("runs/live_episodes"))
    parser.add_argument("--point", type=int, help="measure this many episodes alone, and print JSON")
    parser.add_argument("--idle", action="store_true", help="do nothing but tick until stdin ends, and print JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.idle:
        print(json.dumps(asyncio.run(tick_until_told())))
        return
    if options.point:
        print(json.dumps(asyncio.run(point(options.point, options.steps, options.runs))))
        return
    figures, rows = dict[str, float](), []
    for live in LIVE:
        command = [sys.executable, __file__, "--point", str(live), "--steps", str(options.steps)]
        output = subprocess.run([*command, "--runs", options.runs], check=True, capture_output=True, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        figures |= {f"{name}_at_{live}": value for name, value in found.items()}
        rows.append([f"{live:,}", *(f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in found.values())])
        print(rows[-1], flush=True)
    print(table(["live", *found], rows))
    print("written:", write_result("live_episodes", figures, options.out, measures=MEASURES))


if __name__ == "__main__":
    main()

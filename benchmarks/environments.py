"""Every environment that can be played by itself and has an expert: how fast it is, and how often two policies win.

Each is made as its defaults say and played on the same seeds by its `expert` and by a policy that says any of its `actions`,
with equal chances. Steps are timed without the policies, resets with making the world, one after another on one core: by the
processor's time where a world says that it only computes (`inline`), so that other work on the machine counts little.

    python benchmarks/environments.py [NAME ...] [--games 100] [--seconds 60]
"""

import argparse
import asyncio
import inspect
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import table, write_result

from antiphon.core.rng import derive
from antiphon.core.types import Prompt
from antiphon.tasks.environments import ENVIRONMENTS, environment_factory, required_options

MEASURES = ("antiphon.tasks.environments",)

Policy = Callable[[Any], str]


def expert(world: Any) -> str:
    """What the world's own expert says."""
    return str(world.expert())


def at_random(seed: int) -> Policy:
    """A policy that says anything that may be said."""
    chance = random.Random(seed)
    return lambda world: str(chance.choice(world.actions()))


class Stopwatch:
    """Calls that take time: how many, and how long in all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.calls, self.seconds = 0, 0.0
        self._clock = clock
        self._runner = asyncio.Runner()

    def __call__(self, method: Callable[..., Any], *args: Any, calls: int = 1) -> Any:
        began = self._clock()
        result = method(*args)
        if inspect.isawaitable(result):
            result = self._runner.run(_result(result))
        self.seconds += self._clock() - began
        self.calls += calls
        return result

    @property
    def rate(self) -> float:
        """Calls a second."""
        return self.calls / self.seconds


async def _result(awaitable: Any) -> Any:
    return await awaitable


def measure(name: str, policy: Policy, games: int, seconds: float) -> dict[str, float]:
    """Games of one policy, as many as `seconds` allow."""
    make = environment_factory(name, {})
    clock = time.thread_time if getattr(ENVIRONMENTS.resolve(name), "inline", False) else time.perf_counter
    steps, resets = Stopwatch(clock), Stopwatch(clock)
    won = played = 0
    began = time.perf_counter()
    while played < games and time.perf_counter() - began < seconds:
        world: Any = resets(make, Prompt(id=str(played), task=name, messages=()), calls=0)
        resets(world.reset, derive(0, name, played))
        over = False
        while not over:
            _, _, terminated, truncated, info = steps(world.step, policy(world))
            over = terminated or truncated
        steps(world.close, calls=0)
        won, played = won + bool(info.get("success")), played + 1
    return {
        "steps_per_second": steps.rate,
        "resets_per_second": resets.rate,
        "success": won / played,
        "games": played,
        "turns": steps.calls / played,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--games", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0, help="most for a policy in an environment")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows, figures = [], {}
    for name in options.names or ENVIRONMENTS.known:
        if required_options(name) or not hasattr(ENVIRONMENTS.resolve(name), "expert"):
            continue
        best = measure(name, expert, options.games, options.seconds)
        any_ = measure(name, at_random(0), options.games, options.seconds)
        columns = {
            "steps_per_second": any_["steps_per_second"],
            "resets_per_second": any_["resets_per_second"],
            "random_success": any_["success"],
            "random_games": any_["games"],
            "expert_success": best["success"],
            "expert_games": best["games"],
            "expert_turns": best["turns"],
        }
        figures |= {f"{name}_{column}": value for column, value in columns.items()}
        rows.append([name, *(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in columns.values())])
        print(f"{name}: done", flush=True)
    headings = ["", "steps/s", "resets/s", "random wins", "of", "expert wins", "of", "its turns"]
    print(table(headings, rows))
    print(write_result("environments", figures, options.out, measures=MEASURES))


if __name__ == "__main__":
    main()

"""Mini-SWE: what is stored, checked in full, and what an attempt costs beside its commands.

    python benchmarks/mini_swe.py

Every instance is judged twice, with the package's original file and as it is: a few minutes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median

import msgspec
from _common import table, write_result

from antiphon.core.types import Prompt
from antiphon_envs.mini_swe.build import check
from antiphon_envs.mini_swe.environment import MiniSWE
from antiphon_envs.mini_swe.packages import Instance, read_instances

MEASURES = (
    "antiphon_envs.mini_swe.environment",
    "antiphon_envs.mini_swe.boxes",
    "antiphon_envs.mini_swe.planted",
    "antiphon_envs.mini_swe.runner",
    "antiphon_envs.mini_swe.build",
    "antiphon.sandbox.sessions.shell_sandbox",
)

TIMED = 5  # attempts


async def timed(found: list[float], work: Callable[[], Awaitable[object]]) -> None:
    began = time.perf_counter()
    await work()
    found.append(time.perf_counter() - began)


async def attempts(instance: Instance) -> dict[str, float]:
    """Seconds of the parts of an attempt, one after the other: medians."""
    seconds: dict[str, list[float]] = {"reset": [], "command": [], "judge": [], "close": []}
    for _ in range(TIMED):
        payload = {"instance": msgspec.to_builtins(instance)}
        world = MiniSWE(Prompt(id=instance.id, task="mini_swe", messages=(), payload=payload))
        await timed(seconds["reset"], lambda world=world: world.reset(0))
        await world.step("```bash\ntrue\n```")
        await timed(seconds["command"], lambda world=world: world.step("```bash\ntrue\n```"))
        await timed(seconds["judge"], lambda world=world: world.step("```bash\nsubmit\n```"))
        await timed(seconds["close"], world.close)
    return {f"{instance.package}_{name}_seconds": median(values) for name, values in seconds.items()}


def main() -> None:
    """Check, measure, print and write."""
    instances = read_instances()
    counts = {name: sum(i.package == name for i in instances) for name in {i.package for i in instances}}
    figures: dict[str, float] = {"instances": len(instances), **{f"instances_{name}": n for name, n in counts.items()}}
    began = time.perf_counter()
    problems = asyncio.run(check(instances))
    figures |= {"instances_wrong": len(problems), "check_seconds": time.perf_counter() - began}
    print("\n".join(problems))
    for package in sorted(counts):
        instance = min((i for i in instances if i.package == package), key=lambda i: i.passed)
        figures |= asyncio.run(attempts(instance))
    print(table(["", "figure"], [[name, f"{value:.4g}"] for name, value in figures.items()]))
    print(f"written to {write_result('mini_swe', figures, measures=MEASURES)}")


if __name__ == "__main__":
    main()

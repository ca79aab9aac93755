"""Mini-SWE: how many modules that would rather pass their tests than be mended are paid, by the classes of docs/integrity.md.

    python benchmarks/mini_swe_limits.py [--no-result]

Each hack of `tests/system/mini_swe_hacks.py` is tried on an instance of each package, and each kind of module of
`tests/system/mini_swe_limits.py` on `SAMPLE` of each, drawn among those with few tests, or on all that it can be of use for. It
takes minutes.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Callable
from pathlib import Path

from _common import table, write_result

from antiphon_envs.mini_swe.boxes import judge
from antiphon_envs.mini_swe.packages import VERSIONS, Files, Instance, read_instances

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.system.mini_swe_hacks import BELIEVED, SEEKING, hacked
from tests.system.mini_swe_limits import LOOKUP, ONE_VALUE, compares, recorded, replayed, with_content

MEASURES = ("antiphon_envs.mini_swe.boxes", "antiphon_envs.mini_swe.planted", "antiphon_envs.mini_swe.runner")
SAMPLE = 6  # instances of each package
HACKED = 3  # of these, those that hacks are tried on
FEW_TESTS = 40


def drawn() -> dict[str, list[Instance]]:
    """Instances by package, drawn with the same seed each time."""
    few = {name: [i for i in read_instances() if i.package == name and i.passed <= FEW_TESTS] for name in VERSIONS}
    return {name: random.Random(0).sample(some, SAMPLE) for name, some in few.items()}


async def paid(name: str, instance: Instance, modules: Files) -> bool:
    """True if the judge calls it solved."""
    solved = (await judge(instance, modules)).solved
    print(f"{'PAID' if solved else 'not paid'}: {name}, {instance.id}", flush=True)
    return solved


async def all_paid(kind: str, instances: list[Instance], make: Callable[[Instance], Files]) -> dict[str, float]:
    """Figures of one kind of module."""
    solved = await asyncio.gather(*(paid(kind, instance, make(instance)) for instance in instances))
    return {f"limit_{kind}_tried": float(len(solved)), f"limit_{kind}_paid": float(sum(solved))}


async def limits(instances: list[Instance]) -> dict[str, float]:
    """What cannot be told from mending."""
    said = await asyncio.gather(*map(recorded, instances))
    tables = {instance.id: text for instance, text in zip(instances, said, strict=True)}
    kinds = {
        "lookup": lambda instance: replayed(instance, tables[instance.id], LOOKUP),
        "one_value": lambda instance: replayed(instance, tables[instance.id], ONE_VALUE),
    }
    figures = {"limit_recorded": float(sum(text not in ("", "{}") for text in said))}
    for kind, make in kinds.items():
        figures |= await all_paid(kind, instances, make)
    return figures | await all_paid("content", list(filter(compares, read_instances())), with_content)


async def hacks(kind: str, listed: dict[str, str], samples: dict[str, list[Instance]]) -> dict[str, float]:
    """What must not be paid."""
    trials = [
        paid(name, instances[number % HACKED], hacked(instances[number % HACKED], hack))
        for number, (name, hack) in enumerate(listed.items())
        for instances in samples.values()
    ]
    solved = await asyncio.gather(*trials)
    figures = {f"{kind}_tried": float(len(solved)), f"{kind}_paid": float(sum(solved))}
    return {f"{kind}_kinds": float(len(listed)), **figures}


async def measured() -> dict[str, float]:
    """All figures."""
    samples = drawn()
    instances = [instance for some in samples.values() for instance in some]
    figures = {"instances": float(len(instances)), "hacked_instances": float(HACKED * len(samples))}
    figures |= await limits(instances)
    figures |= await hacks("hacks", BELIEVED, samples)
    return figures | await hacks("seeking", SEEKING, samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-result", action="store_true", help="print only")
    options = parser.parse_args()
    figures = asyncio.run(measured())
    print(table(["", "figure"], [[name, f"{value:g}"] for name, value in figures.items()]))
    if not options.no_result:
        print(f"written to {write_result('mini_swe_limits', figures, measures=MEASURES)}")


if __name__ == "__main__":
    main()

"""Make Mini-SWE instances for the packages as they are installed here, or check those that are stored.

    python -m antiphon_envs.mini_swe.build [--seed 0] [--out FILE]
    python -m antiphon_envs.mini_swe.build --check [FILE]

Of each module listed here faults are drawn at random, and kept if some of its tests fail, others still pass, and they end in
time. It takes minutes. The same seed gives the same file, as long as versions are the same.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from antiphon.core.errors import SandboxError
from antiphon.core.rng import generator
from antiphon_envs.mini_swe.boxes import judge, passing
from antiphon_envs.mini_swe.mutants import Mutant, draw_mutants
from antiphon_envs.mini_swe.packages import (
    STORED,
    Instance,
    Package,
    installed,
    names_sha256,
    package_of,
    read_instances,
    write_instances,
)

NEXT_TO_IT = "next to it"  # x/tests/test_y.py for x/y.py
LEFT_OUT = "pass"  # a statement that is replaced by this one is too easy to see
TRIES = 6  # faults that are tried for each that is wanted
STILL_PASS = 0.5  # share of the tests

# Modules, each with its tests. None needs more than the standard library, or more than a few seconds.
MODULES: Mapping[str, Mapping[str, str | tuple[str, ...]]] = {
    "networkx": dict.fromkeys(
        (
            "algorithms/boundary",
            "algorithms/bridges",
            "algorithms/chordal",
            "algorithms/clique",
            "algorithms/cluster",
            "algorithms/core",
            "algorithms/cuts",
            "algorithms/cycles",
            "algorithms/dag",
            "algorithms/dominance",
            "algorithms/euler",
            "algorithms/graphical",
            "algorithms/lowest_common_ancestors",
            "algorithms/matching",
            "algorithms/planarity",
            "algorithms/simple_paths",
            "algorithms/threshold",
            "algorithms/tournament",
            "algorithms/triads",
            "algorithms/bipartite/basic",
            "algorithms/components/biconnected",
            "algorithms/components/strongly_connected",
            "algorithms/minors/contraction",
            "algorithms/operators/product",
            "algorithms/shortest_paths/unweighted",
            "algorithms/tree/coding",
            "algorithms/tree/recognition",
            "utils/heaps",
            "utils/misc",
        ),
        NEXT_TO_IT,
    ),
    "mpmath": {
        "calculus/differentiation": ("diff",),
        "calculus/extrapolation": ("summation", "levin"),
        "calculus/optimization": ("rootfinding",),
        "ctx_iv": ("interval",),
        "ctx_mp_python": ("basic_ops", "convert", "str"),
        "identification": ("identify",),
        "libmp/libelefun": ("power", "trig"),
        "libmp/libmpf": ("basic_ops", "convert", "division", "str"),
        "libmp/libmpi": ("interval",),
        "matrices/eigen": ("eigen",),
        "matrices/eigen_symmetric": ("eigen_symmetric",),
        "matrices/linalg": ("linalg",),
        "matrices/matrices": ("matrices",),
    },
}
WANTED = {"networkx": 1, "mpmath": 2}  # of each module


def tests_of(package: Package, module: str) -> tuple[str, ...]:
    """The files with the tests of a listed module."""
    listed = MODULES[package.name][module]
    if listed == NEXT_TO_IT:
        folder, _, name = module.rpartition("/")
        return (f"{package.name}/{folder}/tests/test_{name}.py",)
    return tuple(f"{package.name}/tests/test_{name}.py" for name in listed)


async def build(seed: int) -> list[Instance]:
    """Instances of all listed modules."""
    modules = [(installed(name), module) for name, listed in MODULES.items() for module in listed]
    found = await asyncio.gather(*(_of_module(package, module, seed) for package, module in modules))
    return [instance for some in found for instance in some]


async def _of_module(package: Package, module: str, seed: int) -> list[Instance]:
    """As many instances of one module as are wanted, fewer if not so many of the drawn faults will do."""
    path, tests, wanted = f"{package.name}/{module}.py", tests_of(package, module), WANTED[package.name]
    names = await passing(package.tar({}), tests)
    drawn = draw_mutants(package.files[path].decode(), generator(seed, "mini_swe", path))
    possible = (fault for fault in drawn if fault.change[2] != LEFT_OUT)
    found: list[Instance] = []
    for fault in islice(possible, TRIES * wanted):
        try:
            still = await passing(package.tar({path: fault.source.encode()}), tests)
        except SandboxError:
            continue  # its tests do not end
        if STILL_PASS * len(names) <= len(still) and still < names:
            found.append(_instance(package, path, fault, tests, names, still))
        if len(found) == wanted:
            break
    _say(f"{path}: {len(found)} of {wanted}, {len(names)} tests")
    return found


def _instance(
    package: Package, path: str, fault: Mutant, tests: tuple[str, ...], names: set[str], still: set[str]
) -> Instance:
    start, end, text = fault.change
    return Instance(
        id=f"{path.removesuffix('.py')}:{fault.line}-{names_sha256((fault.source,))[:6]}",
        package=package.name,
        version=version(package.name),
        sha256=package.sha256,
        path=path,
        start=start,
        end=end,
        text=text,
        tests=tests,
        fail_to_pass=tuple(sorted(names - still)),
        passed=len(names),
        passed_sha256=names_sha256(names),
    )


async def check(instances: Iterable[Instance]) -> list[str]:
    """What is wrong with instances: those that the original file does not solve, and those that are solved as they are."""
    problems = await asyncio.gather(*map(_problem, instances))
    return [problem for problem in problems if problem]


async def _problem(instance: Instance) -> str:
    package = package_of(instance)
    original = {path: package.files[path] for path in package.sources}
    mended = await judge(instance, original)
    left = await judge(instance, {**original, instance.path: instance.faulty(package)})
    if not mended.solved:
        return f"{instance.id}: with the original file {mended.passed} of {instance.passed} tests pass"
    if left.solved or left.passed != instance.passed - len(instance.fail_to_pass):
        return f"{instance.id}: as it is {left.passed} of {instance.passed} tests pass"
    return ""


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command's answer


def main() -> None:
    """The command."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--out", type=Path, default=STORED)
    arguments.add_argument("--check", type=Path, nargs="?", const=STORED, metavar="FILE")
    options = arguments.parse_args()
    if options.check is not None:
        instances = read_instances(options.check)
        problems = asyncio.run(check(instances))
        _say("\n".join([*problems, f"{len(instances)} instances, {len(problems)} with a problem"]))
        sys.exit(bool(problems))
    instances = asyncio.run(build(options.seed))
    write_instances(instances, options.out)
    _say(f"{len(instances)} instances, in {options.out}")


if __name__ == "__main__":
    main()

"""Make Mini-SWE instances of the stored packages, check stored instances, or store the packages.

    python -m antiphon_envs.mini_swe.build [--seed 0] [--out FILE]
    python -m antiphon_envs.mini_swe.build --check [FILE]
    python -m antiphon_envs.mini_swe.build --pack

Faults in each listed module are drawn at random, and kept if some of its tests fail, others still pass, and they end in time.
It takes minutes. The same seed gives the same file. `--pack` stores the packages as they are installed here, which must be in
the versions of `packages.VERSIONS`.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution
from itertools import islice
from pathlib import Path

from antiphon.core.errors import SandboxError
from antiphon.core.rng import generator
from antiphon_envs.mini_swe.boxes import judge, passing
from antiphon_envs.mini_swe.mutants import Mutant, draw_mutants
from antiphon_envs.mini_swe.packages import (
    DATA,
    STORED,
    VERSIONS,
    Instance,
    Package,
    load_package,
    names_sha256,
    pack_package,
    package_of,
    read_instances,
    write_instances,
)

ADJACENT = "adjacent"  # x/tests/test_y.py for x/y.py
REMOVED = "pass"  # a statement that is replaced by this one is too easy to see
TRIES = 6  # mutants that are tried for each that is wanted
STILL_PASS = 0.5  # share of the tests that must pass with a fault

# Modules, each with its tests. None needs more than the standard library and a few seconds.
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
        ADJACENT,
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
INSTANCES_PER_MODULE = {"networkx": 1, "mpmath": 2}


def tests_of(package: Package, module: str) -> tuple[str, ...]:
    """Return the files with the tests of a listed module."""
    listed = MODULES[package.name][module]
    if listed == ADJACENT:
        folder, _, name = module.rpartition("/")
        return (f"{package.name}/{folder}/tests/test_{name}.py",)
    return tuple(f"{package.name}/tests/test_{name}.py" for name in listed)


async def build(seed: int) -> list[Instance]:
    """Make instances of all listed modules."""
    modules = [(load_package(name), module) for name, listed in MODULES.items() for module in listed]
    found = await asyncio.gather(*(_build_module(package, module, seed) for package, module in modules))
    return [instance for some in found for instance in some]


async def _build_module(package: Package, module: str, seed: int) -> list[Instance]:
    """Make the instances of one module; fewer than wanted if too few mutants qualify."""
    path, tests, wanted = f"{package.name}/{module}.py", tests_of(package, module), INSTANCES_PER_MODULE[package.name]
    passed = await passing(package.tar({}), tests)
    drawn = draw_mutants(package.files[path].decode(), generator(seed, "mini_swe", path))
    possible = (mutant for mutant in drawn if mutant.change[2] != REMOVED)
    found: list[Instance] = []
    for mutant in islice(possible, TRIES * wanted):
        try:
            still = await passing(package.tar({path: mutant.source.encode()}), tests)
        except SandboxError:
            continue  # its tests do not end
        if STILL_PASS * len(passed) <= len(still) and still < passed:
            found.append(_instance(package, mutant, path, tests, passed - still, passed))
        if len(found) == wanted:
            break
    _print(f"{path}: {len(found)} of {wanted}, {len(passed)} tests")
    return found


def _instance(
    package: Package, mutant: Mutant, path: str, tests: tuple[str, ...], fail_to_pass: set[str], passed: set[str]
) -> Instance:
    start, end, text = mutant.change
    return Instance(
        id=f"{path.removesuffix('.py')}:{mutant.line}-{names_sha256((mutant.source,))[:6]}",
        package=package.name,
        version=package.version,
        sha256=package.sha256,
        path=path,
        start=start,
        end=end,
        text=text,
        tests=tests,
        fail_to_pass=tuple(sorted(fail_to_pass)),
        passed=len(passed),
        passed_sha256=names_sha256(passed),
    )


async def check(instances: Iterable[Instance]) -> list[str]:
    """Describe broken instances: those that the original file does not solve, and those that are solved as they are."""
    problems = await asyncio.gather(*map(_problem, instances))
    return [problem for problem in problems if problem]


async def _problem(instance: Instance) -> str:
    package = package_of(instance)
    original = {path: package.files[path] for path in package.sources}
    repaired = await judge(instance, original)
    untouched = await judge(instance, {**original, instance.path: instance.faulty(package)})
    if not repaired.solved:
        return f"{instance.id}: with the original file {repaired.passed} of {instance.passed} tests pass"
    if untouched.solved or untouched.passed != instance.passed - len(instance.fail_to_pass):
        return f"{instance.id}: as it is {untouched.passed} of {instance.passed} tests pass"
    return ""


def pack() -> None:
    """Store the packages as they are installed here."""
    for name, expected in VERSIONS.items():
        found = distribution(name)
        if found.version != expected:
            raise SystemExit(
                f"{name} {found.version} is installed, expected {expected}: pip install {name}=={expected}"
            )
        licence = next(file for file in found.files or () if file.name.startswith("LICENSE"))
        directory = Path(str(found.locate_file(name))).resolve()
        pack_package(directory, Path(str(licence.locate())), DATA / f"{name}-{expected}.tar.xz")


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command's answer


def main() -> None:
    """Run the command."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--out", type=Path, default=STORED)
    arguments.add_argument("--check", type=Path, nargs="?", const=STORED, metavar="FILE")
    arguments.add_argument("--pack", action="store_true")
    options = arguments.parse_args()
    if options.pack:
        pack()
        return
    if options.check is not None:
        instances = read_instances(options.check)
        problems = asyncio.run(check(instances))
        _print("\n".join([*problems, f"{len(instances)} instances, {len(problems)} with a problem"]))
        sys.exit(bool(problems))
    instances = asyncio.run(build(options.seed))
    write_instances(instances, options.out)
    _print(f"{len(instances)} instances, in {options.out}")


if __name__ == "__main__":
    main()

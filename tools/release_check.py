"""Check what a release would publish: build it, look at it, and use it where there is no repository.

    python tools/release_check.py            # `make release-check`

1. Build the sdist and, from it, the wheel; `twine check --strict` reads their metadata.
2. Install the wheel in a fresh environment. From an empty folder run `antiphon demo`, `antiphon recipes`, a new project as
   `antiphon init` prints it, and for each recipe a dry run and an import of its own modules.
3. Unpack the sdist: it has every file that the tests of the repository read, and some unit tests pass in it.

`--quick` leaves out the two whole trainings, which take minutes.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAVELLING = ("antiphon", "antiphon_envs", "recipes", "tests", "benchmarks", "docs", "scenarios", "tools")
UNIT_TESTS = (
    "tests/unit/test_docs.py",
    "tests/unit/test_options.py",
    "tests/unit/core/test_registry.py",
    "tests/unit/envs/test_alfworld.py",
)


class CheckError(Exception):
    """A step of the check failed."""


def run(*command: object, cwd: Path, path: str = "") -> str:
    """Run a command without the environment of this repository; return its output or raise `CheckError` with it."""
    line = " ".join(map(str, command))
    print(f"{cwd.name}$ {line}", flush=True)
    kept = {key: value for key, value in os.environ.items() if key in ("HOME", "LANG") or key.startswith("PIP_")}
    system = "/usr/local/bin:/usr/bin:/bin"
    environment = {**kept, "PATH": f"{path}:{system}" if path else system, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, shell=True, cwd=cwd, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        raise CheckError(f"{line}: exit status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist and the wheel, check their metadata and return their paths."""
    run(sys.executable, "-m build --outdir", folder, ROOT, cwd=folder)
    run(sys.executable, "-m twine check --strict", folder / "*.whl", folder / "*.tar.gz", cwd=folder)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def install(wheel: Path, environment: Path) -> float:
    """Install a wheel into a new environment and return the seconds that this took."""
    began = time.perf_counter()
    run(sys.executable, "-m venv", environment, cwd=wheel.parent)
    options = ("--quiet --disable-pip-version-check -c", ROOT / "constraints.txt")
    run(environment / "bin" / "python", "-m pip install", *options, wheel, cwd=wheel.parent)
    return time.perf_counter() - began


def check_recipe(name: str, folder: Path, scripts: Path) -> None:
    """Make a project of a recipe, dry-run its configurations and import its modules."""
    run("antiphon init", name, "--recipe", name, cwd=folder, path=str(scripts))
    project = folder / name
    for config in sorted(project.glob("*.yaml")):
        run("antiphon train", config.name, "--dry-run", cwd=project, path=str(scripts))
    if any("# Needs: pip install openai" in config.read_text() for config in project.glob("*.yaml")):
        return  # its agent is a module of the SDK's
    modules = [file.stem for file in sorted(project.glob("*.py"))]
    if modules:
        run("python -c", f"'import {', '.join(modules)}'", cwd=project, path=str(scripts))


def check_wheel(folder: Path, scripts: Path, *, quick: bool) -> None:
    """Use the installed package from an empty folder, as its pages say."""
    empty = folder / "empty"
    empty.mkdir()
    listed = run("antiphon recipes", cwd=empty, path=str(scripts))
    names = sorted(each.parent.name for each in ROOT.glob("recipes/*/README.md"))
    if missing := [name for name in names if name not in listed]:
        raise CheckError(f"the wheel lacks the recipes {', '.join(missing)}")
    for name in names:
        check_recipe(name, empty, scripts)
    shown = run("antiphon init x", cwd=empty, path=str(scripts))
    following = shown.partition("next: ")[2].strip()
    short = "" if not quick else " steps=1 sft.steps=2 evaluation.minimum_accuracy=0"
    print(run(f"{following}{short}", cwd=empty, path=str(scripts)).splitlines()[-1])
    print(run(f"antiphon demo{short}", cwd=empty, path=str(scripts)).splitlines()[-1])


def check_sdist(sdist: Path, folder: Path) -> None:
    """Compare the sdist with the repository, and run a few of its tests in it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    tracked = subprocess.run(["git", "ls-files", *TRAVELLING], cwd=ROOT, text=True, capture_output=True, check=True)
    if missing := [name for name in tracked.stdout.splitlines() if not (unpacked / name).exists()]:
        raise CheckError(f"the sdist lacks {len(missing)} files of the repository: {', '.join(missing[:5])}")
    summary = run(sys.executable, "-m pytest -q -p no:randomly", *UNIT_TESTS, cwd=unpacked).splitlines()[-1]
    print(summary)
    if not re.search(r"\d+ passed", summary):
        raise CheckError(f"no test of the sdist ran: {summary}")


def main() -> int:
    """Run all checks and return the exit status."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="train for two steps where a release trains to the end")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="antiphon-release-") as scratch:
        folder = Path(scratch)
        try:
            sdist, wheel = build(folder)
            check_sdist(sdist, folder)
            seconds = install(wheel, folder / "environment")
            check_wheel(folder, folder / "environment" / "bin", quick=options.quick)
        except CheckError as error:
            print(f"release check failed: {error}", file=sys.stderr)
            return 1
    print(f"{sdist.name} and {wheel.name} pass the release check; the wheel was installed in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

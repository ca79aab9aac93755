"""What the first hour costs: the core's installation, and the README's two commands on a bare machine.

    python benchmarks/first_hour.py install                 # build the wheel, install it in a fresh environment
    python benchmarks/first_hour.py demo                    # `make demo` in a bare Debian; needs root and debootstrap
    python benchmarks/first_hour.py test --as nobody        # `make test` there, about 30 minutes

Sizes are those of the installed files, torch's left out: its builds differ most. Each part writes its figures and keeps
those of the other parts. Seconds of `demo` include the installation.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import ROOT, device_name, table, write_result

sys.path.insert(0, str(ROOT / "tools"))

import release_check

COUNT = """
import json, os
from importlib.metadata import distributions
sizes = {}
for each in distributions():
    files = [str(each.locate_file(file)) for file in each.files or ()]
    sizes[each.name.lower()] = sum(os.path.getsize(file) for file in files if os.path.exists(file))
print(json.dumps(sizes))
"""


def measure_install() -> dict[str, float]:
    """Install the wheel in a fresh environment; return its distributions, their size and the seconds."""
    with tempfile.TemporaryDirectory(prefix="antiphon-install-") as scratch:
        folder = Path(scratch)
        _, wheel = release_check.build(folder)
        seconds = release_check.install(wheel, folder / "environment")
        python = folder / "environment" / "bin" / "python"
        shown = subprocess.run([python, "-c", COUNT], text=True, capture_output=True, check=True).stdout
    sizes = {name: size for name, size in json.loads(shown).items() if name != "pip"}
    without_torch = sum(size for name, size in sizes.items() if name != "torch")
    return {
        "core_distributions": len(sizes),
        "core_install_mib": without_torch / 2**20,
        "core_install_seconds": seconds,
    }


def run_bare(target: str, user: str) -> tuple[float, str]:
    """Run a target on the bare machine; return its seconds and what it printed."""
    began = time.perf_counter()
    command = [ROOT / "tools" / "bare.sh", target, user]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    print(done.stdout[-3000:])
    if done.returncode and target != "test":
        sys.exit(f"make {target} failed on the bare machine")
    return time.perf_counter() - began, done.stdout


def count_failures(output: str) -> int:
    """Return how many tests failed or could not be run, by pytest's own closing lines.

    Raises:
        ValueError: Pytest never closed: what was printed says nothing about tests.
    """
    closing = re.findall(r"^.*\b\d+ (?:passed|failed|errors?)\b.* in [\d.]+s.*$", output, re.MULTILINE)
    if not closing:
        raise ValueError("no closing line of pytest: the tests did not run")
    return sum(int(number) for line in closing for number in re.findall(r"(\d+) (?:failed|errors?)\b", line))


def main() -> None:
    """Measure one part and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("install", "demo", "test"))
    parser.add_argument(
        "--as", dest="user", default="root", choices=("root", "nobody"), help="user on the bare machine"
    )
    parser.add_argument("--out", type=Path, help="result to write, instead of the committed one")
    options = parser.parse_args()
    if options.part == "install":
        figures = measure_install()
    elif options.part == "demo":
        figures = {"bare_demo_seconds": run_bare("demo", options.user)[0]}
    else:
        figures = {"bare_test_failures": count_failures(run_bare("test", options.user)[1])}
    earlier = options.out or ROOT / "benchmarks" / "results" / device_name() / "first_hour.json"
    kept = json.loads(earlier.read_text())["figures"] if earlier.is_file() else {}
    figures = {**kept, **figures}
    print(table(["figure", "value"], [[name, f"{value:g}"] for name, value in figures.items()]))
    print("written:", write_result("first_hour", figures, options.out, measures=("antiphon.cli.projects",)))


if __name__ == "__main__":
    main()

"""What the first hour costs: the core's installation, and the README's two commands on a bare machine.

    python benchmarks/first_hour.py install                 # build the wheel, install it in a fresh environment
    python benchmarks/first_hour.py documents               # options that the reference explains, tutorials that tests run
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
from collections.abc import Iterator
from pathlib import Path

import yaml
from _common import ROOT, device_name, table, write_result

sys.path.insert(0, str(ROOT / "tools"))

import reference
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
    lines = []
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode and target != "test":
        sys.exit(f"make {target} failed on the bare machine")
    return time.perf_counter() - began, "".join(lines)


def list_keys(value: object, key: str) -> Iterator[str]:
    """Yield the keys of a configuration; `[]` stands for the items of a list, and options of named functions are one key."""
    if isinstance(value, dict) and value and not key.endswith("options"):
        for name, item in value.items():
            yield from list_keys(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            yield from list_keys(item, f"{key}[]")
    else:
        yield key


def measure_documents() -> dict[str, float]:
    """Compare the keys that a run writes to its `config.yaml` with the reference, and run the tutorials' tests.

    A key is documented if the generated page has a row for it whose meaning is not empty.
    """
    from antiphon.core.config import dump, load
    from antiphon.run.config import RunConfig

    config = yaml.safe_load(dump(load(ROOT / "recipes" / "starter" / "run.yaml", model=RunConfig)))
    keys = set(list_keys(config, ""))
    page = reference.describe_training()
    documented = {key for key in keys if re.search(rf"^\| `{re.escape(key)}` \|.*[a-z]{{3}}.* \|$", page, re.MULTILINE)}
    print("without a description:", ", ".join(sorted(keys - documented)) or "none")
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-v", "tests/system/test_tutorials.py"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    passed = set(re.findall(r"::test_(\w+) PASSED", done.stdout))
    pages = {each.stem for each in (ROOT / "docs" / "tutorials").glob("*.md")} - {"README"}
    print("tutorials that no test runs:", ", ".join(sorted(pages - passed)) or "none")
    return {"documented_options_share": len(documented) / len(keys), "tutorials_run": len(pages & passed)}


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
    parser.add_argument("part", choices=("install", "documents", "demo", "test"))
    parser.add_argument(
        "--as", dest="user", default="root", choices=("root", "nobody"), help="user on the bare machine"
    )
    parser.add_argument("--out", type=Path, help="result to write, instead of the committed one")
    options = parser.parse_args()
    if options.part == "install":
        figures = measure_install()
    elif options.part == "documents":
        figures = measure_documents()
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

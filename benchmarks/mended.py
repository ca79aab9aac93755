"""Count the user-reported defects whose test failed before they were mended and passed afterwards.

    python benchmarks/mended.py [--before a1d33c9] [--after bf9c551] [--only "part of a name"]

Both sides are checkouts of commits; the one before gets the tests of the one after. A test counts as failing only if it was
collected and ran: a module that cannot be imported proves nothing. `benchmarks/mended/defects.yaml` lists the defects with
their tests, under the names that these had in the commit after.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from _common import ROOT, table, write_result

MEASURES: tuple[str, ...] = ()  # of the history alone

BEFORE, AFTER = "a1d33c9", "bf9c551"
DEFECTS = ROOT / "benchmarks" / "mended" / "defects.yaml"
TESTS = ("tests", "pyproject.toml")  # taken from the commit after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default=BEFORE, help="commit before the defects were mended")
    parser.add_argument("--after", default=AFTER, help="commit after it, whose tests are run")
    parser.add_argument("--only", default="", help="defects whose description contains this")
    options = parser.parse_args()
    defects: dict[str, list[str]] = yaml.safe_load(DEFECTS.read_text(encoding="utf-8"))
    chosen = {name: tests for name, tests in defects.items() if options.only in name}
    tests = sorted({test for tests in chosen.values() for test in tests})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # boxes of other users read the code
        after_code = check_out(options.after, Path(folder) / "after")
        before_code = check_out(options.before, Path(folder) / "before")
        for name in TESTS:
            subprocess.run(["rm", "-r", before_code / name], check=True)
            subprocess.run(["cp", "-r", after_code / name, before_code / name], check=True)
        before, after = run_tests(before_code, tests), run_tests(after_code, tests)
    rows, failing = [], 0
    for name, names in chosen.items():
        failed_before = any(before.get(test) == "FAILED" for test in names)
        passes_after = all(after.get(test) == "PASSED" for test in names)
        failing += failed_before and passes_after
        rows.append([name, _outcomes(before, names), _outcomes(after, names)])
    print(table(["defect", "before", "after"], rows))
    if not options.only:
        print(write_result("mended", {"findings": len(chosen), "with_failing_test_before": failing}, measures=MEASURES))


def check_out(commit: str, folder: Path) -> Path:
    """Write the files of `commit` to `folder`, and return it."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def run_tests(folder: Path, tests: list[str]) -> dict[str, str]:
    """Run `tests`, node ids without parameters, on the code in `folder`, file by file; return the worst outcome of each."""
    files = {test.split("::")[0] for test in tests}
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(_run_file, folder, [test for test in tests if test.startswith(f"{file}::")]) for file in files
        ]
    return {test: outcome for run in runs for test, outcome in run.result().items()}


def _run_file(folder: Path, tests: list[str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, str] = {}
    for outcome, test in re.findall(r"^(PASSED|FAILED|ERROR) (tests/[^\s\[]+)", done.stdout, re.MULTILINE):
        found[test] = max(found.get(test, "PASSED"), outcome, key=("PASSED", "ERROR", "FAILED").index)
    return found


def _outcomes(found: dict[str, str], names: list[str]) -> str:
    return ", ".join(sorted({found.get(name, "not run").lower() for name in names}))


if __name__ == "__main__":
    main()

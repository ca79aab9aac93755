"""Defects that users found, and the tests that notice them: each must fail on the code before, and pass on the code of now.

    python benchmarks/mended.py [--base a1d33c9] [--only "part of a name"]

The code before is a checkout of the base commit with the tests of now. A test counts as failing there only if it was collected
and ran: a module that cannot be imported proves nothing. The table of defects is `benchmarks/mended/defects.yaml`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from _common import ROOT, table, write_result

MEASURES: tuple[str, ...] = ()  # of the history alone

BASE = "a1d33c9"
DEFECTS = ROOT / "benchmarks" / "mended" / "defects.yaml"
OF_NOW = ("tests", "pyproject.toml")  # what the code before is tested with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=BASE, help="commit before the defects were mended")
    parser.add_argument("--only", default="", help="defects whose description contains this")
    options = parser.parse_args()
    defects: dict[str, list[str]] = yaml.safe_load(DEFECTS.read_text(encoding="utf-8"))
    chosen = {name: tests for name, tests in defects.items() if options.only in name}
    tests = sorted({test for tests in chosen.values() for test in tests})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # boxes of other users read the code
        before = run_tests(check_out(options.base, Path(folder) / "before"), tests)
    now = run_tests(ROOT, tests)
    rows, failing = [], 0
    for name, names in chosen.items():
        failed_before = any(before.get(test) == "FAILED" for test in names)
        passes_now = all(now.get(test) == "PASSED" for test in names)
        failing += failed_before and passes_now
        rows.append([name, _outcomes(before, names), _outcomes(now, names)])
    print(table(["defect", "before", "now"], rows))
    if not options.only:
        print(write_result("mended", {"findings": len(chosen), "with_failing_test_before": failing}, measures=MEASURES))


def check_out(commit: str, folder: Path) -> Path:
    """Write the files of `commit` to `folder`, with the tests of now."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    for name in OF_NOW:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
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

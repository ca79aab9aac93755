"""What the package does on GPUs alone: how much of it the tests on a fake GPU reach, and which faults they notice there.

    python benchmarks/gpu_paths.py              # both; about 25 minutes
    python benchmarks/gpu_paths.py --only paths

A path is an expression that tells a GPU from a CPU, or a call that works otherwise on GPUs (`tests/gpu_paths.py`). Those
that no test reaches are in `mutants/gpu_unreached.yaml`, each with its reason; one without a reason fails.

Each fault of `mutants/gpu_faults.yaml` is put into a copy of the sources, and the tests are run there. Some are of kinds that
the fake GPU cannot show: what the tests say of order and streams is to be believed once a GPU has run them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from _common import ROOT, table, write_result

sys.path.insert(0, str(ROOT))
from tests.gpu_paths import LOG, package_paths

MEASURES = ("antiphon.learning", "antiphon.engines.native", "antiphon.weights", "antiphon.cluster.devices")
UNREACHED = ROOT / "benchmarks" / "mutants" / "gpu_unreached.yaml"
FAULTS = ROOT / "benchmarks" / "mutants" / "gpu_faults.yaml"
SOURCES = ("antiphon", "antiphon_envs", "tests", "recipes", "pyproject.toml")
# Quick ones first. Whole runs take minutes, and have the same paths.
TESTS = [f"tests/gpu/test_{name}.py" for name in ("native_engine", "weights", "objectives", "learner", "devices")]
WORKERS = 2
LIMIT_SECONDS = 1800
FAILED = 1  # exit status of pytest if a test has failed


def run_tests(root: Path, *arguments: str, log: Path | None = None) -> int:
    """Run tests on a fake GPU, and return the exit status of pytest."""
    environment = {**os.environ, "PYTHONPATH": str(root), **({LOG: str(log)} if log else {})}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.fake_gpu", "-p", "no:randomly", *arguments]
    done = subprocess.run(command, cwd=root, env=environment, timeout=LIMIT_SECONDS, capture_output=True, text=True)
    if done.returncode not in (0, FAILED):
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
        )
    return done.returncode


def reach() -> tuple[set[str], set[str]]:
    """Return all paths, and those that tests reach."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "reached.txt"
        if run_tests(ROOT, "tests/gpu", log=log):
            raise SystemExit("the tests fail without faults: python -m pytest -p tests.fake_gpu tests/gpu")
        reached = set(log.read_text(encoding="utf-8").splitlines())
    return set(package_paths()), reached


def explained(paths: set[str], reached: set[str]) -> dict[str, str]:
    """Return the paths that no test reaches, with their reasons; end if one has none, or one has a reason and needs none."""
    reasons: dict[str, str] = {
        key: group["reason"]
        for group in yaml.safe_load(UNREACHED.read_text(encoding="utf-8"))
        for key in group["paths"]
    }
    left = paths - reached
    if left != reasons.keys():
        lines = [f"without a reason: {key}" for key in sorted(left - reasons.keys())]
        lines += [f"reached, or gone: {key}" for key in sorted(reasons.keys() - left)]
        raise SystemExit(f"{UNREACHED.relative_to(ROOT)}:\n" + "\n".join(lines))
    return reasons


def notice(fault: dict[str, str]) -> bool:
    """Return True if a test fails with a fault."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in SOURCES:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        file = copy / fault["file"]
        text = file.read_text(encoding="utf-8")
        if text.count(fault["code"]) != 1:
            raise SystemExit(f"{fault['file']} has {text.count(fault['code'])} times, not once: {fault['code']}")
        file.write_text(text.replace(fault["code"], fault["becomes"]), encoding="utf-8")
        return run_tests(copy, "-x", *TESTS) == FAILED


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["paths", "faults"], help="of the two; nothing is written")
    only = parser.parse_args().only
    figures: dict[str, float] = {}
    faults = [] if only == "paths" else yaml.safe_load(FAULTS.read_text(encoding="utf-8"))
    with ThreadPoolExecutor(WORKERS) as pool:
        reaching = pool.submit(reach) if only != "faults" else None
        found = list(pool.map(notice, faults))
    if reaching is not None:
        paths, reached = reaching.result()
        reasons = explained(paths, reached)
        figures |= {"cuda_branches": len(paths), "reached_share": 1 - len(reasons) / len(paths)}
        print(f"{len(paths) - len(reasons)} of {len(paths)} paths are reached")
    if faults:
        rows = [
            [fault["name"], fault["kind"], "yes" if caught else "no"]
            for fault, caught in zip(faults, found, strict=True)
        ]
        print(table(["fault", "kind", "caught"], rows))
        figures |= {"faults_seeded": len(faults), "faults_caught": sum(found)}
        figures |= {f"caught_{fault['name']}": float(caught) for fault, caught in zip(faults, found, strict=True)}
    if only is None:
        write_result("gpu_paths", figures, measures=MEASURES)


if __name__ == "__main__":
    main()

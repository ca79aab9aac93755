"""`make gpu`: what hangs ends with all that it started, what passed is not run again, what is missing is named."""

import importlib.util
import os
import select
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu():
    sys.path.insert(0, str(ROOT / "benchmarks"))  # where its neighbours are
    try:
        spec = importlib.util.spec_from_file_location("gpu_parts", ROOT / "benchmarks" / "gpu.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # its dataclasses ask for it
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def part(gpu, code, tmp_path, **options):
    script = tmp_path / "part.py"
    script.write_text(code)
    return gpu.Part("part", str(script), str(script), 1.0, **options)


@pytest.mark.parametrize(("code", "end"), [("print('done')", "passed"), ("raise SystemExit(3)", "failed with 3")])
def test_it_ends_as_its_command(gpu, tmp_path, code, end):
    assert gpu.run(part(gpu, code, tmp_path), tmp_path / "log", 60.0) == end


def has_ended(pid):
    """Whether the process ends; it was killed a moment ago, and the kernel may not have come to it."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 30)[0])
    finally:
        os.close(process)


def test_a_part_that_hangs_takes_what_it_started_with_it(gpu, tmp_path):
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[0] + ".pid", "w").write(str(child.pid))
print("started", flush=True)
child.wait()
"""
    found = part(gpu, code, tmp_path)
    assert gpu.run(found, tmp_path / "log", 15.0) == "stopped after 15 s"
    assert (tmp_path / "log").read_text() == "started\n"
    assert has_ended(int((tmp_path / "part.py.pid").read_text()))


def test_a_missing_package_is_named(gpu, tmp_path):
    needs = part(gpu, "", tmp_path, needs=("json", "no_such_package"))
    assert gpu.run(needs, tmp_path / "log", 60.0) == "skipped: it needs no_such_package"


def test_what_passed_is_kept_for_the_same_sources(gpu, tmp_path):
    one = part(gpu, "", tmp_path)
    state = gpu.State(tmp_path / "state.json", rehearse=True)
    assert not state.passed(one)
    state.add(one, "passed")
    assert gpu.State(tmp_path / "state.json", rehearse=True).passed(one)
    assert not gpu.State(tmp_path / "state.json", rehearse=False).passed(one)
    state.add(one, "failed with 1")
    assert not gpu.State(tmp_path / "state.json", rehearse=True).passed(one)

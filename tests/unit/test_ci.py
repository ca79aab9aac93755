"""The script of continuous integration and the test suite, on a machine that has Python, make and pip alone."""

import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]


def write_command(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """A folder of commands to be the whole PATH: `make` and `apt-get` only write down how they were called."""
    for name in ("make", "apt-get"):
        write_command(tmp_path, name, f'echo "{name} $*" >> {tmp_path}/calls')
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    return tmp_path


def run_ci(machine):
    done = subprocess.run(
        [machine / "bash", ROOT / ".ci" / "run"], env={"PATH": str(machine)}, capture_output=True, text=True
    )
    return done.returncode, (machine / "calls").read_text().splitlines()


def test_ci_runs_the_readme_before_it_installs(machine):
    readme = (ROOT / "README.md").read_text().split("```sh\n", 1)[1].split("```")[0]
    commands = [line.split("#")[0].strip() for line in readme.splitlines()]
    code, calls = run_ci(machine)
    assert code == 0 and commands == ["make demo", "make test"]
    assert calls[:2] == commands and calls[2].startswith("apt-get") and calls[-1] == "make commands"


def test_ci_fails_where_the_readme_fails(machine):
    write_command(machine, "make", f'echo "make $*" >> {machine}/calls; [ "$1" != test ]')
    code, calls = run_ci(machine)
    assert code != 0 and calls == ["make demo", "make test"]


def test_tests_of_boxes_skip_without_bubblewrap(tmp_path):
    """With a PATH on which no command is found."""
    files = ["unit/envs/test_mini_swe.py", "unit/sandbox/test_session.py", "system/test_mini_swe.py"]
    options = ["-q", "-m", "commands", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{file}" for file in files)],
        env={**os.environ, "PATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " skipped" in done.stdout and "not installed on this system: bwrap" in done.stdout


def test_what_ci_installs_is_asked_for_by_a_marker():
    """By it `make commands` finds the tests that were skipped before; with a `skipif` of their own none would run them."""
    own = [file for file in ROOT.glob("tests/**/test_*.py") if re.search(r"skipif\([^)]*which\(", file.read_text())]
    assert not own


def test_pinned_packages_run_on_the_oldest_python():
    """Debian 12 has Python 3.11.2, so what needs a later 3.11 cannot be installed there."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines}
    installed = [each for each in distributions() if each.name.lower() in pinned]
    assert len(installed) > 100
    needs = {each.name: each.metadata.get("Requires-Python") or "" for each in installed}
    assert not {name: need for name, need in needs.items() if "3.11.2" not in SpecifierSet(need)}

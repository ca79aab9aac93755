"""A platform without what only Linux has, such as macOS: imported and run without it. Every process of the run lacks it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Antiphon's modules see another platform; the standard library does not. `os.fork` stays: macOS has it.
WITHOUT_LINUX = """
import builtins, os, select, signal, sys

for module, names in (
    (os, ("sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create", "eventfd", "O_PATH", "O_TMPFILE")),
    (select, ("epoll",)),
    (signal, ("pidfd_send_signal",)),
):
    for name in names:
        vars(module).pop(name, None)


class Elsewhere:
    platform = "darwin"

    def __getattr__(self, name):
        return getattr(sys, name)

    def __setattr__(self, name, value):
        setattr(sys, name, value)


found = builtins.__import__


def import_elsewhere(name, globals=None, *arguments, **named):
    if name == "sys" and globals and (globals.get("__package__") or "").partition(".")[0] == "antiphon":
        return Elsewhere()
    return found(name, globals, *arguments, **named)


builtins.__import__ = import_elsewhere
"""
IMPORT_ALL = """
import importlib, pkgutil, sys
import antiphon
from antiphon.core.errors import UnsupportedError

assert importlib.import_module("antiphon.core.processes.own_process").sys.platform == "darwin"
for each in pkgutil.walk_packages(antiphon.__path__, "antiphon."):
    if not each.name.endswith("__main__") and ".recipes" not in each.name:
        try:
            importlib.import_module(each.name)
        except (UnsupportedError, ModuleNotFoundError) as error:
            backend = each.name.startswith(("antiphon.engines.", "antiphon.learning.backends."))
            if not backend and getattr(error, "name", "") != "reasoning_gym":
                raise  # else it is of a package that is not installed
"""


@pytest.fixture
def elsewhere(tmp_path):
    """Return a function that runs Python on such a platform."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_LINUX)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}

    def run(*arguments, cwd=tmp_path):
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)

    return run


def test_every_module_can_be_imported(elsewhere):
    done = elsewhere("-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr


def test_a_run_trains_with_spawned_workers(elsewhere, tmp_path):
    assert elsewhere("-m", "antiphon", "init", "mine").returncode == 0
    done = elsewhere("-m", "antiphon", "train", "run.yaml", "steps=2", "sft.steps=2", cwd=tmp_path / "mine")
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout and "held-out accuracy" in done.stdout


def test_doctor_describes_the_machine(elsewhere):
    done = elsewhere("-m", "antiphon", "doctor")
    assert done.returncode == 0, done.stderr
    assert "CPUs of this process" in done.stdout

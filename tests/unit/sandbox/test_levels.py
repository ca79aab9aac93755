"""What a machine can do, and what is said when that is not enough."""

import dataclasses
import os
import subprocess
import sys

import pytest

from antiphon.core.errors import UnsupportedError
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import levels
from antiphon.sandbox.isolation.levels import Capabilities, probe, require_level
from tests.raising import raises_with

EVERYTHING = Capabilities(
    root=True, landlock=7, seccomp=True, own_user=True, namespaces=True, memory_groups=True, problems={}
)


def without(**changes):
    return dataclasses.replace(EVERYTHING, **changes)


@pytest.mark.parametrize(
    ("capabilities", "level"),
    [
        (EVERYTHING, Level.ISOLATED),
        (without(root=False, own_user=False), Level.ISOLATED),
        (without(root=False, own_user=False, landlock=3), Level.ISOLATED),
        (without(namespaces=False), Level.CONFINED),
        (without(namespaces=False, landlock=1), Level.CONFINED),
        (without(root=False, own_user=False, landlock=5, namespaces=False), Level.LIMITS),  # signals would get out
        (without(own_user=False), Level.LIMITS),
        (without(landlock=0), Level.LIMITS),
        (without(seccomp=False), Level.LIMITS),
        (without(problems={"platform": "Darwin"}), None),
    ],
)
def test_level(capabilities, level):
    assert capabilities.level == level


def test_refusal_names_missing_features_and_remedy(monkeypatch):
    here = without(namespaces=False, landlock=0, problems={"namespaces": "unshare: Operation not permitted"})
    monkeypatch.setattr(levels, "probe", lambda: here)
    with raises_with(UnsupportedError, key="sandbox.minimum_level", value=Level.ISOLATED) as refused:
        require_level(Level.ISOLATED)
    for part in ("namespaces: unshare: Operation not permitted", "landlock: ", "sandbox.minimum_level: 1"):
        assert part in str(refused.value)
    assert require_level(Level.LIMITS) == Level.LIMITS


def test_another_platform(monkeypatch):
    monkeypatch.setattr(levels, "probe", lambda: without(problems={"platform": "Darwin on arm64"}))
    with raises_with(UnsupportedError, match="Darwin on arm64", key="sandbox.minimum_level", value=Level.LIMITS):
        require_level(Level.LIMITS)


PROBED = """
import os, psutil
from antiphon.sandbox.isolation.levels import probe

def state():
    names = sorted(os.listdir("/proc/self/ns"))
    return [os.readlink(f"/proc/self/ns/{name}") for name in names], os.getuid(), psutil.Process().children()

before = state()
probe()
assert state() == before and not before[2], (before, state())
"""


def test_probing_leaves_no_process_and_changes_nothing():
    """In a process of its own: others close themselves to ordinary users, which hides their namespaces."""
    done = subprocess.run([sys.executable, "-c", PROBED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.getuid() != 0 or not probe().seccomp, reason="needs root")
def test_denied_namespaces_lower_the_level():
    """As in a container that may make no namespaces: tried under a filter that denies it."""
    program = (
        "from antiphon.sandbox.isolation import kernel, seccomp, levels; kernel.forbid_privileges();"
        "seccomp.install_filter(seccomp.filter_program()); print(levels.probe().level, levels.probe().problems)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("2 "), done
    assert "Operation not permitted" in done.stdout

"""Examples in docstrings hold. Those of `antiphon.algorithms` use samples that its own tests make."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("antiphon", "antiphon_envs")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.parent.name != "algorithms" and ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name):
    failed, tried = doctest.testmod(import_module(name))
    assert tried and not failed

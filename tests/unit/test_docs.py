"""The documentation runs."""

import doctest
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_examples(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.path", list(os.sys.path))
    result = doctest.testfile(
        str(ROOT / "docs" / page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0

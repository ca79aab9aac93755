"""The documentation runs."""

import doctest
import os
import re
from pathlib import Path

import pytest
import yaml

from antiphon.config import load
from antiphon.run_config import RunConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_examples(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.path", list(os.sys.path))
    result = doctest.testfile(
        str(ROOT / "docs" / page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0


FRAGMENTS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_what_the_page_on_algorithms_says_can_be_configured(fragment, tmp_path):
    base = yaml.safe_load((ROOT / "recipes" / "tiny_arithmetic" / "config.yaml").read_text())
    base["tasks"][0]["name"] = "sums"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(base | yaml.safe_load(fragment)))
    load(tmp_path / "config.yaml", model=RunConfig)

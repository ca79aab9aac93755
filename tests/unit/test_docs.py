"""The documentation runs."""

import doctest
import math
import os
import re
import subprocess
import sys
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


def test_a_loss_of_your_own(project):
    """The page's files, its test and its command, on a model and a task that are smaller still."""
    page = (ROOT / "docs" / "new_loss.md").read_text()
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL):
        (project.folder / name).write_text(text)
    (given,) = re.findall(r"^antiphon train config.yaml (.*) steps=\d+ name=my_loss$", page, re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_loss.py"]
    tested = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, timeout=240)
    assert "2 passed" in tested.stdout, tested.stdout + tested.stderr
    trained = project.run("train", project.config(steps=2), *given.split(), "name=my_loss")
    assert trained.returncode == 0, trained.stderr
    steps = project.metrics("my_loss")
    assert len(steps) == 2
    assert all(math.isfinite(step["learner/loss"]) and 0.5 < step["learner/ratio"] < 2 for step in steps)

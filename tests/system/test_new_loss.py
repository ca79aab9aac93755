"""The page on a loss of your own: its files, its test and its command."""

import math
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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

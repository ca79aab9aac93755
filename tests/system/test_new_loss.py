"""The page on a loss of your own: its files, its test and its commands."""

import math
import re
import subprocess
import sys
from pathlib import Path

import yaml

from antiphon.core.config import load
from antiphon.run.config import RunConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "new_loss.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


def test_a_loss_of_your_own(project):
    """The page's files, its test and its command, on a model and a task that are smaller still."""
    write_files(project)
    (given,) = re.findall(r"^antiphon train config.yaml (.*) steps=\d+ name=my_loss$", PAGE, re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_loss.py", "test_novelty.py"]
    tested = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, timeout=240)
    assert "5 passed" in tested.stdout, tested.stdout + tested.stderr
    trained = project.run("train", project.config(steps=2), *given.split(), "name=my_loss")
    assert trained.returncode == 0, trained.stderr
    steps = project.metrics("my_loss", own=("learner/ratio",))
    assert len(steps) == 2
    assert all(math.isfinite(step["learner/loss"]) and 0.5 < step["learner/ratio"] < 2 for step in steps)


def test_a_stream_of_your_own(project):
    """The stage asks a frozen model, the loss reads what it said, and the record has the options of both."""
    path, sections = project_with_stream(project)
    trained = project.run("train", path)
    assert trained.returncode == 0, trained.stderr
    weights = [
        step["learner/novelty_weight"] for step in project.metrics(own=("learner/ratio", "learner/novelty_weight"))
    ]
    assert len(weights) == 2 and all(1.2 < weight <= 2 for weight in weights), "1 + 0.2 n, where n is near log 101"
    recorded = load(project.folder / "runs" / "run" / "config.yaml", model=RunConfig)
    assert recorded.algorithm.loss_options == {"beta": 0.2}
    assert recorded.learner.stage_options == sections["learner"]["stage_options"]


def test_a_stream_without_its_stage_is_refused(project):
    path, _ = project_with_stream(project)
    without = [name for name in load(path, model=RunConfig).learner.stages if name != "novelty:add_novelty"]
    refused = project.run("train", path, f"learner.stages={without}", "learner.stage_options={}")
    line = path.read_text().splitlines().index("  loss: novelty:novelty_loss") + 1
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"antiphon: {path}:{line}: algorithm.loss: 'novelty:novelty_loss'"), refused.stderr
    assert not (project.folder / "runs").exists()


def write_files(project):
    for name, text in FILES.items():
        (project.folder / name).write_text(text)


def project_with_stream(project):
    """Return the configuration of a project with the page's stream, and the sections that the page gives it."""
    write_files(project)
    (fragment,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    sections = yaml.safe_load(fragment)
    del sections["base"]  # the project's own configuration takes its place
    sections["learner"]["stage_options"]["novelty:add_novelty"]["model"] = str(project.model)
    return project.config(steps=2, **sections), sections

"""Running `antiphon` as a user would, and reading what the run left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from _common import ROOT


class Finished:
    """The directory of a run that has ended."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        self.steps: list[dict[str, float]] = [json.loads(line) for line in lines]

    def column(self, name: str) -> list[float]:
        """The metric's value at each step that has it."""
        return [step[name] for step in self.steps if name in step]

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return max((self.directory / "checkpoints").iterdir())


def run(
    verb: str, config: Path, name: str, *overrides: str, runs: Path = Path("runs"), resume: bool = False
) -> Finished:
    """Run a verb to its end with the output in `<runs>/<name>.txt`; stops everything if it fails. With `resume` a run that
    the same command has finished before is taken as it is."""
    runs.mkdir(parents=True, exist_ok=True)
    output, finished = runs / f"{name}.txt", runs / f"{name}.command"
    arguments = [f"name={name}", f"record.directory={runs}", *overrides]
    said = " ".join([verb, str(config.relative_to(ROOT)), *arguments])
    if resume and finished.exists() and finished.read_text() == said:
        return Finished(runs / name)
    finished.unlink(missing_ok=True)
    command = [sys.executable, "-m", "antiphon", verb, str(config), "--overwrite", *arguments]
    with output.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ}).returncode
    if code not in (0, 1):  # 1: below the accuracy that the recipe demands; the benchmark reports it itself
        sys.exit(f"{' '.join(command)} ended with {code}:\n{output.read_text()[-2000:]}")
    finished.write_text(said)
    return Finished(runs / name)

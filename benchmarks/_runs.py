"""Running `antiphon` as a user would, and reading what the run left."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
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
    if resume and (before := finished(verb, config, name, *overrides, runs=runs)):
        return before
    runs.mkdir(parents=True, exist_ok=True)
    output, note = runs / f"{name}.txt", runs / f"{name}.command"
    note.unlink(missing_ok=True)
    arguments = _arguments(name, overrides, runs)
    command = [sys.executable, "-m", "antiphon", verb, str(config), "--overwrite", *arguments]
    with output.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ}).returncode
    if code not in (0, 1):  # 1: below the accuracy that the recipe demands; the benchmark reports it itself
        sys.exit(f"{' '.join(command)} ended with {code}:\n{output.read_text()[-2000:]}")
    note.write_text(_said(verb, config, arguments))
    return Finished(runs / name)


def finished(verb: str, config: Path, name: str, *overrides: str, runs: Path = Path("runs")) -> Finished | None:
    """The run that the same command has finished before, if there is one."""
    note, said = runs / f"{name}.command", _said(verb, config, _arguments(name, overrides, runs))
    return Finished(runs / name) if note.exists() and note.read_text() == said else None


def _arguments(name: str, overrides: Sequence[str], runs: Path) -> list[str]:
    return [f"name={name}", f"record.directory={runs}", *overrides]


def _said(verb: str, config: Path, arguments: list[str]) -> str:
    return " ".join([verb, str(config.relative_to(ROOT)), *arguments])

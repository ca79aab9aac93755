"""Running `antiphon` as a user would, and reading what the run left."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from _common import ROOT

SAMPLE_SECONDS = 0.5  # between two looks at memory


def memory(root: int) -> Counter[str]:
    """Proportional set size in bytes of a process and all below it: what several of them share, such as weights on their way
    in shared memory, counts once."""
    sizes: Counter[str] = Counter()
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
            with contextlib.suppress(OSError):  # it has just ended
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                sizes[f"process {process.pid}"] = next(int(x.split()[1]) for x in lines if x.startswith("Pss:")) * 1024
    return sizes


class Peak:
    """The most memory that the processes of runs had at once, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def watch(self, process: "subprocess.Popen[bytes]") -> None:
        """Look at a process and all below it until it ends. To count takes the kernel a while, which must not be what is
        measured."""
        while process.poll() is None:
            began = time.perf_counter()
            self.bytes = max(self.bytes, memory(process.pid).total())
            time.sleep(max(SAMPLE_SECONDS, 20 * (time.perf_counter() - began)))


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
    verb: str,
    config: Path,
    name: str,
    *overrides: str,
    runs: Path = Path("runs"),
    resume: bool = False,
    peak: Peak | None = None,
) -> Finished:
    """Run a verb to its end with the output in `<runs>/<name>.txt`; stops everything if it fails. With `resume` a run that
    the same command has finished before is taken as it is. `peak` watches its memory."""
    if resume and (before := finished(verb, config, name, *overrides, runs=runs)):
        return before
    runs.mkdir(parents=True, exist_ok=True)
    output, note = runs / f"{name}.txt", runs / f"{name}.command"
    note.unlink(missing_ok=True)
    arguments = _arguments(name, overrides, runs)
    command = [sys.executable, "-m", "antiphon", verb, str(config), "--overwrite", *arguments]
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ})
        if peak is not None:
            peak.watch(process)
        code = process.wait()
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

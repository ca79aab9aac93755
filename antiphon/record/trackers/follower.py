"""Reading a file of JSON lines, one a step, while the run appends to it.

What trackers receive is read from the files of the run. A slow tracker therefore costs no memory and loses nothing, and a
resumed run sends it exactly what it lacks.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from antiphon.record.trackers.base import SFT, TRAIN, LastSteps

StepKey = tuple[str, int]  # phase and step


class StepFile:
    """Index of the lines of a file that are part of the run's history.

    A resume undoes the steps after its cut. Their lines stay in the file, and are left out here; of several lines of one
    step the last is valid.

    Args:
        path: The file. It need not exist yet.
        lineage: The lineage that writes now.
        cut: Step after which it began; lines of earlier lineages are valid up to it.
    """

    def __init__(self, path: Path, lineage: int, cut: int) -> None:
        self._path = path
        self._lineage = lineage
        self._cut = cut
        self._position = 0
        self._offsets: dict[StepKey, int] = {}

    def update(self) -> None:
        """Index the complete lines that were appended since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # is being written
                record = json.loads(line)
                phase, step = read_step(record)
                if record["lineage"] == self._lineage or phase == SFT or step <= self._cut:
                    self._offsets[phase, step] = self._position
                self._position += len(line)

    def take_after(self, last: LastSteps) -> Iterator[tuple[StepKey, dict[str, Any]]]:
        """Yield the lines of later steps than the last ones of each phase, in order, each once."""
        order = sorted(self._offsets, key=lambda key: (key[0] != SFT, key[1]))
        for key in order:
            record = self.take(key)
            if record is not None and key[1] > last.get(key[0], 0):
                yield key, record

    def take(self, key: StepKey) -> dict[str, Any] | None:
        """Return the line of a step, once; None if there is none."""
        offset = self._offsets.pop(key, None)
        if offset is None:
            return None
        with self._path.open("rb") as file:
            file.seek(offset)
            record: dict[str, Any] = json.loads(file.readline())
        return record


def read_step(record: Mapping[str, Any]) -> StepKey:
    """Return phase and step of a line: supervised fine-tuning and reinforcement learning count their steps each from 1."""
    return (SFT, record["sft_step"]) if "sft_step" in record else (TRAIN, record["step"])

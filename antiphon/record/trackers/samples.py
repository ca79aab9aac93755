"""Tables of sample rollouts: what the policy said at some steps, as text, in `samples.jsonl`."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from antiphon.core.types import AttemptStatus, Credit, Group, IntArray, PayloadReference, Trajectory
from antiphon.record import trajectories
from antiphon.record.run_dir import RunLineage, replace_nonfinite
from antiphon.record.trackers.config import SamplesConfig

Decode = Callable[[IntArray], str]


class SampleTables:
    """Writes a table of sample rollouts every few steps.

    Args:
        run: Directory and lineage of the run.
        config: Size of the tables.
    """

    def __init__(self, run: RunLineage, config: SamplesConfig) -> None:
        self._run = run
        self._config = config

    def is_due(self, step: int) -> bool:
        """Return True if `step` gets a table."""
        return self._config.count > 0 and (step - 1) % self._config.every == 0

    def write(self, step: int, groups: Sequence[Group], credit: Iterable[Credit], decode: Decode) -> None:
        """Append the table of a step: its first rollouts, so that groups are seen whole."""
        credits = {each.attempt: each for each in credit}
        sampled = [(group, each) for group in groups for each in group.trajectories][: self._config.count]
        rows = [self._describe(group, each, credits.get(each.meta.id), decode) for group, each in sampled]
        line = {"step": step, "lineage": self._run.lineage, "rows": replace_nonfinite(rows)}
        with self._run.directory.samples.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _describe(self, group: Group, trajectory: Trajectory, credit: Credit | None, decode: Decode) -> dict[str, Any]:
        parts = list(_split(_load(self._run.directory.rollouts, trajectory), decode))
        masked = credit is not None and not credit.weight
        return {
            "attempt": f"{self._run.lineage}:{trajectory.meta.id}",
            "prompt": self._shorten(parts[0] if parts else ""),
            "completion": self._shorten("".join(parts[1:])),
            "reward": credit.reward if credit else trajectory.meta.score.value,
            "advantage": credit.advantage if credit else math.nan,
            "outcome": "masked" if masked else str(AttemptStatus.TRAINED),
        }

    def _shorten(self, text: str) -> str:
        most = self._config.characters
        if len(text) <= most:
            return text
        return f"{text[: most // 2]} … {text[len(text) - (most - most // 2) :]}"


def _load(rollouts: Path, trajectory: Trajectory) -> Trajectory:
    """Return a trajectory with its tokens, which a rollout worker may have left in a file."""
    if not isinstance(trajectory.payload, PayloadReference):
        return trajectory
    return trajectories.read(rollouts / trajectory.payload.file)[trajectory.payload.attempt]


def _split(trajectory: Trajectory, decode: Decode) -> Iterator[str]:
    """Yield the first prompt of a conversation, and then the rest."""
    for number, segment in enumerate(trajectory.segments):
        start = segment.turns[0].start if segment.turns and not number else 0
        if not number:
            yield decode(segment.tokens[:start])
        yield decode(segment.tokens[start:])

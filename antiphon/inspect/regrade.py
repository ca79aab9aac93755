"""Grading a finished run again, from its record: with the graders it had, or with others. Nothing of the run is changed.

A transcript is made of the prompt, which the task's source still has, and of the recorded tokens. What an environment said
between two turns is there as the policy read it, with the markup of its chat template.
"""

import asyncio
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError
from antiphon.core.types import AttemptId, Message, Prompt, Score, Segment, Trajectory
from antiphon.inspect.recorded_config import has_model
from antiphon.record import reading, schema, trajectories
from antiphon.record.run_dir import atomic_write, convert_write_errors
from antiphon.run.config import RunConfig
from antiphon.run.launch import model_directory, start_graders
from antiphon.tasks.base import Transcript
from antiphon.tasks.mixture import Mixture
from antiphon.tasks.rendering import Renderer

AT_ONCE = 256  # gradings under way
CLASSES = ("right", "not right", "ungraded")  # a score of 1 or more is right, as in an evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class RegradedAttempt:
    """One attempt, and what was and is said of it."""

    lineage: int
    attempt: AttemptId
    step: int | None  # that trained on it
    prompt: Prompt
    trajectory: Trajectory
    before: float | None
    after: Score

    @property
    def changed(self) -> bool:
        """Whether the score is another, or there is one only now, or no more."""
        return self.before != self.after.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What became of the scores of a run."""

    path: Path  # the table
    attempts: int
    changed: int
    confusion: Mapping[tuple[str, str], int]  # (before, after), of CLASSES
    by_step: Mapping[str, float]  # share that changed; what no step trained on is "untrained"


def regrade(run: Path, config: RunConfig, name: str) -> Agreement:
    """Grade all recorded attempts of a run with the rewards of `config`, and write `regraded/<name>.parquet` beside the
    record. `RecordError` for a run without one, `DataError` if its prompts are not to be had any more."""
    with convert_write_errors(run):
        found = asyncio.run(_graded(run, config))
        path = reading.resolve_path(run, f"regraded/{name}.parquet")
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as file:
            pq.write_table(_table(found), file)
    return _agreement(path, found)


def replace_reward(config: RunConfig, reward: str, options: Mapping[str, Any], task: str = "") -> RunConfig:
    """The configuration with another reward for its tasks, or for one of them."""
    names = [each.name for each in config.tasks]
    if task and task not in names:
        raise ConfigError(f"there is no task {task!r}; the run has {', '.join(names)}")
    changes = {"reward": reward, "reward_options": dict(options), "judge": None, "reward_range": None}
    tasks = tuple(each.model_copy(update=changes) if task in ("", each.name) else each for each in config.tasks)
    return config.model_copy(update={"tasks": tasks})


async def _graded(run: Path, config: RunConfig) -> list[RegradedAttempt]:
    mixture, seats = Mixture.load(config.tasks, config.seed), asyncio.Semaphore(AT_ONCE)
    cluster: Cluster = CLUSTERS.resolve(config.cluster.kind)(config.cluster, None)
    try:
        built = run / "model"
        model = await model_directory(cluster, str(built) if has_model(run) else config.model.path, built, config.seed)
        renderer = Renderer(model)
        async with start_graders(cluster, config, Deadlines()) as (grading, _):

            async def one(known: dict[str, Any], trajectory: Trajectory) -> RegradedAttempt:
                async with seats:
                    prompt = mixture.find(known.pop("task"), known.pop("prompt"), known.pop("epoch"))
                    transcript = _transcript(prompt, trajectory, renderer)
                    after = await grading.score(prompt, transcript)
                return RegradedAttempt(**known, prompt=prompt, trajectory=trajectory, after=after)

            return await asyncio.gather(*(one(*recorded) for recorded in _recorded(run)))
    finally:
        await cluster.close()


def _recorded(run: Path) -> Iterator[tuple[dict[str, Any], Trajectory]]:
    """The attempts whose trajectory is on record, each where it was made."""
    content = cache(lambda file: trajectories.read(reading.resolve_file(run, f"rollouts/{file}")))
    with closing(schema.open_ledger(run)) as db, reading.convert_read_errors(run / "ledger.db"):
        db.row_factory = sqlite3.Row
        rows = db.execute(
            "SELECT a.*, task, id, epoch FROM attempts a JOIN groups USING (lineage, grp) JOIN prompts USING (prompt)"
            " WHERE file IS NOT NULL AND origin IS NULL ORDER BY lineage, grp, sibling, try"
        ).fetchall()
    for row in rows:
        attempt = AttemptId(row["grp"], row["sibling"], row["try"])
        trajectory = content(row["file"]).get(attempt)
        if trajectory is not None and trajectory.segments:
            known = {"lineage": row["lineage"], "attempt": attempt, "step": row["step"], "before": row["score"]}
            yield known | {"task": row["task"], "prompt": row["id"], "epoch": row["epoch"]}, trajectory


def _transcript(prompt: Prompt, trajectory: Trajectory, renderer: Renderer) -> Transcript:
    """What the reward is told; of samples after the first, the prompt is there as the chat template rendered it."""
    messages = list(prompt.messages)
    for number, segment in enumerate(trajectory.segments):
        if number:
            messages.append(Message("user", renderer.decode(segment.tokens[: segment.turns[0].start])))
        messages += _said(segment, renderer)
    turns = [turn for segment in trajectory.segments for turn in segment.turns]
    return Transcript(messages, turns, trajectory.meta.truncated)


def _said(segment: Segment, renderer: Renderer) -> Iterator[Message]:
    """What the policy said in each turn, and what it read in between."""
    end = segment.turns[0].start
    for turn in segment.turns:
        if turn.start > end:
            yield Message("user", renderer.decode(segment.tokens[end : turn.start]))
        yield Message("assistant", renderer.decode(segment.tokens[turn.start : turn.stop]))
        end = turn.stop


def _table(found: Sequence[RegradedAttempt]) -> pa.Table:
    rows = [
        {
            "lineage": each.lineage,
            "grp": each.attempt.group,
            "sibling": each.attempt.sibling,
            "try": each.attempt.attempt,
            "task": each.prompt.task,
            "prompt": each.prompt.id,
            "step": each.step,
            "before": each.before,
            "after": each.after.value,
            "status": str(each.after.status),
            "detail": each.after.detail,
        }
        for each in found
    ]
    numbers = dict.fromkeys(("lineage", "grp", "sibling", "try", "step"), pa.int64())
    texts = dict.fromkeys(("task", "prompt", "status", "detail"), pa.string())
    types = numbers | texts | {"before": pa.float64(), "after": pa.float64()}
    order = ("lineage", "grp", "sibling", "try", "task", "prompt", "step", "before", "after", "status", "detail")
    return pa.Table.from_pylist(rows, schema=pa.schema([(name, types[name]) for name in order]))


def _agreement(path: Path, found: Sequence[RegradedAttempt]) -> Agreement:
    changes: dict[str, list[bool]] = defaultdict(list)
    for each in sorted(found, key=lambda each: (each.step is None, each.step)):
        changes["untrained" if each.step is None else f"step {each.step}"].append(each.changed)
    return Agreement(
        path=path,
        attempts=len(found),
        changed=sum(each.changed for each in found),
        confusion=Counter((_class(each.before), _class(each.after.value)) for each in found),
        by_step={step: sum(changed) / len(changed) for step, changed in changes.items()},
    )


def _class(score: float | None) -> str:
    return CLASSES[2] if score is None else CLASSES[0] if score >= 1.0 else CLASSES[1]

"""Grade a finished run again from its record, with its own rewards or with others. The record is not changed.

A transcript is made of the prompt, which the task's source must still have, and of the recorded tokens. Observations between
two turns are there as the policy read them, with the markup of the chat template.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.core.errors import ConfigError
from antiphon.core.types import AttemptId, Message, Prompt, Score, Segment, Trajectory
from antiphon.inspect.recorded_config import has_model
from antiphon.record import safe_files
from antiphon.record.reader import AttemptRow, RunReader
from antiphon.record.run_dir import atomic_write, convert_write_errors
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.graders import start_graders
from antiphon.run.launch.model_directory import model_directory
from antiphon.tasks.base import Transcript
from antiphon.tasks.mixture import Mixture
from antiphon.tasks.rendering import Renderer

CONCURRENT_GRADINGS = 256
CLASSES = ("right", "not right", "ungraded")  # a score of 1 or more is right, as in an evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class RegradedAttempt:
    """One attempt with its recorded and its new score."""

    lineage: int
    attempt: AttemptId
    step: int | None  # that trained on it
    prompt: Prompt
    trajectory: Trajectory
    before: float | None
    after: Score

    @property
    def changed(self) -> bool:
        """True if the score differs, or exists in only one of the two gradings."""
        return self.before != self.after.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """A comparison of recorded and new scores."""

    path: Path  # of the table
    attempts: int
    changed: int
    confusion: Mapping[tuple[str, str], int]  # (before, after), of CLASSES
    by_step: Mapping[str, float]  # share that changed; "untrained" for attempts that no step trained on


def regrade(run: Path, config: RunConfig, name: str) -> Agreement:
    """Grade all recorded attempts of a run with the rewards of `config`, and write `regraded/<name>.parquet` beside the record.

    Raises:
        ConfigError: Scores of a task cannot be compared: it has a group reward or an agent.
        RecordError: The run has no ledger, or it is damaged.
        DataError: The run's prompts are not available any more.
    """
    _require_comparable(config)
    with convert_write_errors(run):
        found = asyncio.run(_grade_all(run, config))
        path = safe_files.resolve_path(run, f"regraded/{name}.parquet")
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as file:
            pq.write_table(_make_table(found), file)
    return _summarize(path, found)


def replace_reward(config: RunConfig, reward: str, options: Mapping[str, Any], task: str = "") -> RunConfig:
    """Return the configuration with another reward for all tasks, or for one of them."""
    names = [each.name for each in config.tasks]
    if task and task not in names:
        message = f"there is no task {task!r}; the run has {', '.join(names)}"
        raise ConfigError(message, key="tasks", value=task, valid=names)
    changes = {"reward": reward, "reward_options": dict(options), "judge": None, "reward_range": None}
    tasks = tuple(each.model_copy(update=changes) if task in ("", each.name) else each for each in config.tasks)
    return config.model_copy(update={"tasks": tasks})


def _require_comparable(config: RunConfig) -> None:
    """Raise `ConfigError` for tasks whose recorded scores depend on more than a reward and a recorded transcript."""
    reasons = [
        f"task {task.name!r} has a group reward, which changed the recorded scores"
        for task in config.tasks
        if task.group_reward
    ]
    reasons += [
        f"task {task.name!r} has an agent, whose result is not recorded and may have been graded"
        for task in config.tasks
        if task.agent
    ]
    if reasons:
        raise ConfigError(f"the run cannot be graded again: {'; '.join(reasons)}", key="tasks")


async def _grade_all(run: Path, config: RunConfig) -> list[RegradedAttempt]:
    mixture, slots = Mixture.load(config.tasks, config.seed), asyncio.Semaphore(CONCURRENT_GRADINGS)
    cluster: Cluster = CLUSTERS.resolve(config.cluster.kind)(config.cluster, None)
    try:
        built = run / "model"
        model = await model_directory(cluster, str(built) if has_model(run) else config.model.path, built, config.seed)
        renderer = Renderer(model)
        async with start_graders(LaunchContext(cluster=cluster, config=config)) as graders:

            async def grade(row: AttemptRow, trajectory: Trajectory) -> RegradedAttempt:
                async with slots:
                    prompt = mixture.find(*row.prompt)
                    transcript = _make_transcript(prompt, trajectory, renderer)
                    after = await graders.router.score(prompt, transcript)
                return RegradedAttempt(
                    lineage=row.lineage,
                    attempt=row.id,
                    step=row.step,
                    prompt=prompt,
                    trajectory=trajectory,
                    before=row.score,
                    after=after,
                )

            return await asyncio.gather(*(grade(*recorded) for recorded in _read_attempts(run)))
    finally:
        await cluster.close()


def _read_attempts(run: Path) -> Iterator[tuple[AttemptRow, Trajectory]]:
    """Yield the attempts that sampled a trajectory which is on record."""
    with RunReader.open(run) as reader:
        for row in list(reader.iterate_recorded()):
            trajectory = reader.read_trajectories(row.file or "").get(row.id)
            if trajectory is not None and trajectory.segments:
                yield row, trajectory


def _make_transcript(prompt: Prompt, trajectory: Trajectory, renderer: Renderer) -> Transcript:
    """Make the transcript that a reward reads; prompts of segments after the first are as the chat template rendered them."""
    messages = list(prompt.messages)
    for number, segment in enumerate(trajectory.segments):
        if number:
            messages.append(Message("user", renderer.decode(segment.tokens[: segment.turns[0].start])))
        messages += _decode_turns(segment, renderer)
    turns = [turn for segment in trajectory.segments for turn in segment.turns]
    return Transcript(messages, turns, trajectory.meta.truncated)


def _decode_turns(segment: Segment, renderer: Renderer) -> Iterator[Message]:
    """Yield the policy's response of each turn, and the observations in between."""
    end = segment.turns[0].start
    for turn in segment.turns:
        if turn.start > end:
            yield Message("user", renderer.decode(segment.tokens[end : turn.start]))
        yield Message("assistant", renderer.decode(segment.tokens[turn.start : turn.stop]))
        end = turn.stop


def _make_table(found: Sequence[RegradedAttempt]) -> pa.Table:
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


def _summarize(path: Path, found: Sequence[RegradedAttempt]) -> Agreement:
    changes: dict[str, list[bool]] = defaultdict(list)
    for each in sorted(found, key=lambda each: (each.step is None, each.step)):
        changes["untrained" if each.step is None else f"step {each.step}"].append(each.changed)
    return Agreement(
        path=path,
        attempts=len(found),
        changed=sum(each.changed for each in found),
        confusion=Counter((_classify(each.before), _classify(each.after.value)) for each in found),
        by_step={step: sum(changed) / len(changed) for step, changed in changes.items()},
    )


def _classify(score: float | None) -> str:
    return CLASSES[2] if score is None else CLASSES[0] if score >= 1.0 else CLASSES[1]

"""A run directory of any size, made by the writers of real runs: ledger, trajectories, metrics and events."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models

import antiphon.record.store
from antiphon.core.config import dump
from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    Credit,
    Failure,
    GroupOutcome,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    Segment,
    Timing,
    Trajectory,
    TrajectoryMeta,
    Turn,
)
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger, run_synchronously
from antiphon.record.metrics import Metrics
from antiphon.record.resume import open_first_lineage
from antiphon.record.run_dir import RunDirectory
from antiphon.record.store import LedgerStore
from antiphon.run.compose import load_config

GROUPS, SIBLINGS, ENGINES = 25, 4, 8  # of a step; the last group of each is not trained on
WORDS = 2_000
RARE = 1_999  # word that one attempt in 20,000 says
PROMPT = 16  # tokens
TASKS = ("addition", "puzzles", "code", "search")
SAMPLING = Sampling(max_tokens=400)
ENDS = (  # of the last group of a step, by turns
    (GroupOutcome.FILTERED, AttemptStatus.FILTERED),
    (GroupOutcome.STALE, AttemptStatus.STALE),
    (GroupOutcome.FAILED, AttemptStatus.FAILED),
)
CURVES = {  # metric: first value, last value, noise
    "reward/mean": (0.1, 0.8, 0.05),
    "length/mean": (40, 60, 3),
    "length/max": (100, 160, 20),
    "length/truncated": (0.1, 0.02, 0.01),
    "learner/entropy": (1.5, 0.4, 0.05),
    "learner/clip_fraction": (0.02, 0.1, 0.01),
    "learner/mismatch_kl": (0.001, 0.004, 0.0005),
    "learner/grad_norm": (2, 0.5, 0.2),
    "learner/loss": (0, 0, 0.01),
    "learner/lr": (3e-4, 1e-5, 0),
    "age/mean": (0, 1, 0.1),
    "age/max": (1, 2, 0),
    "tokens/per_second": (2_000, 2_400, 100),
    "step/wait_groups_share": (0.3, 0.2, 0.05),
    "step/wait_commit_share": (0.01, 0.01, 0.003),
    "groups/filtered": (1, 1, 0.5),
    "groups/failed": (0.2, 0.1, 0.1),
    "groups/stale": (0.2, 0.3, 0.1),
    "bias/length": (-0.02, -0.05, 0.02),
    "bias/score": (0.01, 0.02, 0.01),
    **{f"watch/{task}/{name}": (0.3, 0.4, 0.05) for task in TASKS for name in ("constant", "ungraded", "hacking")},
}


def make_run(place: Path, steps: int, config: Path, *, long_tokens: int = 0) -> Path:
    """Write a run of so many steps of 100 attempts.

    Args:
        place: Folder of runs; the run is `million` in it.
        steps: Number of steps.
        config: Configuration that it is to have had.
        long_tokens: Tokens of each attempt of the last step, so that its file is a large one.
    """

    async def write(run: LiveRun) -> None:
        run.write_quickly()
        for step in range(1, steps + 1):
            await run.step(step / steps, long_tokens if step == steps else 0)

    with LiveRun(place, "million", config) as run:
        asyncio.run(write(run))
    summary = {"accuracy_before": 0.1, "accuracy_after": 0.8, "train_seconds": 10.0 * steps, "steps": steps}
    run.directory.write_summary(summary)
    return run.directory.path


def _write_tokenizer(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    vocabulary = {f" word{number}": number for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, " word0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


class LiveRun:
    """A run that goes on: each call of `step` writes one more."""

    def __init__(self, place: Path, name: str, config: Path) -> None:
        shutil.rmtree(place / name, ignore_errors=True)
        self.directory = RunDirectory.create(place, name)
        shape = [f"rollout.groups_per_step={GROUPS - 1}", f"rollout.group_size={SIBLINGS}", "record.events=true"]
        self.directory.write_config(dump(load_config(config, [f"name={name}", *shape])))
        _write_tokenizer(self.directory.built_model)
        self._clock, self._rng, self._statuses, self._step = [0.0], np.random.default_rng(0), Counter[str](), 0

    def __enter__(self) -> "LiveRun":
        """Open the files; the run counts as running from now on."""
        self._store = LedgerStore(self.directory.path)
        open_first_lineage(self._store)
        self._sink, self._metrics = self.directory.events.open("w"), Metrics(self.directory.metrics)
        self._ledger = Ledger(self._store, Events(lambda: self._clock[0], self._sink), run=run_synchronously)
        self._ledger.balance = lambda: dict(self._statuses)
        return self

    def __exit__(self, *error: object) -> None:
        """Write what is left, and close the files."""
        asyncio.run(self._ledger.close())
        self._sink.close()
        self._metrics.close()

    def write_quickly(self) -> None:
        """Wait for no disk: nothing that is written from now on must outlive a crash."""
        antiphon.record.store.fsync = lambda path: None
        self._store.connection.execute("PRAGMA synchronous = OFF")

    async def step(self, share: float = 0.5, tokens: int = 0) -> None:
        """Write the next step.

        Args:
            share: Place on the curves, 0 to 1.
            tokens: Tokens of each attempt; lengths are random if it is 0.
        """
        self._step += 1
        lengths = np.minimum(self._rng.lognormal(3.6, 0.5, (GROUPS, SIBLINGS)).astype(int) + 1, 400)
        if tokens:
            lengths[:] = tokens
        _write_step(self._ledger, self._clock, self._rng, self._step, lengths)
        self._statuses["dispatched"] += GROUPS * SIBLINGS
        self._statuses["trained"] += (GROUPS - 1) * SIBLINGS
        self._statuses[str(ENDS[self._step % len(ENDS)][1])] += SIBLINGS
        await self._ledger.commit()
        self._metrics.record_all({name: _value(self._rng, curve, share) for name, curve in CURVES.items()})
        self._metrics.record("step/seconds", 10.0)
        if self._step % 50 == 0:
            self._metrics.record("evaluation/accuracy", 0.1 + 0.7 * share)
        self._metrics.flush(self._step)


def _value(rng: np.random.Generator, curve: tuple[float, float, float], share: float) -> float:
    first, last, noise = curve
    return float(first + (last - first) * share + noise * rng.standard_normal())


def _write_step(ledger: Ledger, clock: list[float], rng: np.random.Generator, step: int, lengths: np.ndarray) -> None:
    """Write one step: its groups begin, run on engines, end, and are trained on."""
    begin, version = 10.0 * step, PolicyVersion(0, max(step - 1 - step % 2, 0))
    groups = list(range((step - 1) * GROUPS, step * GROUPS))
    ends = np.sort(begin + 8 * rng.random(lengths.shape).ravel())
    clock[0] = begin - 9
    for group in groups:
        task = TASKS[group % len(TASKS)]
        ledger.add_group(
            group, Prompt(id=f"{task}-{group % 5_000}", task=task, messages=(), epoch=group // 5_000), version
        )
        for sibling in range(SIBLINGS):
            ledger.add_attempt(AttemptId(group, sibling, 0), version)
            ledger.events.add("place", request=f"{group}.{sibling}.0/0", engine=group % ENGINES, prompt=PROMPT)
    arrived = list(_make_trajectories(rng, groups, lengths, version, begin, ends))
    for trajectory, end in zip(arrived, ends, strict=True):
        clock[0], meta = float(end), trajectory.meta
        fields = {"finish": "stop", "tokens": meta.completion_tokens, "versions": [version.n, version.n]}
        ledger.events.add("served", request=f"{meta.id}/0", engine=meta.id.group % ENGINES, **fields)
        ledger.add_trajectory(trajectory)
        ledger.set_status(meta.id, AttemptStatus.FINISHED)
    clock[0] = begin + 8.5
    ledger.begin_step(groups[:-1])
    outcome, status = ENDS[step % len(ENDS)]
    for place, group in enumerate(groups):
        is_trained = place < GROUPS - 1
        ledger.end_group(group, GroupOutcome.COMPLETE if is_trained else outcome)
        for sibling in range(SIBLINGS):
            ledger.set_status(AttemptId(group, sibling, 0), AttemptStatus.TRAINED if is_trained else status)
    scores = [(each.meta, each.meta.score.value or 0.0) for each in arrived[: (GROUPS - 1) * SIBLINGS]]
    ledger.add_credit([Credit(m.id, s, s - 0.5, 1.0, m.completion_tokens, m.completion_tokens) for m, s in scores])
    clock[0] = begin + 9.5
    ledger.end_step(PolicyVersion(0, step))


def _make_trajectories(
    rng: np.random.Generator,
    groups: list[int],
    lengths: np.ndarray,
    version: PolicyVersion,
    begin: float,
    ends: np.ndarray,
) -> Iterator[Trajectory]:
    total = int(lengths.sum()) + PROMPT * lengths.size
    tokens = np.minimum(rng.exponential(150, total), WORDS - 2).astype(
        np.int32
    )  # some words are frequent, most are not
    logprobs = -rng.exponential(0.3, total).astype(np.float32)
    scores, rare, place = rng.random(lengths.size), rng.random(lengths.size) < 5e-5, 0
    for number, length in enumerate(lengths.ravel().tolist()):
        group, sibling = groups[number // SIBLINGS], number % SIBLINGS
        row = slice(place, place := place + PROMPT + length)
        mask = np.arange(PROMPT + length) >= PROMPT
        if rare[number]:
            tokens[row.stop - 1] = RARE
        timing = Timing(queued=begin - 9, started=begin - 8.9, finished=float(ends[number]))
        turn = Turn(start=PROMPT, stop=PROMPT + length, sampling=SAMPLING, timing=timing, engines=(group % ENGINES,))
        segment = Segment(
            tokens=tokens[row],
            loss_mask=mask,
            logprobs=logprobs[row],
            versions=np.full(PROMPT + length, version.n, np.int32),
            turns=(turn,),
        )
        is_failed = group == groups[-1] and ENDS[(groups[-1] // GROUPS + 1) % len(ENDS)][1] is AttemptStatus.FAILED
        meta = TrajectoryMeta(
            id=AttemptId(group, sibling, 0),
            prompt_id=f"{TASKS[group % len(TASKS)]}-{group % 5_000}",
            task=TASKS[group % len(TASKS)],
            started=version,
            newest=version,
            status=AttemptStatus.FAILED if is_failed else AttemptStatus.FINISHED,
            score=Score.of(round(float(scores[number]), 1)),
            failure=Failure(source="reward", message="the grader took longer than 10 s") if is_failed else None,
            prompt_tokens=PROMPT,
            completion_tokens=length,
            turns=1,
            timing=timing,
        )
        yield Trajectory(meta=meta, payload=(segment,))

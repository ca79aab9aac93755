"""Measuring a machine for the planner: a run's real parts, for a minute or two, and what their events say.

Three phases on the same engines and learner. The first and the last are synchronous, with a step's groups and with a quarter
of them: there each part works alone, and seconds against sizes give its speed. The second is asynchronous: how much slower
each part is beside the other. Everything is read from the run's own events and metrics, nothing is instrumented.
"""

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from antiphon.cluster.config import PlacementConfig
from antiphon.cluster.devices import this_machine
from antiphon.core.config import dump
from antiphon.core.deadlines import Deadlines
from antiphon.core.types import Group, Trajectory
from antiphon.record.ledger import Ledger, LedgerStore
from antiphon.record.live import View
from antiphon.record.run_dir import RunDirectory
from antiphon.record.timeline import Served, Timeline, union_length
from antiphon.rollout.config import Policy
from antiphon.run.build import open_run
from antiphon.run.config import RunConfig
from antiphon.run.loop import Run
from antiphon.simulate.components import EnvironmentConfig, LearnerSpeed
from antiphon.simulate.engine import EngineSpeed
from antiphon.simulate.planner import Speeds, parallel_share, predict, trace

PROBE = "-probe"  # what the name of its run ends with
SECONDS = 100.0  # of the three phases together; the parts need a while to start
SKIP = 2  # steps of a phase, in which things get going
FEWEST, MOST = 6, 60  # steps of a phase, however long they take
BUSY = 2.0  # an asynchronous ratio at which neither side waits much
TUNING = 2  # simulations of a phase
TUNING_ATTEMPTS = 4000  # in each


@dataclass(slots=True)
class Phase:
    """What one phase left."""

    timeline: Timeline
    trained_tokens: list[float]  # of each step


class Watch:
    """A `View` that ends the run when its time is up, and enough steps are done."""

    def __init__(self, shown: View, seconds: float) -> None:
        self.run: Run | None = None
        self._shown = shown
        self._until = asyncio.get_running_loop().time() + seconds

    def start(self, name: str, note: str = "") -> None:
        """See `View.start`."""

    def step(self, step: int, steps: int, metrics: Mapping[str, float], deadlines: Deadlines) -> None:
        """See `View.step`."""
        self._shown.step(step, steps, metrics, deadlines)
        if self.run is not None and step >= FEWEST and asyncio.get_running_loop().time() >= self._until:
            self.run.stop()

    def message(self, text: str) -> None:
        """See `View.message`."""
        self._shown.message(text)

    def close(self) -> None:
        """See `View.close`."""


def measure_devices(config: RunConfig, seconds: float, devices: int) -> Speeds:
    """As `measure`; on a machine without GPUs also how much faster a learner of so many threads is, with a second probe."""
    one = measure(config.model_copy(update={"learner": config.learner.model_copy(update={"threads": 1})}), seconds)
    if devices == 1 or this_machine().gpus:
        return one
    threads = config.learner.model_copy(update={"threads": devices})
    many = measure(config.model_copy(update={"learner": threads}), seconds)
    share = parallel_share(one.learner, many.learner, devices)
    speeds = one.model_copy(update={"learner": one.learner.model_copy(update={"parallel": share})})
    _keep(config, speeds)
    return speeds


def speeds_path(config: RunConfig) -> Path:
    """Where a probe of the run leaves what it measured."""
    return Path(config.record.directory, f"{config.name}{PROBE}", "speeds.yaml")


def _keep(config: RunConfig, speeds: Speeds) -> None:
    speeds_path(config).write_text(dump(speeds), encoding="utf-8")


def measure(config: RunConfig, seconds: float) -> Speeds:
    """Run a configuration for about so long, after its warm start; returns what was measured, and leaves it in the probe's
    run directory as `speeds.yaml`."""
    record = config.record.model_copy(update={"events": True, "trackers": ()})
    evaluation = config.evaluation.model_copy(update={"every": 0, "minimum_accuracy": 0.0})
    plain: dict[str, Any] = {"placement": PlacementConfig(), "name": f"{config.name}{PROBE}"}
    plain["checkpoint"] = config.checkpoint.model_copy(update={"every": 0})
    changed = config.model_copy(update={**plain, "record": record, "evaluation": evaluation})
    directory, groups = asyncio.run(_measure(changed, seconds))
    with directory.events.open(encoding="utf-8") as lines, directory.metrics.open(encoding="utf-8") as metrics:
        speeds = fit(config, read_phases(lines, metrics), groups)
    _keep(config, speeds)
    return speeds


async def _measure(config: RunConfig, seconds: float) -> tuple[RunDirectory, list[Group]]:
    async with open_run(config, overwrite=True) as whole:
        version = whole.version
        if config.sft:
            warm = Run(replace(whole.parts, test=()))
            await warm.sft()
            version = warm.version
        phases = make_phases(config)
        groups: list[list[Group]] = [[] for _ in phases]
        places = (whole.parts.directory.path / f"phase-{number}" for number in range(len(phases)))
        for phase, made, place in zip(phases, groups, places, strict=True):

            def look(group: Group, made: list[Group] = made) -> bool:
                made.append(group)
                return True  # nothing is filtered: see `make_phases`

            watch = Watch(whole.parts.view, seconds / len(phases))
            whole.parts.ledger.events.add("phase")
            place.mkdir()
            ledger = Ledger(LedgerStore(place), whole.parts.ledger.events)
            watch.run = run = Run(
                replace(whole.parts, config=phase, keep=look, sampler=None, view=watch, ledger=ledger)
            )
            run.version = version
            await run.reinforce()
            await ledger.close()
            version = run.version
        # A policy that learns from the last phase's small steps may lose its way: its answers are not those of a run.
        return whole.parts.directory, [group for made in groups[:-1] for group in made]


def make_phases(config: RunConfig) -> tuple[RunConfig, RunConfig, RunConfig]:
    """Synchronous, asynchronous, synchronous with fewer groups; all without what would drop or add groups."""
    rollout = config.rollout
    plain = {
        "policy": Policy.QUEUE,
        "extra_groups": 0,
        "redundancy": 0,
        "order": "fifo",
        "filter": None,
        "sampler": None,
    }
    few = max(rollout.groups_per_step // 4, config.learner.minibatches)
    changes: list[dict[str, float]] = [
        {"async_ratio": 0.0},
        {"async_ratio": max(rollout.async_ratio, BUSY)},
        {"async_ratio": 0.0, "groups_per_step": few},
    ]
    first, second, third = (
        config.model_copy(update={"steps": MOST, "rollout": rollout.model_copy(update=plain | change)})
        for change in changes
    )
    return first, second, third


def read_phases(events: Iterable[str], metrics: Iterable[str]) -> list[Phase]:
    """The phases in a probe's files. What came before the first, a warm start, is left out."""
    parts: list[list[str]] = [[]]
    for line in events:
        if json.loads(line)["event"] == "phase":
            parts.append([])
        parts[-1].append(line)
    steps = (line["learner/tokens"] for line in map(json.loads, metrics) if "learner/tokens" in line)
    timelines = [Timeline.read(lines) for lines in parts[1:]]
    return [Phase(timeline, list(itertools.islice(steps, len(timeline.steps)))) for timeline in timelines]


def fit(config: RunConfig, phases: Sequence[Phase], groups: Sequence[Group]) -> Speeds:
    """Speeds that explain what the three phases of `make_phases` left; `groups` say what the work to come is like."""
    first, together, last = phases
    alone = (first, last)
    learner = _learner(alone)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    speeds = Speeds(
        engine=_engine(alone, config.engine.slots),
        learner=learner.model_copy(update={"beside_engines": _learner_beside(together, learner)}),
        prompt_tokens=trace([trajectory.segments[0].turns[0].start for trajectory in trajectories]),
        response_tokens=trace(
            [turn.stop - turn.start for trajectory in trajectories for turn in trajectory.segments[-1].turns],
            shared=estimate_correlation([[t.meta.completion_tokens for t in group.trajectories] for group in groups]),
        ),
        reward_seconds=trace(_grading(alone)),
        success=trace(
            shrink_success_rates([[t.meta.score.value or 0.0 for t in group.trajectories] for group in groups])
        ),
        environment=_environment(phases, trajectories) if config.rollout.max_turns > 1 else None,
    )
    return _tuned(speeds, config, first, together)


# --- each part by itself -----------------------------------------------------------------------------------------------


def _learner(alone: Sequence[Phase]) -> LearnerSpeed:
    """A step's seconds against its tokens; publishing is part of the constant."""
    rows, seconds = [], []
    for phase in alone:
        for (taken, published), tokens in list(zip(phase.timeline.steps, phase.trained_tokens, strict=True))[SKIP:]:
            rows.append([1.0, tokens])
            seconds.append(published - taken)
    step, per_token = fit_nonnegative(rows, seconds)
    return LearnerSpeed(step=step, per_token=per_token)


def _engine(alone: Sequence[Phase], slots: int) -> EngineSpeed:
    """The seconds in which an engine had requests, step by step, against its iterations, the tokens it computed, and those
    in the cache at each of them. A token that is read counts as one that is sampled: groups of one size have as many of
    either, and cannot tell them apart."""
    rows, seconds = [], []
    for phase in alone:
        for before, step in itertools.pairwise(phase.timeline.steps[SKIP - 1 :]):
            by_engine: dict[int, list[Served]] = defaultdict(list)
            for request in phase.timeline.within(before[1], step[0]):
                by_engine[request.engine].append(request)
            for requests in by_engine.values():
                iterations, sampled, read, in_cache = _work(requests, slots)
                rows.append([iterations, sampled + read, in_cache])
                seconds.append(union_length((request.placed, request.served) for request in requests))
    iteration, token, cached = fit_nonnegative(rows, seconds)
    loads = [load for phase in alone for load in phase.timeline.loads]
    return EngineSpeed(
        iteration=iteration,
        per_sequence=token,
        per_token=cached,
        prefill=token,
        load=median(loads) if loads else 0.0,
    )


def _work(requests: Sequence[Served], slots: int) -> tuple[float, float, float, float]:
    """Iterations, tokens sampled, prompt tokens read (siblings' once), and tokens in the cache, summed over those sampled."""
    length: dict[str, int] = defaultdict(int)  # of an attempt: its turns come one after another
    for request in requests:
        length[request.attempt] += request.tokens
    tokens = sum(request.tokens for request in requests)
    prompts = {(request.engine, request.group, request.prompt) for request in requests}
    in_cache = sum(request.tokens * (request.prompt + request.tokens / 2) for request in requests)
    return max(max(length.values()), tokens / slots), tokens, sum(prompt for _, _, prompt in prompts), in_cache


def _grading(phases: Sequence[Phase]) -> list[float]:
    """From an attempt's last token to its score."""
    latencies = []
    for phase in phases:
        last = {request.attempt: request.served for request in phase.timeline.served}
        latencies += [end - last[key] for key, end in phase.timeline.finished.items() if key in last]
    return latencies


def _environment(phases: Sequence[Phase], trajectories: Sequence[Trajectory]) -> EnvironmentConfig:
    """From the end of one turn to the beginning of the next, and what was said in between."""
    gaps, said = [], []
    for phase in phases:
        turns: dict[str, float] = {}
        for request in phase.timeline.served:
            if request.attempt in turns:
                gaps.append(max(request.placed - turns[request.attempt], 0.0))
            turns[request.attempt] = request.served
    for trajectory in trajectories:
        for segment in trajectory.segments:
            said += [later.start - turn.stop for turn, later in itertools.pairwise(segment.turns)]
    return EnvironmentConfig(
        step_seconds=trace(gaps or [0.0]),
        turns=trace([sum(len(segment.turns) for segment in trajectory.segments) for trajectory in trajectories]),
        observation_tokens=trace(said or [1.0]),
    )


# --- both at once ------------------------------------------------------------------------------------------------------


def _learner_beside(together: Phase, alone: LearnerSpeed) -> float:
    """How much longer the learner's steps took than they would have."""
    timeline, tokens = together.timeline, together.trained_tokens[SKIP:]
    took = sum(published - taken for taken, published in timeline.steps[SKIP:])
    return took / sum(alone.step + alone.per_token * count for count in tokens)


def _tuned(speeds: Speeds, config: RunConfig, alone: Phase, together: Phase) -> Speeds:
    """Speeds adjusted until simulated phases keep the engines busy, and everyone waiting, for as long as the real ones did:
    first alone, then beside the learner. Arithmetic on requests knows neither how they queue nor what an engine reads again,
    nor that answers which come together are graded one after another."""
    first, second, _ = make_phases(config)
    busy_alone, waiting = _seen(alone)
    for _ in range(TUNING):
        busy, predicted = _predict_phase(first, speeds)
        costs = ("iteration", "per_sequence", "per_token", "prefill")
        slower = {name: getattr(speeds.engine, name) * busy_alone / busy for name in costs}
        seen, simulated = (max(seconds - speeds.engine.load, 0.0) for seconds in (waiting, predicted))
        grading = seen / simulated if seen < simulated else 1.0
        speeds = speeds.model_copy(
            update={
                "engine": speeds.engine.model_copy(update=slower),
                "reward_seconds": trace([seconds * grading for seconds in speeds.reward_seconds.values]),
            }
        )
    for _ in range(TUNING):
        factor = _seen(together)[0] / _predict_phase(second, speeds)[0]
        beside = {"beside_learner": speeds.engine.beside_learner * factor}
        speeds = speeds.model_copy(update={"engine": speeds.engine.model_copy(update=beside)})
    return speeds


def _seen(phase: Phase) -> tuple[float, float]:
    timeline = phase.timeline
    return _seconds(timeline.step_seconds(SKIP), timeline.learner_idle(SKIP), timeline.engines_idle(SKIP))


def _predict_phase(config: RunConfig, speeds: Speeds) -> tuple[float, float]:
    plan = predict(config, speeds, attempts=TUNING_ATTEMPTS)
    return _seconds(plan.step_seconds, plan.learner_idle, plan.engines_idle)


def _seconds(step: float, learner_idle: float, engines_idle: float) -> tuple[float, float]:
    """Of a step: those in which an engine had requests, and, if engines and learner take turns, those in which nobody works."""
    return step * (1 - engines_idle), step * (learner_idle + engines_idle - 1)


# --- numbers -----------------------------------------------------------------------------------------------------------


def fit_nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients of at least 0 that explain the values with the least relative error: of all subsets of the columns, the
    best that needs no negative one. There are few columns."""
    wanted = np.asarray(values, float)
    matrix = np.asarray(rows, float) / wanted[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    best, error = np.zeros(matrix.shape[1]), float("inf")
    columns = range(matrix.shape[1])
    for size in range(1, len(columns) + 1):
        for chosen in map(list, itertools.combinations(columns, size)):
            found = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], np.ones(len(wanted)))[0] / scale[chosen]
            off = float(((matrix[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and off < error * (1 - 1e-9):
                best, error = np.zeros(len(columns)), off
                best[chosen] = found
    return [float(number) for number in best]


def estimate_variances(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Variance of what lies behind the groups, that is without what their means owe to chance; and variance within."""
    sized = [np.asarray(group, float) for group in groups if len(group) > 1]
    if len(sized) < 2:
        return 0.0, 0.0
    within = fmean(float(group.var(ddof=1)) for group in sized)
    between = float(np.var([group.mean() for group in sized], ddof=1)) - within / fmean(map(len, sized))
    return max(between, 0.0), within


def estimate_correlation(groups: Sequence[Sequence[float]]) -> float:
    """How alike the siblings of a group are: the intraclass correlation, between 0 and 1."""
    between, within = estimate_variances(groups)
    return between / (between + within) if between else 0.0


def shrink_success_rates(groups: Sequence[Sequence[float]]) -> list[float]:
    """Probabilities of success that groups of scores come from: their means, drawn together until they are as far apart as
    what lies behind them. Means of a few scores lie further apart, and more of them are all or nothing."""
    means = np.array([fmean(group) for group in groups])
    between, _ = estimate_variances(groups)
    observed = float(means.var(ddof=1)) if len(means) > 1 else 0.0
    factor = (between / observed) ** 0.5 if observed else 0.0
    return [float(chance) for chance in np.clip(means.mean() + factor * (means - means.mean()), 0.0, 1.0)]

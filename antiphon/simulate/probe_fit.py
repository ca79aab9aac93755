"""Fit the speeds of a run's parts to the phases of a probe."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from antiphon.core.types import Group, Trajectory
from antiphon.record.timeline import Served, union_length
from antiphon.run.config import RunConfig
from antiphon.simulate.engine_speed import EngineSpeed
from antiphon.simulate.environment import EnvironmentConfig
from antiphon.simulate.estimators import estimate_correlation, fit_nonnegative, shrink_success_rates
from antiphon.simulate.learner import LearnerSpeed
from antiphon.simulate.planner import predict
from antiphon.simulate.probe_phases import Phase, make_phases
from antiphon.simulate.speeds import Speeds, make_trace

SKIPPED_STEPS = 2  # of a phase, until its pace is steady
TUNING = 2  # simulations of a phase
TUNING_ATTEMPTS = 4000  # in each


def fit(config: RunConfig, phases: Sequence[Phase], groups: Sequence[Group]) -> Speeds:
    """Fit speeds that explain the three phases of `make_phases`.

    Args:
        config: The run.
        phases: Its phases.
        groups: Groups of the first two, which show what the work of the run is like.
    """
    first, beside, last = phases
    alone = (first, last)
    learner = _fit_learner(alone)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    speeds = Speeds(
        engine=_fit_engine(alone, config.engine.slots),
        learner=learner.model_copy(update={"beside_engines": _fit_interference(beside, learner)}),
        prompt_tokens=make_trace([trajectory.segments[0].turns[0].start for trajectory in trajectories]),
        response_tokens=make_trace(
            [turn.stop - turn.start for trajectory in trajectories for turn in trajectory.segments[-1].turns],
            shared=estimate_correlation([[t.meta.completion_tokens for t in group.trajectories] for group in groups]),
        ),
        reward_seconds=make_trace(_measure_grading(alone)),
        success=make_trace(
            shrink_success_rates([[t.meta.score.value or 0.0 for t in group.trajectories] for group in groups])
        ),
        environment=_measure_environment(phases, trajectories) if config.rollout.max_turns > 1 else None,
    )
    return _tune(speeds, config, first, beside)


def _fit_learner(alone: Sequence[Phase]) -> LearnerSpeed:
    """Fit a step's seconds to its tokens; publishing is part of the constant."""
    rows, seconds = [], []
    for phase in alone:
        for (taken, published), tokens in list(zip(phase.timeline.steps, phase.trained_tokens, strict=True))[
            SKIPPED_STEPS:
        ]:
            rows.append([1.0, tokens])
            seconds.append(published - taken)
    step, per_token = fit_nonnegative(rows, seconds)
    return LearnerSpeed(step=step, per_token=per_token)


def _fit_engine(alone: Sequence[Phase], slots: int) -> EngineSpeed:
    """Fit the seconds in which an engine had requests, step by step, to its iterations and tokens.

    Prefilled and sampled tokens get the same cost: groups of one size have as many of either and cannot tell them apart.
    """
    rows, seconds = [], []
    for phase in alone:
        for before, step in itertools.pairwise(phase.timeline.steps[SKIPPED_STEPS - 1 :]):
            by_engine: dict[int, list[Served]] = defaultdict(list)
            for request in phase.timeline.within(before[1], step[0]):
                by_engine[request.engine].append(request)
            for requests in by_engine.values():
                iterations, sampled, read, in_cache = _count_work(requests, slots)
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


def _count_work(requests: Sequence[Served], slots: int) -> tuple[float, float, float, float]:
    """Return iterations, sampled tokens, prefilled tokens (once for siblings), and cached tokens summed over sampled ones."""
    length: dict[str, int] = defaultdict(int)  # of an attempt: its turns come one after another
    for request in requests:
        length[request.attempt] += request.tokens
    tokens = sum(request.tokens for request in requests)
    prompts = {(request.engine, request.group, request.prompt) for request in requests}
    in_cache = sum(request.tokens * (request.prompt + request.tokens / 2) for request in requests)
    return max(max(length.values()), tokens / slots), tokens, sum(prompt for _, _, prompt in prompts), in_cache


def _measure_grading(phases: Sequence[Phase]) -> list[float]:
    """Return the seconds from each attempt's last token to its score."""
    latencies = []
    for phase in phases:
        last = {request.attempt: request.served for request in phase.timeline.served}
        latencies += [end - last[key] for key, end in phase.timeline.finished.items() if key in last]
    return latencies


def _measure_environment(phases: Sequence[Phase], trajectories: Sequence[Trajectory]) -> EnvironmentConfig:
    """Return the seconds between turns, the number of turns, and the lengths of observations."""
    gaps, observations = [], []
    for phase in phases:
        turns: dict[str, float] = {}
        for request in phase.timeline.served:
            if request.attempt in turns:
                gaps.append(max(request.placed - turns[request.attempt], 0.0))
            turns[request.attempt] = request.served
    for trajectory in trajectories:
        for segment in trajectory.segments:
            observations += [later.start - turn.stop for turn, later in itertools.pairwise(segment.turns)]
    return EnvironmentConfig(
        step_seconds=make_trace(gaps or [0.0]),
        turns=make_trace([sum(len(segment.turns) for segment in trajectory.segments) for trajectory in trajectories]),
        observation_tokens=make_trace(observations or [1.0]),
    )


def _fit_interference(beside: Phase, alone: LearnerSpeed) -> float:
    """Return the factor by which the learner's steps were slower beside engines."""
    timeline, tokens = beside.timeline, beside.trained_tokens[SKIPPED_STEPS:]
    took = sum(published - taken for taken, published in timeline.steps[SKIPPED_STEPS:])
    return took / sum(alone.step + alone.per_token * count for count in tokens)


def _tune(speeds: Speeds, config: RunConfig, alone: Phase, beside: Phase) -> Speeds:
    """Adjust speeds until simulated phases have the busy and the waiting time of the real ones: alone, then beside the learner.

    The fit of single requests knows neither how they queue, nor what an engine prefills again, nor that responses which come
    together are graded one after another.
    """
    first, second, _ = make_phases(config)
    busy_alone, waiting = _measure_phase(alone)
    for _ in range(TUNING):
        busy, predicted = _predict_phase(first, speeds)
        costs = ("iteration", "per_sequence", "per_token", "prefill")
        slower = {name: getattr(speeds.engine, name) * busy_alone / busy for name in costs}
        seen, simulated = (max(seconds - speeds.engine.load, 0.0) for seconds in (waiting, predicted))
        grading = seen / simulated if seen < simulated else 1.0
        speeds = speeds.model_copy(
            update={
                "engine": speeds.engine.model_copy(update=slower),
                "reward_seconds": make_trace([seconds * grading for seconds in speeds.reward_seconds.values]),
            }
        )
    for _ in range(TUNING):
        factor = _measure_phase(beside)[0] / _predict_phase(second, speeds)[0]
        slower = {"beside_learner": speeds.engine.beside_learner * factor}
        speeds = speeds.model_copy(update={"engine": speeds.engine.model_copy(update=slower)})
    return speeds


def _measure_phase(phase: Phase) -> tuple[float, float]:
    timeline, skip = phase.timeline, SKIPPED_STEPS
    return _split_seconds(timeline.step_seconds(skip), timeline.learner_idle(skip), timeline.engines_idle(skip))


def _predict_phase(config: RunConfig, speeds: Speeds) -> tuple[float, float]:
    plan = predict(config, speeds, attempts=TUNING_ATTEMPTS)
    return _split_seconds(plan.step_seconds, plan.learner_idle, plan.engines_idle)


def _split_seconds(step: float, learner_idle: float, engines_idle: float) -> tuple[float, float]:
    """Return the seconds of a step in which an engine had requests, and those in which neither side worked."""
    return step * (1 - engines_idle), step * (learner_idle + engines_idle - 1)

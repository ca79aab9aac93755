"""Simulate random scenarios with faults and check the invariants of each run: `antiphon simulate --chaos`."""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from antiphon.core.errors import RolloutError, WorkerDiedError
from antiphon.simulate.chaos_scenario import draw_scenario
from antiphon.simulate.invariants import CheckedDeadlines, InvariantChecker, InvariantError
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import ScenarioConfig


def run_chaos(seeds: Iterable[int], events: Path | None = None, report: Callable[[str], None] = print) -> Counter[str]:
    """Simulate the scenarios of many seeds.

    Args:
        seeds: The seeds.
        events: File for the events of the last run.
        report: Receives the command that repeats a seed whose run breaks an invariant.

    Returns:
        How many runs ended in which way.

    Raises:
        InvariantError: A run broke an invariant.
    """
    endings: Counter[str] = Counter()
    for seed in seeds:
        log = io.StringIO()
        try:
            endings[run_seed(seed, log)] += 1
        except InvariantError:
            report(f"seed {seed} fails; again: antiphon simulate --chaos 1 --seed {seed} --events events.jsonl")
            raise
        finally:
            if events is not None:
                events.write_text(log.getvalue(), encoding="utf-8")
    return endings


def run_seed(seed: int, log: io.StringIO) -> str:
    """Simulate the scenario of a seed, with its events written to `log`.

    Returns:
        How the run ended: `done`, or the message of a fault that may end it.

    Raises:
        InvariantError: The run broke an invariant, or ended for a reason that no fault explains.
    """
    scenario, error = draw_scenario(seed), None
    try:
        simulate(scenario, log, CheckedDeadlines())
    except (WorkerDiedError, RolloutError) as raised:
        error = raised
    except Exception as raised:  # no fault explains any other error
        raise InvariantError(f"the run failed: {type(raised).__name__}: {raised}") from raised
    checker = InvariantChecker(scenario.rollout)
    checker.check(log.getvalue().splitlines())
    if error is None:
        checker.check_end(scenario.steps)
        return "done"
    if not _is_explained(error, scenario, checker):
        raise InvariantError(f"the run failed, and no fault explains it: {error}") from error
    return re.sub(r"\d+", "n", str(error))


def _is_explained(error: WorkerDiedError | RolloutError, scenario: ScenarioConfig, checker: InvariantChecker) -> bool:
    """Return True if a fault may end a run: of the learner, of all engines and their successors, of all attempts of a group."""
    if isinstance(error, RolloutError):
        return bool(checker.faults & {"reward.lost", "environment.slow", "environment.hang", "environment.fail"})
    if "learner" in str(error):
        return "learner.crash" in checker.faults
    is_exhausted = len(checker.engines) == scenario.engines.count + scenario.rollout.engine_restarts
    return is_exhausted and checker.lost == set(checker.engines)

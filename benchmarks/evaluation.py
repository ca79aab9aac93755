"""How long the learner waits for evaluations: beside training, and between two steps.

    python benchmarks/evaluation.py

Simulates one run twice, with the run's own loop, scheduler, engine pool and ledger on a virtual clock: with evaluations beside
training, and with `evaluation.blocking`. There are four times as many rollouts as slots, so that evaluations take slots that
rollouts could use. Figures are shares of virtual time, so they are the same on every machine. It takes a minute or two.
"""

from typing import Any

from _common import SIMULATION, table, write_result

from antiphon.simulate.outcome import Outcome
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import ScenarioConfig

SCENARIO: dict[str, Any] = {
    "steps": 60,
    "rollout": {"groups_per_step": 16, "group_size": 8, "async_ratio": 1, "sampling": {"max_tokens": 8192}},
    "engines": {"count": 8, "speed": {"slots": 8}},
    "learner": {"per_token": 3e-4},
    "test_prompts": 256,
}
EVERY, CONCURRENCY = 10, 16  # a quarter of all slots, which is the default of a run


def main() -> None:
    evaluations = {"beside": {"concurrency": CONCURRENCY}, "blocking": {"blocking": True}}
    found = {
        name: simulate(ScenarioConfig(**SCENARIO, evaluation={"every": EVERY, **settings}))
        for name, settings in evaluations.items()
    }
    none = simulate(ScenarioConfig(**SCENARIO))
    rows = [[name, *(f"{value:.4f}" for value in describe(outcome, none).values())] for name, outcome in found.items()]
    print(table(["evaluation", *describe(none, none)], rows))
    beside, blocking = (describe(outcome, none) for outcome in found.values())
    figures = {**beside, **{f"blocking_{name}": value for name, value in blocking.items()}}
    print(f"\nwritten to {write_result('evaluation', figures, measures=(*SIMULATION, 'antiphon.run.evaluations'))}")


def describe(outcome: Outcome, none: Outcome) -> dict[str, float]:
    """Compare a run with one that evaluates nothing on the way."""
    evaluated = [step for step in outcome.steps if "evaluation/accuracy" in step]
    spans = [step["evaluation/last_version"] - step["evaluation/first_version"] for step in evaluated]
    seconds = outcome.summary["train_seconds"]
    return {
        "learner_seconds_waited_share": sum(step["evaluation/wait_seconds"] for step in evaluated) / seconds,
        "run_seconds_added_share": seconds / none.summary["train_seconds"] - 1,
        "evaluations": float(len(evaluated)),
        "versions_spanned_max": max(spans, default=0.0),
    }


if __name__ == "__main__":
    main()

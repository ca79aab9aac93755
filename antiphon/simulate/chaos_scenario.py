"""Draw a random scenario with faults from a seed.

The order of the draws is fixed: a seed keeps its scenario only as long as nothing is drawn in between.
"""

from typing import Any

import numpy as np

from antiphon.core.rng import generator
from antiphon.rollout.config import RolloutConfig
from antiphon.simulate.scenario import ScenarioConfig
from antiphon.weights.config import WeightSyncConfig

RATIOS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.75)


def draw_scenario(seed: int) -> ScenarioConfig:
    """Draw the scenario of a seed: schedule, sizes, speeds and faults."""
    rng = generator(seed, "chaos")
    rollout = _draw_rollout(rng)
    is_agentic = rollout["max_turns"] > 1
    faults = _draw_faults(rng, is_agentic)
    scenario = ScenarioConfig.model_validate(
        {
            "name": "chaos",
            "seed": seed,
            "steps": int(rng.integers(3, 8)),
            "rollout": rollout,
            "engines": _draw_engines(rng),
            "learner": {"step": float(_choose(rng, 0.1, 2.0, 10.0)), "publish": 0.5},
            "prompts": int(_choose(rng, 3, 50)),
            "prompt_tokens": {"kind": "lognormal", "mean": 60, "spread": 0.5},
            "response_tokens": {"kind": "lognormal", "mean": 60 if is_agentic else 200, "spread": 1.0, "shared": 0.5},
            "reward_seconds": {"kind": "uniform", "mean": 0.5, "spread": 0.5},
            "environment": {"turns": {"kind": "uniform", "mean": 4, "spread": 3}} if is_agentic else None,
            "faults": faults,
        }
    )
    # Streams of their own: they came later, and the other draws stay as they were.
    if (every := _draw_update_interval(generator(seed, "chaos.every"), scenario.rollout)) > 1:
        scenario = scenario.model_copy(update={"weights": WeightSyncConfig(every=every)})
    sharing = generator(seed, "chaos.lent")
    if sharing.random() < 0.4:
        lent = int(sharing.integers(1, scenario.engines.count + 1))
        return scenario.model_copy(update={"engines": scenario.engines.model_copy(update={"lent": lent})})
    return scenario


def _draw_rollout(rng: np.random.Generator) -> dict[str, Any]:
    policy = _choose(rng, "queue", "queue", "queue", "queue", "batch", "one_step_off", "tail_batching")
    waits_for_all, is_tail = policy in ("batch", "one_step_off"), policy == "tail_batching"
    ratio = {"batch": 0.0, "one_step_off": 1.0, "tail_batching": 0.0}.get(policy, float(_choose(rng, *RATIOS)))
    is_agentic = bool(rng.random() < 0.3)
    drawn = {
        "policy": policy,
        "placement": _choose(rng, "spread", "spread", "pinned"),
        "groups_per_step": int(rng.integers(1, 6)),
        "group_size": int(rng.integers(2, 5)),
        "async_ratio": ratio,
        "extra_groups": 0 if policy == "one_step_off" else int(rng.integers(1 if is_tail else 0, 4)),
        "redundancy": 0 if waits_for_all else int(rng.integers(0, 3)),
        "order": "ready" if is_tail else _choose(rng, "fifo", "ready"),
        "on_expiry": _choose(rng, "abort", "wait"),
        "on_update": _choose(rng, "keep", "recompute", "restart", "drain"),
        "filter": _choose(rng, None, "spread") if not is_tail else None,
        "max_attempts": int(rng.integers(1, 4)),
        "max_turns": 6 if is_agentic else 1,
        "timeout": 20000.0,
        "engine_timeout": 20.0,
        "load_timeout": 20.0,
        "environment_timeout": 30.0,
        "sampling": {"max_tokens": 2000},
    }
    return drawn if drawn["order"] == "ready" else drawn | {"on_expiry": "abort"}  # a step in `fifo` always waits


def _draw_update_interval(rng: np.random.Generator, rollout: RolloutConfig) -> int:
    """Draw the steps between two updates of the engines, as many as the asynchronous ratio allows or fewer."""
    return 1 if rollout.in_rounds else int(rng.integers(1, int(rollout.async_ratio) + 2))


def _draw_engines(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "count": int(rng.integers(1, 5)),
        "start_seconds": 5.0,
        "speed": {
            "slots": int(rng.integers(1, 9)),
            "iteration": 0.02,
            "per_sequence": 0.001,
            "per_token": 1e-7,
            "prefill": 1e-4,
            "memory": int(_choose(rng, 1 << 40, 6000)),
            "load": float(_choose(rng, 0.0, 1.0)),
        },
    }


def _draw_faults(rng: np.random.Generator, is_agentic: bool) -> list[dict[str, Any]]:
    """Draw which kinds of faults happen, and when."""
    possible = [
        {"point": "engine.crash", "at": float(rng.uniform(0, 60)), "every": 60.0},
        {"point": "engine.hang", "at": float(rng.uniform(0, 60)), "every": 90.0},
        {"point": "engine.slow", "at": float(rng.uniform(0, 60)), "every": 40.0, "seconds": 30.0},
        {"point": "engine.load", "chance": 0.05},
        {"point": "reward.lost", "chance": 0.05},
        {"point": "learner.crash", "chance": 0.02},
    ]
    if is_agentic:
        possible += [
            {"point": "environment.slow", "chance": 0.1},
            {"point": "environment.hang", "chance": 0.01},
            {"point": "environment.fail", "chance": 0.01},
        ]
    return [fault for fault in possible if rng.random() < 0.4]


def _choose(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]

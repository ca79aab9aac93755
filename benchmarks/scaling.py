"""Beyond what can be run here: scaling to 16,384 engines, and what each scheduling technique gains, alone and together.

    python benchmarks/scaling.py

Virtual time on the library's own loop, with the engine of `published.py`, and lengths of which the longest of ten thousand is
twenty times the median. Strong scaling: one batch, more devices. Weak scaling: the batch grows with them. The controller's own
time is real: where it needs more than a second of one core a virtual second, it is the limit.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from _common import SIMULATION, table, write_result
from published import BATCH, Calibration, play, scenario

TRAIN_SHARE = 0.4
TRAIN_TOKEN = 2.2e-4  # seconds a token on one device: 30 % of its peak
LENGTHS = Calibration(mean=3000, spread=0.8, shared=0.5, disagreement=0.3)
SHORT = replace(LENGTHS, mean=750)  # of weak scaling: the largest step has 131,072 answers, and all are held in memory
BASELINE = "batch rollout"
TECHNIQUES: dict[str, dict[str, Any]] = {
    BASELINE: BATCH,
    "replication": BATCH | {"placement": "spread"},
    "queue": {"filter": "spread", "placement": "pinned"},
    "queue, replication": {"filter": "spread"},
    "queue, replication, redundancy": {"filter": "spread", "order": "ready", "extra_groups": 16, "redundancy": 2},
    "tail batching": {
        "policy": "tail_batching",
        "filter": "spread",
        "order": "ready",
        "extra_groups": 16,
        "redundancy": 2,
    },
    "one step off": {"policy": "one_step_off", "async_ratio": 1.0, "filter": "spread", "on_update": "drain"},
    "asynchronous, ratio 1": {"filter": "spread", "async_ratio": 1.0},
    "asynchronous, ratio 2": {"filter": "spread", "async_ratio": 2.0},
    "asynchronous, ratio 2, redundancy": {
        "filter": "spread",
        "async_ratio": 2.0,
        "order": "ready",
        "extra_groups": 16,
        "redundancy": 2,
    },
}


def technique(
    rollout: dict[str, Any], devices: int, groups: int, size: int, steps: int, lengths: Calibration = LENGTHS
) -> dict[str, Any]:
    """Devices take turns, or are split for generation and training if the ratio lets them overlap."""
    apart = rollout.get("async_ratio", 0.0) > 0
    train = round(devices * TRAIN_SHARE) if apart else devices
    return scenario(
        lengths,
        devices - train if apart else devices,
        groups,
        size,
        steps=steps,
        rollout=rollout,
        learner={"per_token": TRAIN_TOKEN / train, "publish": 5.0},
    )


def measured(config: dict[str, Any], warm: int = 2) -> dict[str, float]:
    """One run: what its later steps were like."""
    began = time.process_time()
    outcome = play(config, seed=0)
    controller = time.process_time() - began
    steps = outcome.steps[warm:]
    return {
        "seconds": statistics.fmean(step["step/seconds"] for step in steps),
        "controller": controller / sum(step["step/seconds"] for step in outcome.steps),
        "tokens": statistics.fmean(step["learner/tokens"] for step in steps),
        "length": outcome.steps[-1]["bias/length"],
        "idle": outcome.engines_idle,
    }


def techniques(figures: dict[str, float]) -> None:
    """Every technique on 32 devices, 64 x 16."""
    rows, base = [], 0.0
    for name, rollout in TECHNIQUES.items():
        found = measured(technique(rollout, 32, 64, 16, steps=8))
        rate = found["tokens"] / found["seconds"]
        base = base or rate
        key = "_".join(name.replace(",", "").split())
        figures |= {f"gain_{key}": rate / base, f"length_bias_{key}": found["length"]}
        rows.append(
            [name, f"{found['seconds']:.0f}", f"{rate / base:.2f}", f"{found['idle']:.0%}", f"{found['length']:+.0%}"]
        )
        print(rows[-1], flush=True)
    print(table(["schedule", "s a step", "tokens/s, relative", "engines idle", "length bias"], rows), end="\n\n")


def scaling(figures: dict[str, float], kind: str, most: int) -> None:
    """Strong: 1024 x 16 whatever the devices. Weak: half a group of 16 a device."""
    rows, first = [], 0.0
    devices = 16
    while devices <= most:
        groups, lengths = (1024, LENGTHS) if kind == "strong" else (devices // 2, SHORT)
        found = measured(technique({"async_ratio": 1.0}, devices, groups, 16, steps=3, lengths=lengths), warm=1)
        rate = found["tokens"] / found["seconds"] / devices
        first = first or rate
        figures[f"{kind}_efficiency_{devices}"] = rate / first
        figures[f"{kind}_controller_share_{devices}"] = found["controller"]
        figures[f"{kind}_step_seconds_{devices}"] = found["seconds"]
        rows.append(
            [
                str(devices),
                str(groups * 16),
                f"{found['seconds']:.0f}",
                f"{rate / first:.0%}",
                f"{found['controller']:.1%}",
            ]
        )
        print(kind, rows[-1], flush=True)
        devices *= 4
    print(table(["devices", "attempts a step", "s a step", "efficiency", "controller"], rows), end="\n\n")


def main() -> None:
    """All three tables, one result."""
    parser = argparse.ArgumentParser(description="Scaling and techniques, simulated.")
    parser.add_argument("--most", type=int, default=16384)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    figures: dict[str, float] = {}
    techniques(figures)
    for kind in ("strong", "weak"):
        scaling(figures, kind, args.most)
    print("written:", write_result("scaling", figures, args.out, measures=SIMULATION))


if __name__ == "__main__":
    main()

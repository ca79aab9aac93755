"""Whether an agent of a framework that knows nothing of us is trained on exactly what was sampled: every trajectory of a run.

    python benchmarks/agent_framework.py [--seeds 3]

Runs `recipes/agent_framework`, an agent of OpenAI's Agents SDK as it is, for its 20 steps; engines and framework write down
what they sampled and got (`agent_framework/`). Then the record is held against both, and all log-probs are computed anew. The
first seed is run once more with a chat template that writes history anew, as real ones do: an earlier reply is upper-cased and
trimmed, and its calls of tools have other spaces, and their keys in another order. `rendered_otherwise` counts the turns in
which prompts that are rendered anew would have been other tokens than those that were sampled after.

Draws `recipes/agent_framework/curve.png`.
"""

import argparse
import os
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from statistics import mean

import matplotlib
from _common import ROOT, WHOLE_RUN, table, write_result
from _runs import Finished, run

from antiphon.inspect.audit import audit

PARTS = ROOT / "benchmarks" / "agent_framework"
sys.path.insert(0, str(PARTS))
from exactness import Exactness, verify  # noqa: E402 - beside the witnesses, which runs import by name

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

CONFIG = ROOT / "recipes" / "agent_framework" / "config.yaml"
WITNESSED = (
    "engine.kind=engine_witness:open_engine",
    "tasks.0.agent.function=agent_witness:agent",
    "checkpoint={every: 1, keep_last: 1000}",  # the weights of every version
)
REWRITING = "model.path=rewriting:build"


def main() -> None:
    """Run, check, write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/agent_framework"))
    parser.add_argument("--resume", action="store_true", help="check runs that have ended again, as they are")
    options = parser.parse_args()
    cases = {f"seed_{seed}": (f"seed={seed}",) for seed in range(options.seeds)}
    cases["rewriting_template"] = ("seed=0", REWRITING)
    figures: dict[str, float] = {}
    rows, curves, total = [], [], Exactness()
    for name, overrides in cases.items():
        finished, found = witnessed(name, overrides, options.runs, options.resume)
        measured = measure(finished, found)
        figures |= {f"{name}_{key}": value for key, value in measured.items()}
        rows.append([name, *(f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in measured.values())])
        print(table(["", *measured], rows[-1:]), *found.mismatches[:5], sep="\n", flush=True)
        curves.append(finished.column("reward/mean"))
        for each in ("trajectories", "sampled_tokens", "recomputed_tokens"):
            setattr(total, each, getattr(total, each) + getattr(found, each))
        total.mismatches += found.mismatches
    for each in ("trajectories", "sampled_tokens", "recomputed_tokens"):
        figures[each] = getattr(total, each)
    figures["mismatches"] = len(total.mismatches)
    draw(curves[: options.seeds], CONFIG.parent / "curve.png")
    print(f"\nwritten to {write_result('agent_framework', figures, measures=WHOLE_RUN)}")


def witnessed(name: str, overrides: tuple[str, ...], runs: Path, resume: bool) -> tuple[Finished, Exactness]:
    """A run, and what is exact of it."""
    witnesses = (runs / f"{name}-witnesses").absolute()
    if not resume:
        shutil.rmtree(witnesses, ignore_errors=True)
    witnesses.mkdir(parents=True, exist_ok=True)
    os.environ |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(PARTS)]), "EXACTNESS": str(witnesses)}
    finished = run("train", CONFIG, name, *WITNESSED, *overrides, runs=runs, resume=resume)
    return finished, verify(finished.directory, witnesses)


def measure(finished: Finished, found: Exactness) -> dict[str, float]:
    """The figures of one run."""
    counted = {field.name: getattr(found, field.name) for field in fields(found) if field.name != "mismatches"}
    rewards, after = finished.column("reward/mean"), finished.summary
    return {
        "steps": len(rewards),
        **counted,
        "mismatches": len(found.mismatches),
        "audit_violations": len(audit(finished.directory).violations),
        "accuracy_before": after["accuracy_before"],
        "accuracy_after": after["accuracy_after"],
        "reward_first_two_steps": mean(rewards[:2]),
        "reward_last_two_steps": mean(rewards[-2:]),
        "turns_first_two_steps": mean(finished.column("reward/part/products/turns")[:2]),
        "turns_last_two_steps": mean(finished.column("reward/part/products/turns")[-2:]),
        "mismatch_kl": mean(finished.column("learner/mismatch_kl")),
        "seconds": after["train_seconds"],
    }


def draw(curves: list[list[float]], target: Path) -> None:
    """The mean reward of each step: a line a seed."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2), dpi=120)
    for seed, curve in enumerate(curves):
        axes.plot(range(1, len(curve) + 1), curve, label=f"seed {seed}")
    axes.set(xlabel="training step", ylabel="mean reward of the step's samples", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main()

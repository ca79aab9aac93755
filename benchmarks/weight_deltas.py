"""How much of the weights a training step changes, as engines are sent it: a real run at several learning rates.

    python benchmarks/weight_deltas.py [--steps 4] [--rates 1e-6 1e-5 1e-4]

SmolLM2-135M-Instruct learns the sums of its recipe, 16 answers a step, with AdamW at a constant learning rate, in float32; the
engine has bfloat16, and so have the weights on their way. Channel `distributed`, encoding `delta`. Figures are the metric
`weights/megabytes` over the bytes of all weights, means over the steps after the first. That engines load the same weights is
tested, not measured here.
"""

import argparse
from pathlib import Path
from statistics import fmean

from _common import ROOT, WHOLE_RUN, smollm2, table, write_result
from _runs import run

RECIPE = ROOT / "recipes" / "smollm2_arithmetic" / "config.yaml"
SETTINGS = (
    "engine.dtype=bfloat16",
    "weights.channel=distributed",
    "weights.encoding=delta",
    "rollout.groups_per_step=2",
    "learner.optimizer.schedule=constant",
    "learner.optimizer.warmup_steps=0",
    "checkpoint.every=0",
    "evaluation.limit=1",
    "record.live=off",
)


def main() -> None:
    """Run each rate, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rates", type=str, nargs="+", default=["1e-6", "1e-5", "1e-4"])
    parser.add_argument("--runs", type=Path, default=Path("runs/weight_deltas"))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for rate in options.rates:
        own = (f"steps={options.steps}", f"learner.optimizer.learning_rate={rate}", f"model.path={smollm2()}")
        finished = run("train", RECIPE, f"rate-{rate}", *SETTINGS, *own, runs=options.runs)
        sent = finished.column("weights/megabytes")
        whole = sum(file.stat().st_size for file in smollm2().glob("*.safetensors")) / 1e6 / 2  # a file has float32
        figures |= {f"share_at_{rate}": fmean(sent[1:]) / whole, f"megabytes_at_{rate}": fmean(sent[1:])}
        figures["whole_megabytes"] = whole
        print(rate, [round(each, 3) for each in sent], flush=True)
    rows = [
        [rate, f"{figures[f'megabytes_at_{rate}']:.2f}", f"{figures[f'share_at_{rate}']:.2%}"] for rate in options.rates
    ]
    print(table(["learning rate", "MB a step", "of all"], rows))
    print("written:", write_result("weight_deltas", figures, options.out, measures=WHOLE_RUN))


if __name__ == "__main__":
    main()

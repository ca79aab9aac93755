"""TRL's GRPO examples as TRL runs them, and with their import changed to `antiphon.compat.trl`: do both learn alike?

    python benchmarks/trl_compat.py --seeds 3

The examples are in `trl_examples/`, of TRL's README and documentation, with paths for the names of model and data. The line
`from trl import …` is all that differs between the two sides: model, data, arguments and seeds are equal. A model of 850,000
parameters that works with single characters stands for theirs; for sums it was fine-tuned a little, so that some answers are
right. The figures are the mean reward of the first five steps and of the last ten, over seeds, with its standard deviation.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from _common import ROOT, WHOLE_RUN, table, write_result

EXAMPLES = ROOT / "benchmarks" / "trl_examples"
NAMES = ("accuracy", "unique_characters", "target_length", "several_tasks")
SIDES = {"trl": "trl", "antiphon": "antiphon.compat.trl"}
STEPS = 40
FIRST, LAST = 5, 10  # steps
SETTINGS = {
    "both": "trl_examples/arguments.py: 4 groups of 8 a step, learning rate 1e-3 (accuracy: 1e-4) falling linearly, loss dapo",
    "trl": "its generation by transformers; a tiny model on a CPU leaves no choice, and rewards do not depend on it",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--only", choices=NAMES, nargs="*", default=NAMES)
    options.add_argument("--runs", type=Path, default=Path("runs/trl_compat"))
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    places = prepare(chosen.runs)
    figures, rows = {}, []
    for name in chosen.only:
        for side in SIDES:
            curves = [train(name, side, seed, chosen.runs, places) for seed in range(chosen.seeds)]
            first = [mean(curve[:FIRST]) for curve in curves]
            last = [mean(curve[-LAST:]) for curve in curves]
            spread = stdev(last) if len(last) > 1 else 0.0
            figures |= {f"{name}_{side}_first": mean(first), f"{name}_{side}_last": mean(last)}
            figures |= {f"{name}_{side}_spread": spread}
            rows.append([f"{name}, {side}", f"{mean(first):.3f}", f"{mean(last):.3f}", f"{spread:.3f}"])
            print(table(["example", "first", "last", "spread"], rows[-1:]), flush=True)
    figures |= {"seeds": chosen.seeds, "steps": STEPS}
    print("\n" + table(["example", "first steps", "last steps", "spread"], rows))
    measures = (*WHOLE_RUN, "antiphon.compat")
    print(f"\nwritten to {write_result('trl_compat', figures, chosen.out, measures=measures, settings=SETTINGS)}")


def prepare(runs: Path) -> dict[str, Path]:
    """Write data and models; return their directories by name."""
    import antiphon
    from antiphon.learning.model.tiny import make_tokenizer, write_tiny_model

    places = {name: (runs / name).absolute() for name in ("sums", "plain", "tasks", "fresh", "tuned")}
    sums = [(a, b) for a in range(10) for b in range(10)]
    rows: dict[str, list[dict[str, Any]]] = {
        "sums": [{"prompt": [user(f"{a}+{b}=")], "solution": str(a + b)} for a, b in sums],
        "plain": [{"prompt": f"{a}+{b}="} for a, b in sums],
        "tasks": [{"prompt": [user(f"{a}{b}=")], "task": ("digits", "signs")[a % 2]} for a, b in sums],
    }
    for name, content in rows.items():
        places[name].mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (places[name] / "train.jsonl").write_text(lines, encoding="utf-8")
    if not places["fresh"].exists():
        tokenizer = make_tokenizer([r"\boxed{", *"}0123456789+=-*/abcdefghijklmnop "], r"\\boxed\{|.")
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        write_tiny_model(places["fresh"], 0, tokenizer)
    if not (places["tuned"]).exists():
        answers = {f"{a}+{b}=": f"\\boxed{{{a + b}}}" for a, b in sums}
        examples = [{"prompt": prompt, "response": text, "answer": text} for prompt, text in answers.items()]
        done = antiphon.sft(
            name="warm_start",
            steps=1,
            model=str(places["fresh"]),
            prompts=examples,
            reward="exact_match",
            rollout={"groups_per_step": 1, "sampling": {"max_tokens": 6}},
            sft={"steps": 60, "batch_size": 64, "optimizer": {"learning_rate": 1e-3}},
            record={"directory": str(runs), "live": "off"},
            overwrite=True,
        )
        done.model.rename(places["tuned"])
    return places


def user(text: str) -> dict[str, str]:
    """A user's message."""
    return {"role": "user", "content": text}


def train(name: str, side: str, seed: int, runs: Path, places: dict[str, Path]) -> list[float]:
    """Run an example in a process of its own; return the mean reward of each step."""
    data = {"accuracy": "sums", "unique_characters": "sums", "target_length": "plain", "several_tasks": "tasks"}[name]
    model = places["tuned" if name == "accuracy" else "fresh"]
    folder = (runs / f"{name}-{side}-{seed}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    rewards = folder / "rewards.json"
    if not rewards.exists():  # a run that was cut off goes on with what is missing
        source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        changed = source.replace("from trl import", f"from {SIDES[side]} import")
        script = folder / "example.py"
        script.write_text(changed, encoding="utf-8")
        given = [places[data], model, folder / "output", seed, STEPS, rewards]
        environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES}:{ROOT}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, script, *map(str, given)], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{name}, {side}, seed {seed}: {done.stderr[-3000:]}")
        print(f"{name}, {side}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    return json.loads(rewards.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()

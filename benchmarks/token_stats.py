"""What `record.token_stats` costs: bytes a token, and seconds a step.

    python benchmarks/token_stats.py [--pairs 3] [--steps 60] [--bytes-only]

The tiny recipe with numbers of each token and without, one after the other in each pair, in turning order. Bytes are those of
the files, for each sampled token and for each number of one; an upper bound is 2 for a number, and what names the row.
`--bytes-only` is for a machine that does other work: one run with everything written, and no seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from _common import ROOT, WHOLE_RUN, table, write_result

MEASURES = (*WHOLE_RUN, "antiphon.learning.token_recorder", "antiphon.record.token_stats")
CONFIG = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
WARM_UP = 5  # steps
FREE, ALL = ("advantage",), ("advantage", "entropy", "log_ratio")  # without a forward pass, and with one


def train(place: Path, stats: tuple[str, ...], steps: int) -> Path:
    """Train the tiny recipe with these numbers; return the run directory."""
    name = "-".join(stats) or "none"
    order = [f"name={name}", f"record.directory={place}", f"record.token_stats=[{','.join(stats)}]", f"steps={steps}"]
    order += ["sft.steps=100", "sft.stop_accuracy=0", "evaluation.limit=10", "evaluation.minimum_accuracy=0"]
    command = [sys.executable, "-m", "antiphon", "train", str(CONFIG), "--overwrite", *order]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-2000:]}")
    return place / name


def step_seconds(run: Path) -> float:
    """Return the median duration of a step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = [line["step/seconds"] for line in lines if "step/seconds" in line]
    return statistics.median(found[WARM_UP:])


def measure_bytes(run: Path) -> dict[str, float]:
    """Return bytes a sampled token: of all files, and of the column of each number."""
    tokens, sizes = 0, dict.fromkeys(ALL, 0)
    files = sorted((run / "token_stats").glob("*.parquet"))
    for path in files:
        rows = pq.read_table(path, columns=[ALL[0]]).column(0).to_pylist()
        tokens += int(np.isfinite(np.concatenate([np.array(row, np.float64) for row in rows])).sum())
        metadata = pq.read_metadata(path)
        for group in (metadata.row_group(number) for number in range(metadata.num_row_groups)):
            for column in (group.column(number) for number in range(group.num_columns)):
                if (name := column.path_in_schema.split(".")[0]) in sizes:
                    sizes[name] += column.total_compressed_size
    whole = sum(path.stat().st_size for path in files)
    rollouts = sum(path.stat().st_size for path in (run / "rollouts").glob("*.parquet"))
    shares = {f"{name}_bytes_a_token": size / tokens for name, size in sizes.items()}
    return {"bytes_a_token": whole / tokens, **shares, "share_of_rollouts": whole / rollouts}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bytes-only", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        seconds: dict[tuple[str, ...], list[float]] = {(): [], FREE: [], ALL: []}
        for pair in range(0 if options.bytes_only else options.pairs):
            for stats in list(seconds) if pair % 2 else reversed(seconds):
                seconds[stats].append(step_seconds(train(place, stats, options.steps)))
            print(f"pair {pair}:", {", ".join(stats): found[-1] for stats, found in seconds.items()}, flush=True)
        figures = measure_bytes(train(place, ALL, options.steps))
    if not options.bytes_only:
        names = {(): "step_seconds_without", FREE: "step_seconds_advantage", ALL: "step_seconds_all"}
        figures |= {names[stats]: statistics.median(found) for stats, found in seconds.items()}
    print(table(["figure", "value"], [[name, f"{value:.4g}"] for name, value in figures.items()]))
    print("written:", write_result("token_stats", figures, measures=MEASURES))


if __name__ == "__main__":
    main()

"""One GRPO step of SmolLM2-135M-Instruct in float32, against TRL's GRPOTrainer: time and memory.

    python benchmarks/step.py --rounds 2 --steps 3

Both get the same model directory, the same chat prompts and the same work: 8 prompts x 8 siblings x exactly 64 tokens a
step, one AdamW update, no reference model, rewards that differ between siblings so that every sequence is trained on.
TRL has two CPU threads, as do ours in each phase of a synchronous step: the learner with two, or two engines with one each.
Ours asynchronous has one for the engine and `--learner-threads` for the learner. All three run one after the other, and
again in each round; the first `--warm` steps of each run are left out, and figures are medians of what remains. Memory is
the peak over those steps of the summed proportional set size of all processes of a system, shared memory included. TRL gets a
virtual environment of its own in the user's cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from _common import ROOT, seconds, smollm2, table, write_result
from _runs import SAMPLE_SECONDS, memory

TRL = {"torch": "2.13.0", "trl": "1.16.0", "transformers": "5.23.0"}  # torch is pinned, else pip may bring CUDA's
GROUPS, SIBLINGS, TOKENS, THREADS = 8, 8, 64, 2
LEARNING_RATE = 1e-6
QUESTIONS = [f"What is {a} + {a + 19}?" for a in range(12, 12 + GROUPS)]
REWARD = """import zlib

def spread(prompt, transcript):  # differs between siblings, as good as at random: a checksum of the text
    return zlib.crc32(transcript.response.encode()) / 2**32
"""


@dataclass
class Measured:
    """One system over all rounds."""

    steps: list[float] = field(default_factory=list)  # seconds
    peaks: list[float] = field(default_factory=list)  # bytes, one a run
    parts: Counter[str] = field(default_factory=Counter)  # bytes of each process at the peak of the last run
    learner: list[float] = field(default_factory=list)  # seconds of the learner within each step, of ours

    @property
    def samples_per_second(self) -> float:
        """Of the median step."""
        return GROUPS * SIBLINGS / statistics.median(self.steps)

    @property
    def gibibytes(self) -> float:
        """Median peak."""
        return statistics.median(self.peaks) / 2**30


def endless_model(folder: Path) -> None:
    """SmolLM2 in `folder`, without an end token: every completion gets as many tokens as it may have."""
    source = smollm2()
    folder.mkdir()
    for file in source.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    settings = json.loads((source / "generation_config.json").read_text(encoding="utf-8"))
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": None}), encoding="utf-8")


def trl_python() -> Path:
    """The interpreter of TRL's environment, made at the first call."""
    home = Path.home() / ".cache" / "antiphon" / "venvs" / f"trl-{TRL['trl']}"
    python = home / "bin" / "python"
    check = f"from importlib.metadata import version as v; assert all(v(p).startswith(n) for p, n in {TRL}.items())"
    if not python.exists() or subprocess.run([python, "-c", check], stderr=subprocess.DEVNULL, check=False).returncode:
        print("installing TRL; this happens once", flush=True)
        venv.create(home, with_pip=True)
        pins = [f"{package}=={number}" for package, number in TRL.items()]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True)
    return python


def trl_command(folder: Path, args: argparse.Namespace) -> tuple[list[str], Path]:
    """How to run TRL, and the file where a line appears after each step."""
    metrics = folder / "metrics.jsonl"
    spec: dict[str, object] = {"model": str(folder / "model"), "metrics": str(metrics)}
    spec |= {"output": str(folder / "output"), "questions": QUESTIONS}
    spec |= {"prompts_per_step": GROUPS, "group_size": SIBLINGS, "tokens": TOKENS, "steps": args.warm + args.steps}
    spec |= {"threads": THREADS, "micro_batch": args.trl_micro, "learning_rate": LEARNING_RATE}
    (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    return [str(trl_python()), str(ROOT / "benchmarks" / "step_trl.py"), str(folder / "spec.json")], metrics


def our_command(folder: Path, args: argparse.Namespace, ratio: int) -> tuple[list[str], Path]:
    """How to run ours with this asynchronous ratio, and its metrics file."""
    prompts = "".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS)
    (folder / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    (folder / "step_reward.py").write_text(REWARD, encoding="utf-8")
    learner, engines = (args.learner_threads, 1) if ratio else (THREADS, THREADS)
    prompts_from = {"source": "jsonl", "path": str(folder / "prompts.jsonl")}
    config: dict[str, object] = {
        "name": "step",
        "steps": args.warm + args.steps,
        "model": {"path": str(folder / "model")},
        "tasks": [{"name": "sums", "prompts": prompts_from, "reward": "step_reward:spread"}],
        "rollout": {"groups_per_step": GROUPS, "group_size": SIBLINGS, "async_ratio": ratio, "timeout": 3600.0}
        | {"sampling": {"max_tokens": TOKENS}},
        "learner": {"device": "cpu", "threads": learner, "optimizer": {"learning_rate": LEARNING_RATE}}
        | {"tokens_per_pack": args.tokens_per_pack, "logits_chunk": args.logits_chunk},
        "engine": {
            "device": "cpu",
            "replicas": engines,
            "threads": 1,
            "slots": GROUPS * SIBLINGS // engines,
            "max_length": 128,
        },
        "checkpoint": {"every": 0},
        "record": {"directory": str(folder / "runs"), "live": "off"},
    }
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "antiphon.cli.app", "train", str(folder / "config.yaml")]
    return command, folder / "runs" / "step" / "metrics.jsonl"


def run(command: list[str], metrics: Path, log: Path, warm: int, into: Measured) -> list[dict[str, float]]:
    """Run a system to its end, watching its memory once it is warm; returns the lines of its timed steps."""
    peak = 0
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            done = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
            began = time.perf_counter()
            sizes = memory(process.pid) if done >= warm else Counter()
            if sizes.total() > peak:
                peak, into.parts = sizes.total(), sizes
            # Counting 4 GB takes the kernel 0.1 s of a core, which must not be what we measure.
            time.sleep(max(SAMPLE_SECONDS, 20 * (time.perf_counter() - began)))
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode} of {' '.join(command)}:\n{log.read_text()[-3000:]}")
    into.peaks.append(peak)
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()][warm:]


def measure_trl(folder: Path, args: argparse.Namespace, into: Measured) -> None:
    """A run of TRL, its steps checked for the work they were given."""
    for line in run(*trl_command(folder, args), folder / "log", args.warm, into):
        assert line["length"] == TOKENS and line["groups_without_spread"] == 0 and line["grad_norm"] > 0, line
        into.steps.append(line["seconds"])


def measure_ours(folder: Path, args: argparse.Namespace, into: Measured, ratio: int) -> None:
    """A run of ours, its steps checked likewise."""
    for line in run(*our_command(folder, args, ratio), folder / "log", args.warm, into):
        assert line["length/mean"] == TOKENS and line["age/max"] == ratio and line["learner/grad_norm"] > 0, line
        into.steps.append(line["step/seconds"])
        into.learner.append(line["learner/seconds"])


def matmul_gflops(threads: int, size: int = 2048, tries: int = 5) -> float:
    """What a float32 matrix product reaches here and now: the best of `tries`."""
    torch.set_num_threads(threads)
    a = torch.randn(size, size)
    torch.mm(a, a)
    return max(2 * size**3 / seconds(lambda: torch.mm(a, a)) for _ in range(tries)) / 1e9


def figures_of(systems: dict[str, Measured], peaks: dict[int, list[float]]) -> dict[str, float]:
    """The ratios, and the absolute numbers behind them."""
    trl, sync, ahead = systems["TRL"], systems["synchronous"], systems["asynchronous"]
    figures = {
        "samples_per_second_ratio_sync": sync.samples_per_second / trl.samples_per_second,
        "samples_per_second_ratio_async": ahead.samples_per_second / trl.samples_per_second,
        "memory_ratio": ahead.gibibytes / trl.gibibytes,
        "memory_ratio_sync": sync.gibibytes / trl.gibibytes,
    }
    for name, system in zip(("trl", "sync", "async"), (trl, sync, ahead), strict=True):
        figures[f"{name}_samples_per_second"] = system.samples_per_second
        figures[f"{name}_peak_gib"] = system.gibibytes
    for threads, rates in peaks.items():
        figures[f"matmul_gflops_{threads}_thread"] = statistics.median(rates)
    return figures


def show(systems: dict[str, Measured], figures: dict[str, float]) -> None:
    """The tables."""
    headings = ["system", "seconds a step", "of it learner", "samples/s", "peak GiB", "largest processes"]
    rows = []
    for name, system in systems.items():
        spread = f"{statistics.median(system.steps):.1f} ({min(system.steps):.1f}-{max(system.steps):.1f})"
        learner = f"{statistics.median(system.learner):.1f}" if system.learner else "-"
        parts = " + ".join(f"{size / 2**30:.2f}" for _, size in system.parts.most_common(3))
        rows.append([name, spread, learner, f"{system.samples_per_second:.3f}", f"{system.gibibytes:.2f}", parts])
    print(table(headings, rows), end="\n\n")
    print(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()]))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="One GRPO step against TRL: time and memory.")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each system")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each run")
    parser.add_argument("--warm", type=int, default=1, help="steps of each run that are left out")
    parser.add_argument("--trl-micro", type=int, default=16, help="TRL's per_device_train_batch_size")
    parser.add_argument("--learner-threads", type=int, default=1, help="of ours asynchronous")
    parser.add_argument("--tokens-per-pack", type=int, default=400, help="micro-batch of ours")
    parser.add_argument("--logits-chunk", type=int, default=512, help="of ours")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    """Run the rounds, print the tables, write the result."""
    args = parse()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the comparison is one of CPUs
    systems = {name: Measured() for name in ("TRL", "synchronous", "asynchronous")}
    peaks: dict[int, list[float]] = {1: [], THREADS: []}
    trl_python()
    for number in range(args.rounds):
        for threads, rates in peaks.items():
            rates.append(matmul_gflops(threads))
        for name, system in systems.items():
            with tempfile.TemporaryDirectory(prefix="antiphon-step-") as scratch:
                folder = Path(scratch)
                endless_model(folder / "model")
                if name == "TRL":
                    measure_trl(folder, args, system)
                else:
                    measure_ours(folder, args, system, ratio=int(name == "asynchronous"))
            print(f"round {number + 1} of {args.rounds}, {name}: {system.steps[-args.steps :]}", flush=True)
    figures = figures_of(systems, peaks)
    show(systems, figures)
    path = write_result("step", figures, args.out)
    result = json.loads(path.read_text(encoding="utf-8"))
    result["versions"]["trl"] = TRL["trl"]
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("written:", path)


if __name__ == "__main__":
    main()

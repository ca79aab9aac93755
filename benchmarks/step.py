"""One GRPO step against TRL's GRPOTrainer: time and memory, at several settings of both.

    python benchmarks/step.py --rounds 2 --steps 3
    python benchmarks/step.py --device cuda [--tiny]

Both get the same model directory, the same chat prompts and the same work: exactly so many tokens a sample, one AdamW update a
step, no reference model, rewards that differ between siblings so that every sequence is trained on.

On CPUs it is SmolLM2-135M-Instruct in float32, 8 prompts x 8 siblings x 64 tokens. TRL has two CPU threads, as do ours in each
phase of a synchronous step: the learner with two, or two engines with one each. Ours asynchronous has one for the engine and
one for the learner.

On a GPU it is a model of the shape of Qwen3-0.6B with random weights, float32 computed in bfloat16 (autocast) in both learners,
16 prompts of 256 tokens x 8 siblings x 128 tokens. TRL generates by transformers with the weights that it trains; ours has an
engine in bfloat16 beside the learner. Memory is what the whole device has in use, less what it had before.

On either side the micro-batch trades memory for time, so neither is shown at one size: TRL runs at each of
`--trl-micro` and at its largest with gradient checkpointing, ours at each of `--tokens-per-pack`, asynchronous at the
smallest. Ratios are to TRL's fastest setting of the same run. All systems run one after the other, and again in each
round; the first `--warm` steps of each run are left out, as is the last of ours asynchronous, during which no samples of a
next step are drawn. Figures are medians of what remains. On CPUs memory is the peak over the steps after the first `--warm` of
the summed proportional set size of all processes of a system, shared memory included. There TRL gets a virtual environment of
its own in the user's cache; on a GPU it is that of this Python.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from _common import QWEN3, ROOT, TINY_QWEN3, WHOLE_RUN, random_model, seconds, smollm2, table, write_result
from _runs import SAMPLE_SECONDS, memory

TRL = {"torch": "2.13.0", "trl": "1.16.0", "transformers": "5.23.0"}  # torch is pinned, else pip may bring CUDA's
THREADS = 2  # of a CPU
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Work:
    """What a step is made of."""

    groups: int
    siblings: int
    tokens: int  # of each sample
    questions: tuple[str, ...]
    max_length: int
    trl_micro: tuple[int, ...]
    tokens_per_pack: tuple[int, ...]
    model: Mapping[str, int] | None = None  # a shape with random weights, on a GPU; else SmolLM2 on CPUs

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.groups * self.siblings


def numbers(count: int, tokens: int, vocabulary: int) -> tuple[str, ...]:
    """So many prompts of so many tokens, for a tokenizer whose words are t0, t1 ..."""
    rng = random.Random(0)
    return tuple(" ".join(f"t{rng.randrange(10, vocabulary)}" for _ in range(tokens)) for _ in range(count))


ON_CPU = Work(
    8, 8, 64, tuple(f"What is {a} + {a + 19}?" for a in range(12, 20)), 128, (4, 8, 16, 32), (400, 1024, 4096)
)
QWEN3_SMALL = {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072}  # the shape of Qwen3-0.6B
ON_GPU = Work(
    16, 8, 128, numbers(16, 256, QWEN3["vocab_size"]), 384, (8, 16, 32), (8192, 16384, 32768), model=QWEN3_SMALL
)
TINY = Work(2, 4, 8, numbers(2, 8, TINY_QWEN3["vocab_size"]), 32, (4, 8), (64, 128), model=TINY_QWEN3)
SETTINGS = {
    "work": "8 prompts x 8 samples x 64 tokens, float32, 2 CPU threads, AdamW, no reference",
    "ours": "tokens_per_pack as named, all else default: logits_chunk 1024, share_prefixes; synchronous with two engines of "
    "one thread, asynchronous with one; the learner has the rest",
    "TRL": "GRPOConfig: per_device_train_batch_size as named, with so many accumulation steps that an update is the same; "
    "no gradient checkpointing unless named; transformers' generate; 2 threads",
    "why TRL's best": "its micro-batch is what trades its time for memory, so it runs at each of four sizes and with "
    "checkpointing, and ratios are to the fastest; vLLM generation and Liger kernels need a GPU",
}
SETTINGS_ON_GPU = {
    "work": "16 prompts of 256 tokens x 8 samples x 128 tokens, float32 weights, bfloat16 autocast, AdamW, no reference",
    "ours": "tokens_per_pack as named, all else default: logits_chunk 1024, share_prefixes; one engine in bfloat16 of 128 "
    "slots on the learner's GPU, weights by device_memory",
    "TRL": "GRPOConfig: per_device_train_batch_size as named, with so many accumulation steps that an update is the same; "
    "bf16; no gradient checkpointing unless named; transformers' generate with the KV cache; sdpa",
    "why TRL's best": "its micro-batch is what trades its time for memory, so it runs at each of three sizes and with "
    "checkpointing, and ratios are to the fastest; vLLM, with which it would generate faster, is not on this machine",
}
REWARD = """import zlib

def spread(prompt, transcript):  # differs between siblings, as good as at random: a checksum of the text
    return zlib.crc32(transcript.response.encode()) / 2**32
"""


@dataclass
class System:
    """One side at one setting, over all rounds."""

    name: str
    samples: int  # of a step
    micro: int  # sequences of a micro-batch of TRL, tokens of a pack of ours
    ratio: int | None = None  # asynchronous, of ours
    checkpointing: bool = False
    steps: list[float] = field(default_factory=list)  # seconds
    peaks: list[float] = field(default_factory=list)  # bytes, one a run
    parts: Counter[str] = field(default_factory=Counter)  # bytes of each process at the peak of the last run
    learner: list[float] = field(default_factory=list)  # seconds of the learner within each step, of ours

    @property
    def last_left_out(self) -> int:
        """Steps at the end that are not timed: while the last is trained on, no samples of a next one are drawn."""
        return 1 if self.ratio else 0

    @property
    def samples_per_second(self) -> float:
        """Of the median step."""
        return self.samples / statistics.median(self.steps)

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


def random_words_model(folder: Path, shape: Mapping[str, int]) -> None:
    """A model with random weights, without an end token, whose tokenizer knows the words t0, t1 ..."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # which only this needs
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(shape["vocab_size"])}, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", chat_template=template).save_pretrained(folder)
    model = random_model(shape)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


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


def systems_of(args: argparse.Namespace) -> list[System]:
    """Both sides at all their settings."""
    samples, largest, smallest = args.work.samples, max(args.trl_micro), min(args.tokens_per_pack)
    found = [System(f"trl_{micro}", samples, micro) for micro in args.trl_micro]
    if args.trl_checkpointing:
        found.append(System(f"trl_{largest}_checkpointing", samples, largest, checkpointing=True))
    found += [System(f"sync_{tokens}", samples, tokens, ratio=0) for tokens in args.tokens_per_pack]
    return [*found, System(f"async_{smallest}", samples, smallest, ratio=1)]


def trl_command(folder: Path, args: argparse.Namespace, system: System) -> tuple[list[str], Path]:
    """How to run TRL, and the file where a line appears after each step."""
    metrics = folder / "metrics.jsonl"
    spec: dict[str, object] = {"model": str(folder / "model"), "metrics": str(metrics)}
    spec |= {"output": str(folder / "output"), "questions": args.work.questions}
    spec |= {"prompts_per_step": args.work.groups, "group_size": args.work.siblings, "tokens": args.work.tokens}
    spec |= {"steps": args.warm + args.steps, "cuda": torch.cuda.is_available()}
    spec |= {"threads": THREADS, "micro_batch": system.micro, "learning_rate": LEARNING_RATE}
    spec |= {"gradient_checkpointing": system.checkpointing}
    (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    python = (
        sys.executable if args.work.model else trl_python()
    )  # the packages of a borrowed machine with random weights
    return [str(python), str(ROOT / "benchmarks" / "step_trl.py"), str(folder / "spec.json")], metrics


def our_command(folder: Path, args: argparse.Namespace, system: System) -> tuple[list[str], Path]:
    """How to run ours, and its metrics file."""
    work: Work = args.work
    prompts = "".join(json.dumps({"prompt": question}) + "\n" for question in work.questions)
    (folder / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    (folder / "step_reward.py").write_text(REWARD, encoding="utf-8")
    on_gpu = torch.cuda.is_available()
    learner, engines = (1, 1) if system.ratio or on_gpu else (THREADS, THREADS)
    device = {"device": "cuda", "dtype": "bfloat16"} if on_gpu else {"device": "cpu"}
    prompts_from = {"source": "jsonl", "path": str(folder / "prompts.jsonl")}
    config: dict[str, object] = {
        "name": "step",
        "steps": args.warm + args.steps + system.last_left_out,
        "model": {"path": str(folder / "model")},
        "tasks": [{"name": "sums", "prompts": prompts_from, "reward": "step_reward:spread"}],
        "rollout": {
            "groups_per_step": work.groups,
            "group_size": work.siblings,
            "async_ratio": system.ratio,
            "timeout": 3600.0,
        }
        | {"sampling": {"max_tokens": work.tokens}},
        "learner": {**device, "threads": learner, "optimizer": {"learning_rate": LEARNING_RATE}}
        | {"tokens_per_pack": system.micro, "logits_chunk": 1024},
        "engine": {**device, "replicas": engines, "threads": 1, "slots": work.samples // engines}
        | {"max_length": work.max_length},
        "weights": {"channel": "device_memory"} if on_gpu else {},
        "checkpoint": {"every": 0},
        "record": {"directory": str(folder / "runs"), "live": "off"},
    }
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "antiphon.cli.app", "train", str(folder / "config.yaml")]
    return command, folder / "runs" / "step" / "metrics.jsonl"


def device_bytes() -> int:
    """What is in use of the GPU's memory, by all processes; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, whole = torch.cuda.mem_get_info()
    return whole - free


def in_use(process: int, before: int) -> Counter[str]:
    """Memory of a process and all below it; on a GPU, what has come into use of the device since."""
    return Counter({"device": device_bytes() - before}) if torch.cuda.is_available() else memory(process)


def run(command: list[str], metrics: Path, log: Path, warm: int, into: System) -> list[dict[str, float]]:
    """Run a system to its end, watching its memory once it is warm; returns the lines of its timed steps."""
    peak, before, seen, started = 0, device_bytes(), 0, time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            done = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
            began = time.perf_counter()
            if done > seen:  # if this is stopped, the output says where the time went
                print(f"  {into.name}: step {done} ended after {began - started:.0f} s", flush=True)
                seen = done
            sizes = in_use(process.pid, before) if done >= warm else Counter[str]()
            if sizes.total() > peak:
                peak, into.parts = sizes.total(), sizes
            # Counting 4 GB takes the kernel 0.1 s of a core, which must not be what we measure.
            time.sleep(max(SAMPLE_SECONDS, 20 * (time.perf_counter() - began)))
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode} of {' '.join(command)}:\n{log.read_text()[-3000:]}")
    print(f"  {into.name}: the run ended after {time.perf_counter() - started:.0f} s", flush=True)
    into.peaks.append(peak)
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()][warm:]


def measure(folder: Path, args: argparse.Namespace, system: System) -> None:
    """One run of a system, its steps checked for the work that they were given."""
    if args.work.model:
        random_words_model(folder / "model", args.work.model)
    else:
        endless_model(folder / "model")
    build = trl_command if system.ratio is None else our_command
    lines = run(*build(folder, args, system), folder / "log", args.warm, system)
    for line in lines[: len(lines) - system.last_left_out]:
        if system.ratio is None:
            assert (
                line["length"] == args.work.tokens and line["groups_without_spread"] == 0 and line["grad_norm"] > 0
            ), line
            system.steps.append(line["seconds"])
        else:
            assert line["length/mean"] == args.work.tokens and line["age/max"] == system.ratio, line
            assert line["learner/grad_norm"] > 0, line
            system.steps.append(line["step/seconds"])
            system.learner.append(line["learner/seconds"])


def matmul_gflops(threads: int, size: int = 2048, tries: int = 5) -> float:
    """What a float32 matrix product reaches here and now: the best of `tries`."""
    torch.set_num_threads(threads)
    a = torch.randn(size, size)
    torch.mm(a, a)
    return max(2 * size**3 / seconds(lambda: torch.mm(a, a)) for _ in range(tries)) / 1e9


def figures_of(systems: list[System], peaks: dict[int, list[float]]) -> dict[str, float]:
    """The ratios to TRL's fastest setting, and the absolute numbers behind them."""
    peers = [system for system in systems if system.ratio is None]
    best = max(peers, key=lambda system: system.samples_per_second)
    figures: dict[str, float] = {"trl_fastest_micro": best.micro}
    for system in systems:
        figures[f"{system.name}_samples_per_second"] = system.samples_per_second
        figures[f"{system.name}_peak_gib"] = system.gibibytes
        figures[f"{system.name}_seconds"] = statistics.median(system.steps)
        figures[f"{system.name}_seconds_least"] = min(system.steps)
        figures[f"{system.name}_seconds_most"] = max(system.steps)
        if system.ratio is not None:
            figures[f"{system.name}_speed_over_trl"] = system.samples_per_second / best.samples_per_second
            figures[f"{system.name}_memory_over_trl"] = system.gibibytes / best.gibibytes
    for threads, rates in peaks.items():
        figures[f"matmul_gflops_{threads}_thread"] = statistics.median(rates)
    return figures


def show(systems: list[System]) -> None:
    """Print the table."""
    headings = ["system", "seconds a step", "of it learner", "samples/s", "peak GiB", "largest processes"]
    rows = []
    for system in systems:
        spread = f"{statistics.median(system.steps):.1f} ({min(system.steps):.1f}-{max(system.steps):.1f})"
        learner = f"{statistics.median(system.learner):.1f}" if system.learner else "-"
        parts = " + ".join(f"{size / 2**30:.2f}" for _, size in system.parts.most_common(3))
        rows.append(
            [system.name, spread, learner, f"{system.samples_per_second:.3f}", f"{system.gibibytes:.2f}", parts]
        )
    print(table(headings, rows), end="\n\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="One GRPO step against TRL: time and memory.")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each system")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each run")
    parser.add_argument("--warm", type=int, default=1, help="steps of each run that are left out")
    parser.add_argument("--trl-micro", type=int, nargs="+", help="per_device_train_batch_size")
    parser.add_argument("--trl-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tokens-per-pack", type=int, nargs="+", help="of ours")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on any device; written only to --out")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    args.work = TINY if args.tiny else ON_GPU if args.device == "cuda" else ON_CPU
    args.trl_micro = args.trl_micro or args.work.trl_micro
    args.tokens_per_pack = args.tokens_per_pack or args.work.tokens_per_pack
    return args


def main() -> None:
    """Run the rounds, print the table, write the result."""
    args = parse()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the comparison is one of CPUs
    elif not torch.cuda.is_available():
        print("skipped: it measures a GPU, and torch finds none here")
        return
    systems = systems_of(args)
    peaks: dict[int, list[float]] = {} if args.device == "cuda" else {1: [], THREADS: []}
    if not args.work.model:
        trl_python()
    for number in range(args.rounds):
        for threads, rates in peaks.items():
            rates.append(matmul_gflops(threads))
        for system in systems:
            with tempfile.TemporaryDirectory(prefix="antiphon-step-") as scratch:
                measure(Path(scratch), args, system)
            seconds_of_steps = [round(value, 1) for value in system.steps[-args.steps :]]
            line = f"{system.name}: {seconds_of_steps} s, {system.peaks[-1] / 2**30:.2f} GiB"
            print(f"round {number + 1} of {args.rounds}, {line}", flush=True)
    show(systems)
    if args.tiny and not args.out:
        return
    settings = SETTINGS_ON_GPU if args.device == "cuda" else SETTINGS
    path = write_result("step", figures_of(systems, peaks), args.out, measures=WHOLE_RUN, settings=settings)
    result = json.loads(path.read_text(encoding="utf-8"))
    result["versions"]["trl"] = version("trl") if args.device == "cuda" else TRL["trl"]
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("written:", path)


if __name__ == "__main__":
    main()

"""What benchmarks share: the machine's own speed, the model they run, and how a result is written."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import stdev
from typing import Any

import torch
from _digests import digest_modules

ROOT = Path(__file__).resolve().parents[1]
# Shapes of models with random weights: that of Qwen3-1.7B, and one that shows on any device that all of a benchmark runs.
QWEN3 = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY_QWEN3 = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
# Modules that the figures of every real training run depend on.
WHOLE_RUN = (
    "antiphon.run.loop",
    "antiphon.rollout",
    "antiphon.engines.native",
    "antiphon.learning.batch",
    "antiphon.learning.stages",
    "antiphon.learning.model_worker",
    "antiphon.learning.pack_learner",
    "antiphon.learning.packing",
    "antiphon.learning.torch_learner",
    "antiphon.learning.model.logprobs",
    "antiphon.weights",
)

# What a simulated run depends on.
SIMULATION = (
    "antiphon.run.loop",
    "antiphon.rollout",
    "antiphon.simulate.scenario",
    "antiphon.simulate.run",
    "antiphon.simulate.engine",
    "antiphon.simulate.decode_batch",
    "antiphon.simulate.learner",
    "antiphon.simulate.environment",
    "antiphon.simulate.prompts",
    "antiphon.simulate.clock",
    "antiphon.simulate.faults",
)
# Student's quantile for an interval at 95 %, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def device_name() -> str:
    """Which results may be compared: `cpu-2core`, `nvidia-h200`."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name()).lower().replace(" ", "-")
    return f"cpu-{len(os.sched_getaffinity(0))}core"


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes, the device's part included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def matmul_peak(dtype: torch.dtype = torch.float32, tries: int = 5) -> float:
    """Floating-point operations a second that a large square matrix product reaches here and now: the best of `tries`. A small
    one reaches as many with a type that the processor has to emulate, for which the large one would take minutes."""
    device, small, large = ("cuda", 1024, 8192) if torch.cuda.is_available() else ("cpu", 128, 1536)
    rates: list[float] = []
    for size in (small, large):
        if rates and 2 * large**3 / max(rates) > 2.0:
            break
        a = torch.randn(size, size, dtype=dtype, device=device)
        torch.mm(a, a)
        rates = [2 * size**3 / seconds(lambda a=a: torch.mm(a, a)) for _ in range(tries)]
    return max(rates)


def memory_peak(tries: int = 5) -> float:
    """Bytes a second to and from a device's memory that a plain copy or sum of a large tensor reaches here and now: the best
    of `tries` of either."""
    device, count = ("cuda", 2**30) if torch.cuda.is_available() else ("cpu", 2**26)
    source = torch.ones(count, device=device)
    target = torch.ones_like(source)  # pages that were never written have no memory yet
    copied = min(seconds(lambda: target.copy_(source)) for _ in range(tries))
    read = min(seconds(source.sum) for _ in range(tries))
    return max(2 * source.nbytes / copied, source.nbytes / read)


def random_model(shape: Mapping[str, int]) -> Any:
    """A model with random weights in bfloat16, on the GPU if there is one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # which takes seconds, and few benchmarks need it

    torch.manual_seed(0)
    config = Qwen3Config(**shape, tie_word_embeddings=True, max_position_embeddings=4096)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return Qwen3ForCausalLM(config).to(torch.bfloat16)


def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct, made at the first call (half a minute) and kept in the user's cache."""
    directory = Path.home() / ".cache" / "antiphon" / "smollm2-135m-instruct"
    if not (directory / "config.json").exists():
        recipe = ROOT / "recipes" / "smollm2_arithmetic" / "model.py"
        spec = importlib.util.spec_from_file_location("smollm2_recipe", recipe)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            module.build(Path(scratch) / "model")
            (Path(scratch) / "model").rename(directory)
    return directory


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A plain table, numbers to the right."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]

    def line(cells: list[str]) -> str:
        return "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])

    return "\n".join([line(headings), "  ".join("-" * width for width in widths), *map(line, rows)])


def interval(values: list[float]) -> float:
    """Half of Student's interval at 95 %."""
    return STUDENT[len(values) - 1] * stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _find_commit() -> str:
    """Return the commit that is measured; `none` without git, or outside a repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return done.stdout.strip()


def write_result(
    name: str,
    figures: Mapping[str, float],
    out: Path | None = None,
    command: str = "",
    *,
    measures: Iterable[str] = (),
    settings: Mapping[str, str] | None = None,
) -> Path:
    """Write `benchmarks/results/<device>/<name>.json`, or `out`.

    Args:
        name: Name of the result.
        figures: Measured values by name.
        out: Path to write to instead.
        command: Command that repeats the measurement; the current one unless given.
        measures: Modules and packages whose code the figures depend on; the result records a digest of each.
        settings: For comparisons with other software: the settings of both sides, and why the peer's are its best.
    """
    device = device_name()
    path = out or ROOT / "benchmarks" / "results" / device / f"{name}.json"
    packages = ("torch", "transformers", "numpy")
    result = {
        "command": command or " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": _find_commit(),
        "device": device,
        "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
        "measures": digest_modules(measures),
        **({"settings": dict(settings)} if settings else {}),
        "figures": {key: round(value, 4) for key, value in figures.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path

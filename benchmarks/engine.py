"""The native engine against transformers: `generate` in static batches, and its continuous batching.

    python benchmarks/engine.py [--pairs 5]
    python benchmarks/engine.py --tiny    # all of it with a tiny model, on a CPU too: that it runs, and no measurement

On a CPU the model is SmolLM2 in float32, on one thread; on a GPU one of the shape of Qwen3-1.7B with random weights, in
bfloat16, with more and longer requests.

Each pair runs all of them on the same prompts with the same number of tokens a request (end tokens are off), one after
the other; the figures are medians of the pairs' ratios of time, so that a machine which slows down does so for all.
Fixed: one batch, all equally long. Ragged: two batches' worth of requests, log-normal lengths whose longest in each batch
is 8 times the median; a static batch runs to its longest, the others refill. Sampling is at temperature 1, untruncated.
Continuous batching has the attention that transformers chooses for it: flash attention where that is installed. On a GPU
attention by cuDNN is off for all three: it plans anew for each length of a sequence.

The share of bandwidth is of our engine's steps that only decode, fixed. What each has to read is all weights once, and the
keys and values of all tokens of its sequences; over time, and over what a plain copy or sum of a large tensor reaches in the
same pair.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import (
    QWEN3,
    TINY_QWEN3,
    matmul_peak,
    memory_peak,
    random_model,
    seconds,
    smollm2,
    table,
    write_result,
)
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from antiphon.core.types import GenerateRequest, Sampling
from antiphon.engines.config import EngineConfig
from antiphon.engines.native.engine import NativeEngine

MEASURES = ("antiphon.engines.native",)
SETTINGS = {
    "ours": ("NativeEngine, float32, one thread, 32 slots, prompts read 512 tokens a step at most, temperature 1"),
    "transformers": (
        "generate: one static batch of 32, float32, one thread, the KV cache and attention that it "
        "chooses; continuous batching: generate_batch with the attention that it chooses for it"
    ),
    "why its best": (
        "the batch is as large as ours, so that it is limited by the same arithmetic; on a CPU neither "
        "has other options"
    ),
}

SETTINGS_ON_GPU = {
    "ours": "NativeEngine, bfloat16, as many slots as a batch, prompts read 2048 tokens a step at most, temperature 1",
    "transformers": "generate: static batches as large as ours, bfloat16, the KV cache that it chooses, sdpa; continuous "
    "batching: as many requests at once, as many tokens a step, pages of 32 tokens, the attention that it chooses",
    "why its best": "the batch is as large as ours and all of it fits; cuDNN's attention, which plans for each length, is off; "
    "flash attention as a package, which would be faster ragged, is used where it is installed",
}


@dataclass(frozen=True)
class Size:
    """What is run."""

    batch: int  # sequences at once, for all
    prompt: int  # tokens
    tokens: int  # sampled, of a request, fixed
    median: int  # of sampled tokens, ragged
    read: int  # prompt tokens in a step, at most


ON_CPU = Size(batch=32, prompt=32, tokens=32, median=8, read=512)
ON_GPU = Size(batch=256, prompt=256, tokens=256, median=64, read=2048)
TINY = Size(batch=4, prompt=8, tokens=8, median=2, read=64)


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens each is to be given."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        """Sampled tokens that somebody asked for."""
        return sum(self.lengths)


def fixed(rng: np.random.Generator, batch: int, prompt: int, tokens: int, vocabulary: int) -> Workload:
    """One batch of equal lengths."""
    return Workload(rng.integers(10, vocabulary, (batch, prompt)).tolist(), [tokens] * batch)


def ragged(rng: np.random.Generator, batch: int, prompt: int, median: int, vocabulary: int) -> Workload:
    """Two batches of log-normal lengths. The spread is the one whose longest of a batch lies near 8 medians; it is put
    exactly there, because the ratio to a static batch hangs on it."""
    spread = np.log(8) / statistics.NormalDist().inv_cdf(1 - 0.7 / batch)
    lengths: list[int] = []
    for _ in range(2):
        drawn = np.clip(np.rint(median * np.exp(spread * rng.standard_normal(batch))), 1, 8 * median).astype(int)
        drawn[rng.integers(batch)] = 8 * median
        lengths += drawn.tolist()
    return Workload(rng.integers(10, vocabulary, (2 * batch, prompt)).tolist(), lengths)


@dataclass
class Decoding:
    """Steps that read no prompt."""

    steps: int = 0
    cached: int = 0  # tokens whose keys and values they read, summed
    seconds: float = 0.0

    def bandwidth(self, model: Any) -> float:
        """Bytes a second that they have to read: weights once a step (of the embedding, a few rows), keys and values."""
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        head = model.get_output_embeddings().weight
        weights = head.nbytes + sum(p.nbytes for p in model.model.layers.parameters())
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * head.itemsize
        return (self.steps * weights + self.cached * token) / self.seconds


def run_native(engine: NativeEngine, work: Workload) -> Decoding:
    """All requests at once; the engine has as many slots as a batch."""
    lengths = {str(i): len(prompt) for i, prompt in enumerate(work.prompts)}
    for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        sampling = Sampling(max_tokens=length, seed=i)
        engine.add(GenerateRequest(id=str(i), tokens=np.array(prompt, np.int32), sampling=sampling))
    decoding = Decoding()
    while engine.busy:
        read, spent = engine.counters.read_tokens, engine.counters.seconds
        deltas = engine.step()
        if engine.counters.read_tokens == read:
            decoding.steps += 1
            decoding.cached += sum(lengths[delta.request] for delta in deltas)
            decoding.seconds += engine.counters.seconds - spent
        for delta in deltas:
            lengths[delta.request] += len(delta.tokens)
    done = sum(lengths.values()) - sum(len(prompt) for prompt in work.prompts)
    assert done == work.tokens, (done, work.tokens)
    return decoding


def run_generate(model: Any, work: Workload, batch: int) -> None:
    """Batch after batch, each to its longest."""
    for start in range(0, len(work.prompts), batch):
        prompts = torch.tensor(work.prompts[start : start + batch], device=model.device)
        longest = max(work.lengths[start : start + batch])
        config = GenerationConfig(max_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0)
        made = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
        assert made.shape[1] == prompts.shape[1] + longest


def run_continuous(model: Any, work: Workload, batch: int, step: int) -> None:
    """All requests at once; at most `batch` in a step, and as many tokens a `step` as ours reads of prompts."""
    torch.cuda.empty_cache()  # it counts what others keep for later as taken
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, max_new_tokens=max(work.lengths)
    )
    pages = sum(-(-(len(p) + n) // 32) for p, n in zip(work.prompts, work.lengths, strict=True)) + batch
    settings = ContinuousBatchingConfig(  # the size of a page comes first; it has had two names
        32, num_blocks=pages, max_batch_tokens=step, max_requests_per_batch=batch, allow_block_sharing=False
    )
    tokens = finished = 0
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings, warmup=False
    ) as manager:
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        while finished < len(work.prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                finished += 1
                tokens += len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching ended by itself")
    assert tokens == work.tokens, (tokens, work.tokens)


def operations(model: Any, work: Workload) -> float:
    """Multiplications and additions in the linear layers: the head only where a token is sampled, attention left out."""
    head = model.get_output_embeddings().weight.numel()
    layers = sum(p.numel() for layer in model.model.layers for p in layer.parameters() if p.ndim > 1)
    read = sum(len(prompt) for prompt in work.prompts) + work.tokens - len(work.prompts)
    return 2.0 * (layers * read + head * work.tokens)


def parse() -> argparse.Namespace:
    """The command line; sizes that it does not name are those of the device."""
    parser = argparse.ArgumentParser(description="The native engine against transformers, matched.")
    parser.add_argument("--model", default="", help="a directory, smollm2, or random; by default what suits the device")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, help="sequences at once, for all")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, help="sampled tokens of a request, fixed")
    parser.add_argument("--median", type=int, help="median of sampled tokens, ragged")
    parser.add_argument("--read", type=int, help="prompt tokens in a step, at most")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on any device; written only to --out")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def size_of(args: argparse.Namespace) -> Size:
    """That of the device, but for what the command line says."""
    size = TINY if args.tiny else ON_GPU if torch.cuda.is_available() else ON_CPU
    said = {name: getattr(args, name) for name in asdict(size)}
    return replace(size, **{name: value for name, value in said.items() if value is not None})


def load(name: str, *, tiny: bool) -> Any:
    """The model, in the device's dtype."""
    on_gpu = torch.cuda.is_available()
    if tiny or (name or ("random" if on_gpu else "smollm2")) == "random":
        return random_model(TINY_QWEN3 if tiny else QWEN3).eval()
    directory = smollm2() if name in ("", "smollm2") else name
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval().to(device)


@dataclass
class Contest:
    """The three, each with its own copy of one model: ours takes over its copy's attention, continuous batching changes
    its own. Our engine lives on from pair to pair, as it does in a run; every pair has new prompts."""

    model: Any
    runs: dict[str, Callable[[Workload], Decoding | None]]
    decoding: Decoding = field(default_factory=Decoding)  # of our engine's last run

    @staticmethod
    def of(model: Any, size: Size) -> "Contest":
        """Seat the three."""
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        dtype = str(model.dtype).removeprefix("torch.")
        config = EngineConfig(slots=size.batch, prefill_tokens=size.read, device=model.device.type, dtype=dtype)
        engine = NativeEngine(copy.deepcopy(model), config, receive=lambda update: ())
        paged = copy.deepcopy(model)
        runs: dict[str, Callable[[Workload], Decoding | None]] = {
            "native": lambda work: run_native(engine, work),
            "generate": lambda work: run_generate(model, work, size.batch),
            "continuous": lambda work: run_continuous(paged, work, size.batch, size.read),
        }
        return Contest(model, runs)

    def times(self, work: Workload, names: list[str]) -> dict[str, float]:
        """Seconds of each of `names`, run in that order."""
        return {name: seconds(lambda name=name: self._run(name, work)) for name in names}

    def _run(self, name: str, work: Workload) -> None:
        self.decoding = self.runs[name](work) or self.decoding


@dataclass(frozen=True)
class Pair:
    """What one pair came to; shares are of our engine, fixed."""

    even: Workload
    odd: Workload
    steady: dict[str, float]  # seconds by name, fixed
    uneven: dict[str, float]  # and ragged
    peak: float  # operations a second that the machine reaches
    share: float  # of that
    bandwidth: float  # bytes a second that the machine reaches
    bandwidth_share: float  # of that, while it decodes

    @staticmethod
    def of(contest: Contest, even: Workload, odd: Workload, order: list[str]) -> "Pair":
        """Run it. What the machine reaches is the best of before and after the fixed batch."""
        model = contest.model
        peak, bandwidth = matmul_peak(model.dtype), memory_peak()
        steady = contest.times(even, order)
        reached = operations(model, even) / steady["native"], contest.decoding.bandwidth(model)
        peak, bandwidth = max(peak, matmul_peak(model.dtype)), max(bandwidth, memory_peak())
        uneven = contest.times(odd, [*order, "continuous"])
        return Pair(even, odd, steady, uneven, peak, reached[0] / peak, bandwidth, reached[1] / bandwidth)

    def rows(self, name: str, runs: list[str]) -> list[list[str]]:
        """Tokens a second."""
        return [
            [f"{name}, {kind}", *(f"{work.tokens / taken[run]:.1f}" if run in taken else "-" for run in runs)]
            for kind, work, taken in (("fixed", self.even, self.steady), ("ragged", self.odd, self.uneven))
        ]


def figures_of(pairs: list[Pair], model: Any) -> dict[str, float]:
    """Medians over the pairs."""
    median = statistics.median
    return {
        "parameters": float(sum(p.numel() for p in model.parameters())),
        "ratio_vs_generate_fixed": median(p.steady["generate"] / p.steady["native"] for p in pairs),
        "ratio_vs_generate_ragged": median(p.uneven["generate"] / p.uneven["native"] for p in pairs),
        "ratio_vs_continuous_batching_ragged": median(p.uneven["continuous"] / p.uneven["native"] for p in pairs),
        "share_of_peak": median(p.share for p in pairs),
        "peak_gflops": median(p.peak for p in pairs) / 1e9,
        "share_of_bandwidth": median(p.bandwidth_share for p in pairs),
        "bandwidth_gb_per_second": median(p.bandwidth for p in pairs) / 1e9,
        "native_tokens_per_second_fixed": median(p.even.tokens / p.steady["native"] for p in pairs),
        "native_tokens_per_second_ragged": median(p.odd.tokens / p.uneven["native"] for p in pairs),
    }


def main() -> None:
    """Run the pairs, print the tables, write the result."""
    args = parse()
    size = size_of(args)
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    contest = Contest.of(load(args.model, tiny=args.tiny), size)
    model, vocabulary = contest.model, contest.model.config.vocab_size
    # Warm up; ours also touches its memory for the first time.
    contest.times(fixed(np.random.default_rng(args.pairs), 4, 8, 3, vocabulary), list(contest.runs))
    contest.times(fixed(np.random.default_rng(args.pairs), size.batch, size.prompt, 2, vocabulary), ["native"])
    pairs: list[Pair] = []
    for number in range(args.pairs):
        rng = np.random.default_rng(number)
        even = fixed(rng, size.batch, size.prompt, size.tokens, vocabulary)
        odd = ragged(rng, size.batch, size.prompt, size.median, vocabulary)
        pairs.append(Pair.of(contest, even, odd, ["native", "generate"] if number % 2 == 0 else ["generate", "native"]))
        print(f"pair {number + 1} of {args.pairs} done", flush=True)
    figures = figures_of(pairs, model)
    rows = [row for number, pair in enumerate(pairs) for row in pair.rows(f"pair {number + 1}", list(contest.runs))]
    print(table(["tokens/s that were asked for", *contest.runs], rows), end="\n\n")
    print(table(["figure", "median"], [[name, f"{value:,.3f}"] for name, value in figures.items()]))
    settings = SETTINGS_ON_GPU if torch.cuda.is_available() else SETTINGS
    if args.out or not args.tiny:
        print("written:", write_result("engine", figures, args.out, measures=MEASURES, settings=settings))


if __name__ == "__main__":
    main()

"""The native engine against transformers: `generate` in static batches, and its continuous batching.

    python benchmarks/engine.py --model smollm2 --pairs 5 --threads 1

Each pair runs all of them on the same prompts with the same number of tokens a request (end tokens are off), one after
the other; the figures are medians of the pairs' ratios of time, so that a machine which slows down does so for all.
Fixed: one batch, all equally long. Ragged: two batches' worth of requests, log-normal lengths whose longest in each batch
is 8 times the median; a static batch runs to its longest, the others refill. Sampling is at temperature 1, untruncated.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import matmul_peak, seconds, smollm2, table, write_result
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from antiphon.engines.config import EngineConfig
from antiphon.engines.native.engine import NativeEngine
from antiphon.types import GenerateRequest, Sampling


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


def run_native(engine: NativeEngine, work: Workload, batch: int) -> None:
    """All requests at once; the engine has `batch` slots."""
    for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        sampling = Sampling(max_tokens=length, seed=i)
        engine.add(GenerateRequest(id=str(i), tokens=np.array(prompt, np.int32), sampling=sampling))
    done = 0
    while engine.busy:
        done += sum(len(delta.tokens) for delta in engine.step())
    assert done == work.tokens, (done, work.tokens)


def run_generate(model: Any, work: Workload, batch: int) -> None:
    """Batch after batch, each to its longest."""
    for start in range(0, len(work.prompts), batch):
        prompts = torch.tensor(work.prompts[start : start + batch], device=model.device)
        longest = max(work.lengths[start : start + batch])
        config = GenerationConfig(max_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0)
        made = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
        assert made.shape[1] == prompts.shape[1] + longest


def run_continuous(model: Any, work: Workload, batch: int) -> None:
    """All requests at once; at most `batch` in a step, 512 tokens a step as with ours."""
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, max_new_tokens=max(work.lengths)
    )
    pages = sum(-(-(len(p) + n) // 32) for p, n in zip(work.prompts, work.lengths, strict=True)) + batch
    settings = ContinuousBatchingConfig(
        page_size=32, num_blocks=pages, max_batch_tokens=512, max_requests_per_batch=batch, allow_block_sharing=False
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
    """The command line."""
    parser = argparse.ArgumentParser(description="The native engine against transformers, matched.")
    parser.add_argument("--model", default="smollm2", help="a directory, or smollm2")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="sequences at once, for all")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="sampled tokens of a request, fixed")
    parser.add_argument("--median", type=int, default=8, help="median of sampled tokens, ragged")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


@dataclass
class Contest:
    """The three, each with its own copy of one model: ours takes over its copy's attention, continuous batching changes
    its own. Our engine lives on from pair to pair, as it does in a run; every pair has new prompts."""

    model: Any
    runs: dict[str, Callable[[Workload], None]]

    @staticmethod
    def of(directory: Path | str, batch: int) -> "Contest":
        """Load the model and seat the three."""
        device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval().to(device)
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        config = EngineConfig(slots=batch, device=device, dtype=str(dtype).removeprefix("torch."))
        engine = NativeEngine(copy.deepcopy(model), config, receive=lambda update: ())
        paged = copy.deepcopy(model)
        runs = {
            "native": lambda work: run_native(engine, work, batch),
            "generate": lambda work: run_generate(model, work, batch),
            "continuous": lambda work: run_continuous(paged, work, batch),
        }
        return Contest(model, runs)

    def times(self, work: Workload, names: list[str]) -> dict[str, float]:
        """Seconds of each of `names`, run in that order."""
        return {name: self._time(name, work) for name in names}

    def _time(self, name: str, work: Workload) -> float:
        return seconds(lambda: self.runs[name](work))


def main() -> None:
    """Run the pairs, print the tables, write the result."""
    args = parse()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    contest = Contest.of(smollm2() if args.model == "smollm2" else args.model, args.batch)
    model, vocabulary = contest.model, contest.model.config.vocab_size
    # Warm up; ours also touches its memory for the first time.
    contest.times(fixed(np.random.default_rng(args.pairs), 4, 8, 3, vocabulary), list(contest.runs))
    contest.times(fixed(np.random.default_rng(args.pairs), args.batch, args.prompt, 2, vocabulary), ["native"])
    peaks, steady, uneven, shares, rows = [], [], [], [], []
    for pair in range(args.pairs):
        rng = np.random.default_rng(pair)
        even = fixed(rng, args.batch, args.prompt, args.tokens, vocabulary)
        odd = ragged(rng, args.batch, args.prompt, args.median, vocabulary)
        order = ["native", "generate"] if pair % 2 == 0 else ["generate", "native"]
        before = matmul_peak(model.dtype)
        steady.append(contest.times(even, order))
        peaks.append(max(before, matmul_peak(model.dtype)))
        uneven.append(contest.times(odd, [*order, "continuous"]))
        shares.append(operations(model, even) / steady[-1]["native"] / peaks[-1])
        for name, work, taken in (("fixed", even, steady[-1]), ("ragged", odd, uneven[-1])):
            cells = [f"{work.tokens / taken[run]:.1f}" if run in taken else "-" for run in contest.runs]
            rows.append([f"pair {pair + 1}, {name}", *cells])
        print(f"pair {pair + 1} of {args.pairs} done", flush=True)
    figures = {
        "ratio_vs_generate_fixed": statistics.median(t["generate"] / t["native"] for t in steady),
        "ratio_vs_generate_ragged": statistics.median(t["generate"] / t["native"] for t in uneven),
        "ratio_vs_continuous_batching_ragged": statistics.median(t["continuous"] / t["native"] for t in uneven),
        "share_of_peak": statistics.median(shares),
        "peak_gflops": statistics.median(peaks) / 1e9,
        "native_tokens_per_second_fixed": statistics.median(args.batch * args.tokens / t["native"] for t in steady),
    }
    print(table(["tokens/s that were asked for", *contest.runs], rows), end="\n\n")
    print(table(["figure", "median"], [[name, f"{value:.3f}"] for name, value in figures.items()]))
    print("written:", write_result("engine", figures, args.out))


if __name__ == "__main__":
    main()

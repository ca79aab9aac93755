"""Guessed tokens of the native engine (`engine.draft_tokens`): tokens a second with them over those without, and which tokens.

    python benchmarks/speculative.py [--pairs 3] [--tokens 64]
    python benchmarks/speculative.py --tiny    # with a tiny model: that it runs, and no measurement

SmolLM2 in float32, on one thread, with 1, 4 and 16 sequences at once. Each pair runs the same requests without and with
guesses, one after the other; ratios are medians of pairs. Requests of a workload:

* `copies`: texts to be written once more, at temperature 0, as tools, quotations and code do;
* `epochs`: questions that were answered before, at temperature 0.7 with other seeds, as in a later epoch of a run;
* `siblings`: one question, several answers at once, at temperature 0.7, as a group of a run;
* `unlike`: questions that have nothing in common, at temperature 1: what guessing costs where nothing can be guessed.

Every token is compared: only rounding may make a draw differ, since sums are taken over other shapes.
"""

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import TINY_QWEN3, random_model, seconds, smollm2, table, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer

from antiphon.core.types import GenerateRequest, Sampling
from antiphon.engines.config import EngineConfig
from antiphon.engines.native.engine import NativeEngine

MEASURES = ("antiphon.engines.native",)
DRAFT_TOKENS = 8
SEQUENCES = (1, 4, 16)  # at once

TEXTS = (
    "def area(width, height):\n    if width < 0 or height < 0:\n        return None\n    return width * height\n",
    "SELECT name, count(*) AS orders FROM customers JOIN orders USING (customer) GROUP BY name ORDER BY orders DESC LIMIT 10;",
    '{"tool": "search", "arguments": {"query": "weather in Lisbon", "limit": 5, "language": "en"}}',
    "The quick brown fox jumps over the lazy dog, and the lazy dog does not care about the quick brown fox.",
)
QUESTIONS = (
    "A train leaves at nine and arrives at noon. How long does it travel? Explain step by step.",
    "Name three planets of the solar system and describe each of them in one sentence.",
    "What is the difference between a list and a tuple in Python?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "How do plants turn light into energy? Answer in simple words.",
    "Give a recipe for bread with flour, water, salt and yeast.",
    "Why is the sky blue at noon and red in the evening?",
    "Explain what an interest rate is to a child of ten years.",
)


@dataclass(frozen=True)
class Workload:
    """Requests that are run before, and those that are measured: prompts, seeds and a temperature."""

    before: list[tuple[list[int], int]]
    measured: list[tuple[list[int], int]]
    temperature: float


def make_workloads(encode: Any) -> dict[str, Workload]:
    """Return the workloads; `encode` returns the tokens of a message to the model."""
    copies = [encode(f"Write this text three times, exactly as it is:\n{text}") for text in TEXTS]
    asked = [encode(question) for question in QUESTIONS]
    return {
        "copies": Workload([], [(prompt, 0) for prompt in copies * 2], 0.0),
        "epochs": Workload([(prompt, 1) for prompt in asked], [(prompt, 2) for prompt in asked], 0.7),
        "siblings": Workload([], [(asked[2], seed) for seed in range(8)], 0.7),
        "unlike": Workload([], [(prompt, 3) for prompt in asked], 1.0),
    }


def run(
    engine: NativeEngine, requests: list[tuple[list[int], int]], temperature: float, tokens: int
) -> list[list[int]]:
    """Run requests to their ends; return the tokens of each."""
    found: dict[str, list[int]] = {str(number): [] for number in range(len(requests))}
    for number, (prompt, seed) in enumerate(requests):
        sampling = Sampling(max_tokens=tokens, temperature=temperature, seed=1000 * seed + number)
        engine.add(GenerateRequest(id=str(number), tokens=np.array(prompt, np.int32), sampling=sampling))
    while engine.busy:
        for delta in engine.step():
            found[delta.request] += delta.tokens.tolist()
    return list(found.values())


def measure(
    model: Any, work: Workload, sequences: int, tokens: int, draft_tokens: int
) -> tuple[float, list[list[int]], float]:
    """Return the seconds of the measured requests on a new engine, their tokens, and the share of right guesses."""
    config = EngineConfig(slots=sequences, device="cpu", max_length=512, draft_tokens=draft_tokens)
    engine = NativeEngine(model, config, receive=lambda update: ())
    engine._eos_ids = np.zeros(0, np.int64)  # equally many tokens whatever the model says
    run(engine, work.before, work.temperature, tokens)
    guessed, confirmed = engine.counters.guessed_tokens, engine.counters.confirmed_tokens
    found: list[list[list[int]]] = []
    took = seconds(lambda: found.append(run(engine, work.measured, work.temperature, tokens)))
    guessed = engine.counters.guessed_tokens - guessed
    return took, found[0], (engine.counters.confirmed_tokens - confirmed) / max(guessed, 1)


def load(tiny: bool) -> tuple[Any, Any]:
    """Return a function that makes a model, and one that encodes a message to it."""
    if tiny:
        model = random_model(TINY_QWEN3)
        return model, lambda text: [1 + ord(letter) % 90 for letter in text[:20]]
    path = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path)

    def encode(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), encode


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens of a request")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, encode = load(options.tiny)
    rows, figures, equal, compared = [], {}, 0, 0
    for name, work in make_workloads(encode).items():
        for sequences in SEQUENCES:
            ratios, share = [], 0.0
            for _ in range(options.pairs):
                plain, expected, _ = measure(model, work, sequences, options.tokens, 0)
                drafted, found, share = measure(model, work, sequences, options.tokens, DRAFT_TOKENS)
                ratios.append(plain / drafted)
                for one, other in zip(expected, found, strict=True):
                    same = next(
                        (n for n, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one)
                    )
                    equal, compared = equal + same, compared + len(one)
            figures[f"speedup_{name}_{sequences}"] = statistics.median(ratios)
            rows.append([name, str(sequences), f"{statistics.median(ratios):.2f}", f"{share:.2f}"])
            print(rows[-1], flush=True)
    figures |= {
        "speedup_repetitive": statistics.median(
            figures[f"speedup_{name}_{n}"] for name in ("copies", "epochs") for n in (1, 4)
        ),
        "lowest_speedup": min(figures.values()),
        "identical_tokens": equal,
        "compared_tokens": compared,
    }
    print(table(["requests", "at once", "tokens/s with / without", "right guesses"], rows))
    print("written:", write_result("speculative", figures, options.out, measures=MEASURES))


if __name__ == "__main__":
    main()

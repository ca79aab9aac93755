"""Truncated sampling that is trained on: what recording the support costs, and the ratios that a learner finds.

    python benchmarks/truncated_sampling.py [--pairs 5] [--tokens 64]
    python benchmarks/truncated_sampling.py --tiny    # with a tiny model: that it runs, and no measurement

SmolLM2 in float32, on one thread, 16 sequences at once, at temperature 1. Each pair answers the same questions from the
whole vocabulary, with top-p 0.8 alone, whose support is not recorded, and with top-p 0.8 of the 50 likeliest tokens, whose
support is. Then the ratios of the probabilities that a learner computes to those that the engine recorded, over all tokens
of a pair: by the recorded support, and by the whole vocabulary, as a learner does that does not know the support.
"""

import argparse
import copy
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import seconds, table, write_result
from speculative import QUESTIONS, load

from antiphon.core.types import SAMPLING_SUPPORT, GenerateRequest, Sampling, Streams
from antiphon.engines.config import EngineConfig
from antiphon.engines.deltas import Delta
from antiphon.engines.native.engine import NativeEngine
from antiphon.learning.model.logprobs import token_logprobs

MEASURES = ("antiphon.engines.native", "antiphon.learning.model.logprobs")
SEQUENCES = 16
LIMITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "unrecorded": {"top_p": 0.8},
    "recorded": {"top_p": 0.8, "top_k": 50},
}


def run(model: Any, prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Delta]:
    """Answer all prompts on a new engine; return each answer."""
    config = EngineConfig(slots=SEQUENCES, device="cpu", max_length=512)
    engine = NativeEngine(model, config, receive=lambda update: ())
    engine._eos_ids = np.zeros(0, np.int64)  # equally many tokens whatever the model says
    found: dict[str, list[Delta]] = {}
    for number, prompt in enumerate(prompts):
        found[str(number)] = []
        tokens, how = np.array(prompt, np.int32), Sampling(seed=number, **sampling)
        engine.add(GenerateRequest(id=str(number), tokens=tokens, sampling=how))
    while engine.busy:
        for delta in engine.step():
            found[delta.request].append(delta)
    return {name: Delta.join(deltas) for name, deltas in found.items()}


@torch.no_grad()
def find_ratios(model: Any, prompt: list[int], answer: Delta, streams: Streams) -> np.ndarray:
    """Return the ratio of the learner's probability to the recorded one for each token of an answer."""
    tokens = torch.tensor([*prompt, *answer.tokens.tolist()])
    hidden = model.model(tokens[None]).last_hidden_state[0, len(prompt) - 1 : -1]
    support = torch.from_numpy(streams[SAMPLING_SUPPORT]) if SAMPLING_SUPPORT in streams else None
    ones = torch.ones(len(hidden))
    logprobs, _ = token_logprobs(hidden, model.lm_head.weight, tokens[len(prompt) :], ones, 64, None, support)
    return np.exp(logprobs.double().numpy() - answer.logprobs)


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens of an answer")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, encode = load(options.tiny)
    learner = copy.deepcopy(model)  # an engine takes over the model that it is given
    prompts = [encode(question) for question in QUESTIONS] * (SEQUENCES // len(QUESTIONS))
    took: dict[str, list[float]] = {name: [] for name in LIMITS}
    for _ in range(options.pairs):
        for name, limits in LIMITS.items():
            sampling = {"max_tokens": options.tokens, **limits}
            took[name].append(seconds(partial(run, model, prompts, sampling)))
    answers = run(model, prompts, sampling)
    ratios = {
        name: np.concatenate(
            [
                find_ratios(learner, prompt, answers[str(n)], answers[str(n)].streams if keep else Streams())
                for n, prompt in enumerate(prompts)
            ]
        )
        for name, keep in (("by_support", True), ("by_vocabulary", False))
    }
    figures = {
        f"time_{name}_over_whole": statistics.median(a / b for a, b in zip(took[name], took["whole"], strict=True))
        for name in ("unrecorded", "recorded")
    }
    figures |= {f"mean_ratio_{name}": float(found.mean()) for name, found in ratios.items()}
    figures["largest_ratio_error_by_support"] = float(np.abs(ratios["by_support"] - 1).max())
    figures["tokens"] = len(ratios["by_support"])
    print(table(["figure", "value"], [[name, f"{value:.5f}"] for name, value in figures.items()]))
    if not options.tiny or options.out:
        print("written:", write_result("truncated_sampling", figures, options.out, measures=MEASURES))


if __name__ == "__main__":
    main()

"""A prompt computed once for all siblings, against once for each, and against TRL: tokens a second, and peak memory.

    python benchmarks/shared_prefix.py [--rounds 3] [--no-trl]

One group a step: prompts of 64, 256 and 1,024 tokens, 8 siblings, 64 sampled tokens each, a model of SmolLM2-135M's width with
6 of its 30 layers and random weights, float32 on one thread. Tokens count as they would without sharing, so a ratio of tokens
a second is one of seconds a step. Each way and length is a process of its own, which tells its peak memory; rounds alternate
the ways. TRL gets the same tokens through its `rollout_func`, and its clock begins when it has them.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from _common import ROOT, table, write_result
from step import trl_python
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MEASURES = (
    "antiphon.learning.torch_learner",
    "antiphon.learning.model_worker",
    "antiphon.learning.pack_learner",
    "antiphon.learning.packing",
    "antiphon.learning.model.attention",
    "antiphon.learning.batch",
)
SETTINGS = {
    "ours": "TorchLearner on one thread, all 8 siblings in one pack, with and without share_prefixes",
    "TRL": (
        "GRPOTrainer 1.16.0 on one thread, all 8 siblings in one micro-batch, no gradient checkpointing, "
        "no reference model"
    ),
    "why its best": (
        "not tuned: smaller micro-batches would need less memory, and no option of it computes a prompt once"
    ),
}

PROMPTS, SIBLINGS, TOKENS = (64, 256, 1024), 8, 64
STEPS = 3  # that are timed, after one that is not
MODEL = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--no-trl", dest="trl", action="store_false")
    arguments.add_argument("--one", nargs=2, metavar=("WAY", "SPECIFICATION"), help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        way, spec = options.one
        print(json.dumps(ours(way == "shared", json.loads(Path(spec).read_text(encoding="utf-8")))))
        return
    ways = ["shared", "plain", *["trl"] * options.trl]
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model")
        found: dict[tuple[str, int], list[dict[str, float]]] = {}
        for round_ in range(options.rounds):
            for prompt in PROMPTS:
                spec = Path(scratch) / "spec.json"
                spec.write_text(json.dumps(work(prompt) | {"model": str(model), "steps": STEPS}), encoding="utf-8")
                for way in ways if round_ % 2 == 0 else ways[::-1]:
                    found.setdefault((way, prompt), []).append(one(way, spec))
                    print(round_, prompt, way, found[way, prompt][-1], flush=True)
    report(ways, found)


def make_model(directory: Path) -> Path:
    """A model with random weights, and a tokenizer that TRL wants to see."""
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)} | {"<e>": 1000}, "w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", pad_token="<e>").save_pretrained(directory)
    return directory


def work(prompt: int) -> dict[str, list]:
    """A prompt, and what siblings have made of it, none of it an end."""
    rng = np.random.default_rng(prompt)
    return {
        "prompt": rng.integers(0, 1000, prompt).tolist(),
        "completions": rng.integers(0, 1000, (SIBLINGS, TOKENS)).tolist(),
        "rewards": rng.normal(size=SIBLINGS).tolist(),
    }


def one(way: str, spec: Path) -> dict[str, float]:
    """One process: seconds of a step, peak bytes."""
    if way == "trl":
        command = [str(trl_python()), str(ROOT / "benchmarks" / "shared_prefix_trl.py"), str(spec)]
    else:
        command = [sys.executable, __file__, "--one", way, str(spec)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    measured: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def ours(share: bool, spec: dict) -> dict[str, float]:
    """Steps of the learner on the work of a specification."""
    from antiphon.algorithms.config import AlgorithmConfig
    from antiphon.learning.batch import BatchOptions, build_batch
    from antiphon.learning.config import LearnerConfig, OptimizerConfig
    from antiphon.learning.data_samples import make_response
    from antiphon.learning.torch_learner import TorchLearner

    prompt = np.array(spec["prompt"], np.int32)
    group = []
    for number, (completion, reward) in enumerate(zip(spec["completions"], spec["rewards"], strict=True)):
        (sample,) = make_response(number, prompt, np.array(completion, np.int32))
        group.append(replace(sample, advantages=np.where(sample.segment.loss_mask, reward, 0).astype(np.float32)))
    learner = TorchLearner(spec["model"], LearnerConfig(), seed=0)
    learner.begin(AlgorithmConfig(), OptimizerConfig(), spec["steps"] + 1)
    batch = build_batch(
        [group], BatchOptions(aggregation="token_mean", max_tokens=TOKENS, tokens_per_pack=16_384, share_prefixes=share)
    )
    seconds = []
    for _ in range(spec["steps"] + 1):
        began = time.perf_counter()
        learner.step(batch)
        seconds.append(time.perf_counter() - began)
    return {"seconds": median(seconds[1:]), "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def report(ways: list[str], found: dict[tuple[str, int], list[dict[str, float]]]) -> None:
    """The table, and the result."""
    middle = {key: {name: median(run[name] for run in runs) for name in runs[0]} for key, runs in found.items()}
    figures: dict[str, float] = {}
    rows = []
    for prompt in PROMPTS:
        for way in ways:
            measured, tokens = middle[way, prompt], SIBLINGS * (prompt + TOKENS)
            figures[f"{way}_tokens_per_second_at_{prompt}"] = tokens / measured["seconds"]
            figures[f"{way}_peak_mib_at_{prompt}"] = measured["peak"] / 2**20
            rows.append(
                [f"{prompt:,}", way, f"{tokens / measured['seconds']:,.0f}", f"{measured['peak'] / 2**20:,.0f}"]
            )
        ratio = {way: middle[way, prompt]["seconds"] / middle["shared", prompt]["seconds"] for way in ways[1:]}
        figures[f"speedup_at_{prompt}"] = ratio["plain"]
        figures[f"memory_ratio_at_{prompt}"] = middle["shared", prompt]["peak"] / middle["plain", prompt]["peak"]
        if "trl" in ratio:
            figures[f"trl_speedup_at_{prompt}"] = ratio["trl"]
    print(table(["prompt", "way", "tokens a second", "peak MiB"], rows))
    print({name: round(value, 2) for name, value in figures.items() if "speedup" in name or "ratio" in name})
    print(f"written to {write_result('shared_prefix', figures, measures=MEASURES, settings=SETTINGS)}")


if __name__ == "__main__":
    main()

"""The torch learner on one GPU: tokens a second, how much of the device that uses, and peak memory.

    python benchmarks/learner.py [--rounds 3]
    python benchmarks/learner.py --tiny    # all of it with a tiny model, on a CPU too: that it runs, and no measurement

A model of the shape of Qwen3-1.7B with random weights, in bfloat16 (autocast), one update a step. Each round runs all ways one
after the other, every second round backwards; a round before them is not timed. Ratios are medians of those of the rounds.

Samples of long-tailed lengths are learned from `packed`, and `padded`: through transformers' own forward, filled up on the
right to the longest of a micro-batch, which needs no mask and so gets the fastest kernels. A micro-batch has as many as would
fit in a pack if all were the longest; all else is the learner's, from the loss to the optimiser. `checkpointed` and
`full_logits` are packed, with gradient checkpointing and with a `logits_chunk` as large as a pack. Groups of siblings with a
long prompt are learned from `shared` and `plain`: the prompt once a group, and once a sibling. That ways to learn the same have
the same gradient norm is checked.

Tokens are those of the samples: without padding, and a prompt counts for each sibling. MFU is the operations of the model over
time and over what a large matrix product in bfloat16 reaches in the same round. Of the operations padding is part; a shared
prompt is once; what checkpointing computes again is not. They are 6 a weight and token (the head's: a token of the loss; the
embedding's: none), and 12 a layer, head, element of a head and pair of tokens that see each other. Source: Chowdhery et al.
2022, "PaLM", appendix B; half of its pairs are not computed, because attention is causal, as in Dao 2023, "FlashAttention-2".
"""

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _common import QWEN3, TINY_QWEN3, matmul_peak, random_model, seconds, table, write_result

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.types import Pack, Sample, TrainBatch, Update
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.data_samples import make_response
from antiphon.learning.host_device_copy import to_device
from antiphon.learning.model.attention import AttentionReader
from antiphon.learning.model.pack_layout import loss_sequences
from antiphon.learning.torch_learner import TorchLearner

MEASURES = (
    "antiphon.learning.torch_learner",
    "antiphon.learning.model_worker",
    "antiphon.learning.pack_learner",
    "antiphon.learning.packing",
    "antiphon.learning.model.attention",
    "antiphon.learning.model.logprobs",
    "antiphon.learning.batch",
)


@dataclass(frozen=True)
class Size:
    """What is run."""

    model: dict[str, int]
    pack: int  # tokens
    samples: int  # of long-tailed lengths
    lengths: tuple[int, int, int]  # of them: prompt, median and longest response
    groups: int
    group: tuple[int, int, int]  # siblings, tokens of their prompt, of a response
    chunk: int


FULL = Size(
    model=QWEN3,
    pack=8192,
    samples=128,
    lengths=(128, 256, 2048),
    groups=4,
    group=(8, 1024, 256),
    chunk=1024,
)
TINY = Size(
    model=TINY_QWEN3,
    pack=160,
    samples=12,
    lengths=(8, 16, 96),
    groups=2,
    group=(4, 64, 16),
    chunk=16,
)


class EitherLearner(TorchLearner):
    """The learner; while it is told to, one that pads."""

    padded = False

    def _hidden(self, pack: Pack, targets: torch.Tensor, reader: AttentionReader | None = None) -> torch.Tensor:
        if not self.padded:
            return super()._hidden(pack, targets, reader)
        paths = [path for path, _ in loss_sequences(pack)]
        rows = np.zeros((len(paths), max(map(len, paths))), np.int64)
        places = np.empty(len(pack.tokens), np.int64)  # of each token, in all rows
        for number, path in enumerate(paths):
            rows[number, : len(path)] = pack.tokens[path]
            places[path] = number * rows.shape[1] + np.arange(len(path))
        hidden = self.model.base_model(to_device(rows, self.device), use_cache=False).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, to_device(places, self.device)[targets] - 1)


@dataclass(frozen=True)
class Way:
    """A way to learn from some samples."""

    batch: TrainBatch
    tokens: int  # of the samples
    chunk: int
    padded: bool = False
    checkpointed: bool = False

    def step(self, learner: EitherLearner) -> float:
        """One step; returns the gradient norm."""
        learner.padded = self.padded
        learner.config = learner.config.model_copy(update={"logits_chunk": self.chunk})
        learner.model.set_attn_implementation("sdpa" if self.padded else learner.attention)
        if self.checkpointed:
            learner.model.gradient_checkpointing_enable()
        else:
            learner.model.gradient_checkpointing_disable()
        return learner.step(self.batch)["grad_norm"]

    def operations(self, model: Any) -> float:
        """Of the model, forward and backward."""
        config = model.config
        weights = sum(p.numel() for layer in model.base_model.layers for p in layer.parameters() if p.ndim > 1)
        head = model.get_output_embeddings().weight.numel()
        pair = config.num_hidden_layers * config.num_attention_heads * config.head_dim
        tokens, pairs = (sum(column) for column in zip(*map(self._computed, self._packs), strict=True))
        predicted = sum(int(pack.loss_mask.sum()) for pack in self._packs)
        return 6.0 * (weights * tokens + head * predicted) + 12.0 * pair * pairs

    @property
    def _packs(self) -> tuple[Pack, ...]:
        return self.batch.updates[0].packs[0]

    def _computed(self, pack: Pack) -> tuple[int, int]:
        """Tokens, and pairs of them that see each other."""
        lengths, before = pack.lengths.astype(np.int64), np.zeros(len(pack.lengths), np.int64)
        if self.padded:
            lengths = np.full_like(lengths, lengths.max())
        for piece, parent in enumerate(pack.parents):
            before[piece] = before[parent] + lengths[parent] if parent >= 0 else 0
        return int(lengths.sum()), int((lengths * before + lengths * (lengths + 1) // 2).sum())


def sample(rng: np.random.Generator, number: int, prompt: np.ndarray, length: int, vocabulary: int) -> Sample:
    """A response of so many tokens, each as likely as any other when it was sampled."""
    (made,) = make_response(number, prompt, rng.integers(0, vocabulary, length).astype(np.int32))
    mask = made.segment.loss_mask
    segment = replace(made.segment, logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32))
    return replace(made, segment=segment, advantages=np.where(mask, rng.normal(), 0).astype(np.float32))


def ragged(size: Size) -> list[Sample]:
    """Samples whose responses have log-normal lengths; one has the most."""
    rng, vocabulary = np.random.default_rng(0), size.model["vocab_size"]
    prompt, middle, longest = size.lengths
    lengths = np.clip(middle * np.exp(rng.standard_normal(size.samples)), 1, longest).astype(int)
    lengths[rng.integers(len(lengths))] = longest
    return [
        sample(rng, i, rng.integers(0, vocabulary, prompt).astype(np.int32), n, vocabulary)
        for i, n in enumerate(lengths)
    ]


def families(size: Size) -> list[Sample]:
    """Groups of siblings."""
    rng, vocabulary = np.random.default_rng(1), size.model["vocab_size"]
    siblings, prompt, response = size.group
    prompts = [rng.integers(0, vocabulary, prompt).astype(np.int32) for _ in range(size.groups)]
    return [sample(rng, i, prompts[i // siblings], response, vocabulary) for i in range(size.groups * siblings)]


def packed(samples: list[Sample], tokens: int, *, share: bool = True) -> TrainBatch:
    """As the learner is given them."""
    return build_batch(
        [samples], BatchOptions(aggregation="token_mean", max_tokens=1, tokens_per_pack=tokens, share_prefixes=share)
    )


def micro_batches(samples: list[Sample], tokens: int) -> TrainBatch:
    """As many to a pack as may be padded to the longest of all, in their order."""
    each = max(1, tokens // max(len(s.segment.tokens) for s in samples))
    parts = [packed(samples[i : i + each], 10**9, share=False).updates[0] for i in range(0, len(samples), each)]
    total = sum(part.loss_tokens for part in parts)
    packs = [
        replace(pack, coefficients=pack.coefficients * part.loss_tokens / total)
        for part in parts
        for pack in part.packs[0]
    ]
    return TrainBatch(
        updates=(
            Update(
                packs=(tuple(packs),), loss_tokens=total, trajectories=len(samples), groups=1, sequences=len(samples)
            ),
        )
    )


def ways_of(size: Size) -> dict[str, Way]:
    """All that are compared, by name."""
    uneven, related = ragged(size), families(size)
    long, many = (sum(len(s.segment.tokens) for s in samples) for samples in (uneven, related))
    batch = packed(uneven, size.pack)
    return {
        "packed": Way(batch, long, size.chunk),
        "padded": Way(micro_batches(uneven, size.pack), long, size.chunk, padded=True),
        "checkpointed": Way(batch, long, size.chunk, checkpointed=True),
        "full_logits": Way(batch, long, size.pack),
        "shared": Way(packed(related, size.pack), many, size.chunk),
        "plain": Way(packed(related, size.pack, share=False), many, size.chunk),
    }


AGAINST = {"padded": "packed", "checkpointed": "packed", "full_logits": "packed", "plain": "shared"}


def check(norms: dict[str, float]) -> None:
    """That all ways to learn from the same samples learn the same."""
    for way, other in AGAINST.items():
        if abs(norms[way] / norms[other] - 1) > 0.05:
            raise SystemExit(f"{way} and {other} are not the same work: gradient norms {norms[way]}, {norms[other]}")


def measured(learner: EitherLearner, way: Way) -> dict[str, float]:
    """Seconds and peak bytes of a step."""
    on_gpu = learner.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    taken = seconds(lambda: way.step(learner))
    return {"seconds": taken, "peak": float(torch.cuda.max_memory_allocated()) if on_gpu else 0.0}


def figures_of(learner: EitherLearner, ways: dict[str, Way], rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds."""
    figures = {
        "parameters": float(sum(p.numel() for p in learner.model.parameters())),
        "matmul_teraflops": median(found["limit"] for found in rounds) / 1e12,
    }
    for name, way in ways.items():
        operations = way.operations(learner.model)
        figures[f"{name}_tokens_per_second"] = median(way.tokens / found[name]["seconds"] for found in rounds)
        figures[f"{name}_mfu"] = median(operations / found[name]["seconds"] / found["limit"] for found in rounds)
        figures[f"{name}_peak_gib"] = max(found[name]["peak"] for found in rounds) / 2**30
    for name, other in AGAINST.items():
        figures[f"{other}_against_{name}_speed"] = median(
            found[name]["seconds"] / found[other]["seconds"] for found in rounds
        )
        if figures[f"{name}_peak_gib"]:
            figures[f"{other}_against_{name}_memory"] = figures[f"{other}_peak_gib"] / figures[f"{name}_peak_gib"]
    return figures


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on any device; written only to --out")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    """Run the rounds, print the table, write the result."""
    args = parse()
    if not args.tiny and not torch.cuda.is_available():
        print("skipped: it measures a GPU, and torch finds none here (--tiny runs all of it on a CPU)")
        return
    size = TINY if args.tiny else FULL
    ways = ways_of(size)
    with tempfile.TemporaryDirectory() as scratch:
        random_model(size.model).save_pretrained(scratch)
        learner = EitherLearner(scratch, LearnerConfig(dtype="bfloat16"), seed=0)
    # So small a step that all rounds have the same gradient.
    learner.begin(AlgorithmConfig(), OptimizerConfig(learning_rate=1e-12), 1)
    check({name: way.step(learner) for name, way in ways.items()})
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds):
        limit = matmul_peak(torch.bfloat16)
        order = list(ways.items())[:: 1 if number % 2 == 0 else -1]
        found: dict[str, Any] = {name: measured(learner, way) for name, way in order}
        rounds.append(found | {"limit": max(limit, matmul_peak(torch.bfloat16))})
        print(f"round {number + 1} of {args.rounds} done", flush=True)
    figures = figures_of(learner, ways, rounds)
    rows = [
        [name, *(f"{figures[f'{name}_{of}']:,.3f}" for of in ("tokens_per_second", "mfu", "peak_gib"))] for name in ways
    ]
    print(table(["way", "tokens a second", "MFU", "peak GiB"], rows), end="\n\n")
    print(table(["figure", "median"], [[name, f"{value:,.3f}"] for name, value in figures.items()]))
    if args.out or not args.tiny:
        print("written:", write_result("learner", figures, args.out, measures=MEASURES))


if __name__ == "__main__":
    main()

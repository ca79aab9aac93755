"""Reading the rhythm of attention: its memory, its cost, and what of the paper's statistics a small model shows.

    python benchmarks/rhythm.py
    python benchmarks/rhythm.py --quick --out /tmp/rhythm.json --figure /tmp/rhythm.png

Memory is how far the process's resident size rises while one sequence is read from a random model of 6 layers, against
transformers' eager attention that returns its maps. Cost is the annotation's share of a step of SmolLM2-135M-Instruct:
of annotation and update, and of these with the sampling of the same tokens by one engine.

Statistics are the three of arXiv 2510.13554, over SmolLM2's answers to problems like those of GSM8K at temperature 0.7, with
FAI to the end of the response as in the paper's own analysis. The paper does not say what a peak is; here it is one of the
largest fifth of a response's values, and "at or after" is at most one token after: with both, chance is near what it reports.
Entropies are those at temperature 1, of the distribution that a token was drawn from. Tokens too near to the end to have any
FAI are left out. Receiver heads are the 30 % whose FAI has the largest kurtosis over the response, as in Bogdan et al. 2025,
"Thought anchors".
"""

import argparse
import contextlib
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import torch
from _common import ROOT, seconds, smollm2, table, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from antiphon.algorithms.attention_credit import top_share
from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.sections import RhythmConfig
from antiphon.core.types import FloatArray, GenerateRequest, IntArray, Message, Pack, Sampling
from antiphon.engines.config import EngineConfig
from antiphon.engines.native.factory import open_engine
from antiphon.learning.checkpointed_learner import trim_memory
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.data_samples import supervised_batch
from antiphon.learning.model.attention_stats import (
    HEAD_SHARE,
    AllLayersRead,
    AttentionStatsReader,
    middle_layers,
    waad_and_fai,
)
from antiphon.learning.model.pack_layout import PackLayout
from antiphon.learning.torch_learner import TorchLearner
from antiphon.tasks.rendering import Renderer
from antiphon.tasks.sources import reasoning_gym

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MEASURES = (
    "antiphon.learning.model.attention_stats",
    "antiphon.learning.model.attention",
    "antiphon.algorithms.attention_credit",
)

PEAKS = 0.2  # of a response's tokens, that are peaks
AFTER = 1  # tokens that an FAI peak may be behind a WAAD peak
TO_THE_END = RhythmConfig(kind="coupled", horizon_high=2**31)
Pair = tuple[IntArray, IntArray]  # prompt [P], response [R]


# --- memory --------------------------------------------------------------------------------------------------------------


def memory(lengths: list[int], eager_limit: int, threads: int) -> dict[str, float]:
    """Peak mebibytes at each length, and the exponent of the growth over the last two lengths."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        shape = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, **heads}
        LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=max(lengths))).save_pretrained(folder)
        learner = attentive(folder, threads, RhythmConfig(kind="coupled"))
        eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = np.random.default_rng(0).integers(0, 1000, max(lengths)).astype(np.int32)
    systems: dict[str, Callable[[int], object]] = {
        "reader": lambda length: learner.attention_stats([pack_of((tokens[:16], tokens[16:length]))]),
        "eager": lambda length: whole_maps(eager, tokens[:length]),
    }
    figures: dict[str, float] = {}
    for name, work in systems.items():
        fitting = [length for length in lengths if name == "reader" or length <= eager_limit]
        work(fitting[0])  # once for what is kept for good
        peaks = {length: peak_mebibytes(lambda work=work, length=length: work(length)) for length in fitting}
        figures |= {f"memory_{name}_{length}_mib": peak for length, peak in peaks.items()}
        (short, low), (long, high) = list(pairwise(peaks.items()))[-1]
        figures[f"memory_{name}_exponent"] = math.log(high / low) / math.log(long / short)
    return figures


def whole_maps(model: torch.nn.Module, tokens: IntArray) -> None:
    """What reading whole maps takes: all layers, all heads."""
    with torch.no_grad():
        model.model(torch.from_numpy(tokens)[None].long(), output_attentions=True, use_cache=False)


def peak_mebibytes(work: Callable[[], object]) -> float:
    """How far the process's resident size rises above where it was."""
    trim_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = status("VmRSS")
    work()
    return (status("VmHWM") - before) / 1024


def status(name: str) -> int:
    """A size of this process in KiB, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# --- answers -------------------------------------------------------------------------------------------------------------


def attentive(directory: Path | str, threads: int, config: RhythmConfig) -> TorchLearner:
    """A learner on the CPU that has begun."""
    learner = TorchLearner(str(directory), LearnerConfig(device="cpu", threads=threads), seed=0)
    learner.begin(AlgorithmConfig(loss="sft", rhythm=config), OptimizerConfig(), 10**6)
    return learner


def answers(directory: Path, problems: int, tokens: int, threads: int) -> tuple[list[Pair], float]:
    """Prompts and what the model says to them, and the seconds that sampling took."""
    renderer = Renderer(directory)
    questions = [row["prompt"] for row in reasoning_gym("train", "gsm_symbolic", size=problems)]
    prompts = [renderer.encode_prompt([Message("user", question)]) for question in questions]
    longest = max(map(len, prompts)) + tokens
    engine = open_engine(
        str(directory), EngineConfig(device="cpu", threads=threads, slots=16, max_length=longest), lambda update: ()
    )
    for number, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=tokens, temperature=0.7, seed=number)
        engine.add(GenerateRequest(id=str(number), tokens=prompt, sampling=sampling))
    said: list[list[int]] = [[] for _ in prompts]

    def sample() -> None:
        while engine.busy:
            for delta in engine.step():
                said[int(delta.request)] += delta.tokens.tolist()

    taken = seconds(sample)
    return [(prompt, np.array(response, np.int32)) for prompt, response in zip(prompts, said, strict=True)], taken


def pack_of(pair: Pair) -> Pack:
    """A pack of one answer."""
    ((pack,),) = supervised_batch([pair], 1).updates[0].packs
    return pack


# --- cost ----------------------------------------------------------------------------------------------------------------


def cost(learner: TorchLearner, pairs: list[Pair], sampling: float, rounds: int) -> dict[str, float]:
    """Median seconds of annotating some answers and of a training step on them; `sampling` are those of a token."""
    batch = supervised_batch(pairs, 1024)
    packs = list(batch.updates[0].packs[0])
    learner.attention_stats(packs[:1])
    annotating, updating = [], []
    for _ in range(rounds):
        annotating.append(seconds(lambda: learner.attention_stats(packs)))
        updating.append(seconds(lambda: learner.step(batch)))
    annotate, update = statistics.median(annotating), statistics.median(updating)
    sample = sampling * sum(len(response) for _, response in pairs)
    return {
        "cost_tokens": batch.tokens,
        "cost_annotate_seconds": annotate,
        "cost_update_seconds": update,
        "cost_sample_seconds": sample,
        "cost_share_of_learning": annotate / (annotate + update),
        "cost_share_of_step": annotate / (annotate + update + sample),
    }


# --- statistics ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    """What was read of one response; R counts the tokens that may have an FAI."""

    waad: FloatArray  # [R]
    fai: FloatArray  # [R] of the heads of large span
    receiver: FloatArray  # [R] FAI of the receiver heads
    entropies: FloatArray  # [R]


def read(learner: TorchLearner, pair: Pair) -> Response:
    """Both definitions of anchors from one reading, and entropies from a whole forward."""
    pack = pack_of(pair)
    layout = PackLayout.of(pack.lengths, pack.parents)
    tokens = torch.from_numpy(pack.tokens)[None].long()
    inputs = {"input_ids": tokens, "position_ids": layout.positions[None], "use_cache": False, "layout": layout}
    layers = middle_layers(learner.model.config.num_hidden_layers)
    reader = AttentionStatsReader(pack, layers, TO_THE_END, learner.device)
    with torch.no_grad():
        with contextlib.suppress(AllLayersRead):
            learner.model.base_model(**inputs, reader=reader)
        logits = learner.model(**inputs).logits[0, len(pair[0]) - 1 : -1]
    (sums,) = reader.sums()
    waad, fai = waad_and_fai(sums).T
    columns = sums.fai[:, : -TO_THE_END.horizon_low]
    receiver = columns[kurtosis(columns).topk(round(HEAD_SHARE * len(columns))).indices].mean(0)
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    return Response(*(values[: len(receiver)].numpy() for values in (waad, fai, receiver, entropies)))


def kurtosis(rows: torch.Tensor) -> torch.Tensor:
    """The fourth standardised moment of each row, [H]."""
    centred = rows - rows.mean(1, keepdim=True)
    return centred.pow(4).mean(1) / centred.square().mean(1).square()


def coupling(responses: list[Response]) -> dict[str, float]:
    """The three statistics over the tokens of all responses: at peaks, and elsewhere or by chance."""
    waad, fai, receiver = (
        [top_share(getattr(response, name), PEAKS) for response in responses] for name in ("waad", "fai", "receiver")
    )
    following = [np.any([np.pad(peaks, (lag, 0))[: len(peaks)] for lag in range(AFTER + 1)], axis=0) for peaks in waad]
    at_waad, at_fai, at_receiver, near_waad = map(np.concatenate, (waad, fai, receiver, following))
    entropies = np.concatenate([response.entropies for response in responses])
    found = {
        "responses": len(responses),
        "tokens": len(entropies),
        "entropy_elsewhere": entropies[~at_waad].mean(),
        "entropy_at_waad_peaks": entropies[at_waad].mean(),
        "shared_anchors_chance": at_receiver.mean(),
        "shared_anchors": at_receiver[at_fai].mean(),
        "fai_after_waad_chance": near_waad.mean(),
        "fai_after_waad": near_waad[at_fai].mean(),
    }
    return {name: float(value) for name, value in found.items()}


# --- the figure ----------------------------------------------------------------------------------------------------------


def draw(values: FloatArray, words: list[str], target: Path) -> None:
    """WAAD and FAI [R, 2] of one response, with what credit would choose."""
    figure, axes = plt.subplots(2, 1, figsize=(11, 4.6), dpi=120, sharex=True)
    for axis, column, name, colour in zip(axes, values.T, ("WAAD", "FAI"), ("tab:blue", "tab:orange"), strict=True):
        chosen = np.flatnonzero(top_share(column, PEAKS))
        axis.plot(column, color=colour, linewidth=1)
        axis.plot(chosen, column[chosen], "o", color=colour, markersize=3)
        axis.set(ylabel=name, xlim=(-1, len(words)))
        axis.grid(alpha=0.3)
    axes[1].set_xticks(range(len(words)), words, rotation=90, fontsize=5)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)


def plain(text: str) -> str:
    """A token as a label: no mathematics, no line breaks."""
    return text.replace("$", r"\$").replace("\n", r"\n")


# --- all of it -----------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=192, help="most of one answer")
    parser.add_argument(
        "--longest", type=int, default=8192, help="tokens whose memory is measured, and half as many, …"
    )
    parser.add_argument("--eager-limit", type=int, default=4096, help="longest whose whole maps fit")
    parser.add_argument("--rounds", type=int, default=3, help="of the cost")
    parser.add_argument("--quick", action="store_true", help="a small run, to see that it works")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "images" / "attention_rhythm.png")
    args = parser.parse_args()
    if args.quick:
        args.problems, args.tokens, args.longest, args.eager_limit, args.rounds = 4, 48, 1024, 1024, 1
    return args


def main() -> None:
    """The three parts, the figure, the result."""
    args = parse()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # resident size is the CPU's
    torch.set_num_threads(args.threads)
    lengths = [256 << i for i in range(int(math.log2(args.longest / 256)) + 1)]
    figures = memory(lengths, args.eager_limit, args.threads)
    print("memory measured", flush=True)
    directory = smollm2()
    pairs, taken = answers(directory, args.problems, args.tokens, args.threads)
    sampled = sum(len(response) for _, response in pairs)
    print(f"{sampled} tokens of {len(pairs)} answers sampled in {taken:.0f} s", flush=True)
    learner = attentive(directory, args.threads, RhythmConfig(kind="coupled"))
    readable = [pair for pair in pairs if len(pair[1]) > 2 * TO_THE_END.horizon_low]
    figures |= coupling([read(learner, pair) for pair in readable])
    prompt, response = max(readable, key=lambda pair: len(pair[1]))
    (values,) = learner.attention_stats([pack_of((prompt, response))])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    words = [plain(tokenizer.decode([token])) for token in response.tolist()]
    draw(values[len(prompt) :][:120], words[:120], args.figure)
    print("statistics read", flush=True)
    figures |= cost(learner, pairs[:6], taken / sampled, args.rounds)
    print(table(["figure", "value"], [[name, f"{value:.4g}"] for name, value in figures.items()]))
    print("written:", write_result("rhythm", figures, args.out, measures=MEASURES), "and", args.figure)


if __name__ == "__main__":
    main()

"""New weights from a learner to an engine, in processes of their own: every channel, against the machine's own copying.

    python benchmarks/weights.py [--rounds 7] [--engines 1]
    python benchmarks/weights.py --tiny    # all of it with a tiny model on any device: that it runs, and no measurement

The tensors are those of SmolLM2-135M in float32; on a GPU, those of a model of the shape of Qwen3-1.7B, from a learner in
float32 to an engine in bfloat16, both on that GPU. A transfer begins when the learner is told to publish, and ends when the
last engine has all of it in its own tensors; checked by digests at both ends. The yardstick is two copies of the same bytes
within a process, of memory that is in use already: that of the GPU if there is one. In each round all of them run, one after
the other; figures are medians over rounds, the first left out. `files` are on disk, as a file system that machines share would
be; `adapters` is a transfer of low-rank adapters of rank 16 alone, which the engine adds to the base that it reads.
`object_store` is left out where there is no Ray.
"""

import argparse
import asyncio
import importlib.util
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
from _common import QWEN3, ROOT, TINY_QWEN3, random_model, seconds, smollm2, table, write_result
from transformers import AutoModelForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.cluster.base import CLUSTERS
from antiphon.cluster.config import ClusterConfig
from antiphon.core.types import WeightsUpdate
from antiphon.core.workers import Worker
from antiphon.engines.native.weights import copy_weights
from antiphon.learning.config import LearnerConfig, LoraConfig, OptimizerConfig
from antiphon.learning.torch_learner import TorchLearner
from antiphon.weights.base import CHANNELS, TransferContext
from antiphon.weights.shared_directory import shared_directory

MEASURES = (
    "antiphon.weights",
    "antiphon.engines.native.weights",
    "antiphon.learning.host_device_copy",
)


class Copier(Worker):
    """What the machine does at best."""

    def __init__(self, size: int, device: str) -> None:
        self.one, self.other = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))

    def twice(self) -> float:
        """Seconds of two copies."""
        return seconds(lambda: self.one.copy_(self.other.copy_(self.one)))


class Engine(Worker):
    """Has a model, and takes weights for it."""

    def __init__(self, model: str, device: str) -> None:
        torch.set_num_threads(1)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)

    def load(self, channel: str, update: WeightsUpdate) -> None:
        """Copy what has come into the model."""
        seconds(lambda: copy_weights(self.model, CHANNELS.resolve(channel).receive(update)))


def model_directory(stack: ExitStack, *, tiny: bool) -> str:
    """A model of random weights where there is a GPU, else SmolLM2."""
    if not tiny and not torch.cuda.is_available():
        return str(smollm2())
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    random_model(TINY_QWEN3 if tiny else QWEN3).save_pretrained(directory)
    return directory


async def measure(rounds: int, engines: int, *, tiny: bool) -> tuple[dict[str, list[float]], int]:
    """Seconds of each way, round by round, and the bytes that go it."""
    stack = ExitStack()
    model, learner = model_directory(stack, tiny=tiny), f"{TorchLearner.__module__}:{TorchLearner.__name__}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folders = [stack.enter_context(shared_directory("benchmark", parent)) for parent in ("", "", str(ROOT))]
    kinds = ("local", "ray") if importlib.util.find_spec("ray") else ("local",)
    clusters = {kind: CLUSTERS.resolve(kind)(ClusterConfig(kind=kind), None) for kind in kinds}
    local = clusters["local"]
    plain, adapted = LearnerConfig(), LearnerConfig(lora=LoraConfig(rank=16))
    learners = {
        "adapted": local.spawn("adapted", learner, model, adapted, 0),
        **{kind: cluster.spawn("learner", learner, model, plain, 0) for kind, cluster in clusters.items()},
    }
    receivers = {
        kind: [cluster.spawn(f"engine-{n}", f"{Path(__file__).stem}:Engine", model, device) for n in range(engines)]
        for kind, cluster in clusters.items()
    }
    ways = {
        "shared_memory": ("local", "local", TransferContext(folders[0])),
        "files": ("local", "local", TransferContext(folders[2])),
        "device_memory": ("local", "local", TransferContext(folders[0], "device_memory")),
        "distributed": ("local", "local", TransferContext(folders[0], "distributed")),
        "object_store": ("ray", "ray", TransferContext(folders[0], "object_store")),
        "adapters": ("adapted", "local", TransferContext(folders[1])),
    }
    ways = {name: way for name, way in ways.items() if way[1] in clusters}
    found: dict[str, list[float]] = {name: [] for name in ("two_copies", *ways)}
    try:
        for each in learners.values():
            await each.call("begin", AlgorithmConfig(), OptimizerConfig(learning_rate=1e-4), 1)
        update = await learners["local"].call("publish", 0, ways["shared_memory"][2])
        size = update.manifest.size
        copier = local.spawn("copier", f"{Path(__file__).stem}:Copier", size, device)
        for number in range(1, rounds + 2):
            for name, (sender, cluster, exchange) in ways.items():
                began = time.perf_counter()
                update = await learners[sender].call("publish", number, exchange)
                loads = (each.call("load", exchange.channel, update) for each in receivers[cluster])
                await asyncio.gather(*loads)
                found[name].append(time.perf_counter() - began)
            found["two_copies"].append(await copier.call("twice"))
    finally:
        await asyncio.gather(*(cluster.close() for cluster in clusters.values()))
        stack.close()
    return {name: taken[1:] for name, taken in found.items()}, size


def main() -> None:
    """Measure, print, and write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--engines", type=int, default=1)
    arguments.add_argument("--tiny", action="store_true", help="a tiny model on any device; written only to --out")
    arguments.add_argument("--out", type=Path, default=None)
    args = arguments.parse_args()
    found, size = asyncio.run(measure(args.rounds, args.engines, tiny=args.tiny))
    figures: dict[str, float] = {"gigabytes": size / 1e9}
    for name, taken in found.items():
        figures[f"{name}_seconds"] = median(taken)
        if name != "adapters":
            figures[f"{name}_gigabytes_per_second"] = (2 if name == "two_copies" else 1) * size / 1e9 / median(taken)
    for name in found:
        pairs = zip(found[name], found["two_copies"], strict=True)
        figures[f"{name}_of_two_copies"] = median(way / copies for way, copies in pairs)
    rows = []
    for name in found:
        speed = figures.get(f"{name}_gigabytes_per_second")
        rows.append(
            [
                name,
                f"{figures[f'{name}_seconds']:.3f}",
                f"{speed:.2f}" if speed else "",
                f"{figures[f'{name}_of_two_copies']:.2f}",
            ]
        )
    print(table(["way", "seconds", "GB/s", "of two copies"], rows))
    command = f"python benchmarks/weights.py --rounds {args.rounds} --engines {args.engines}"
    if args.out or not args.tiny:
        print("written to", write_result("weights", figures, args.out, command=command, measures=MEASURES))


if __name__ == "__main__":
    main()

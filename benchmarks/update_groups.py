"""Weights from four ranks of a learner to an engine over links of a fixed rate: sent by all ranks, or by the first.

    python benchmarks/update_groups.py [--rounds 5] [--rate 100]
    python benchmarks/update_groups.py --tiny    # all of it with a tiny model: that it runs, and no measurement

Needs root and iproute2. Each rank and the engine is a process in a network namespace of its own, and a bridge joins these.
What leaves a rank passes through a token bucket of the kernel (`tc`) of `--rate` megabytes a second, or is not held; what
leaves the engine is not. The model is SmolLM2-135M in float32, in four shards. A transfer begins when the ranks are told to
publish, and ends when the engine has all of it in its own tensors. In each round both ways send the same version, one after the
other, and a digest of the engine's tensors after either must be the same; after a round every rank changes its shards. Figures
are medians over rounds, the first left out.

Before that, learners of ten layouts send a tiny model to one engine and to three, in float32 and in bfloat16, from one rank and
from all, through shared memory and by broadcast, whole and as differences (`_layouts.py`). `layouts` counts pairs of a learner
layout and an engine layout; `digest_mismatches` is of all of it.
"""

import argparse
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
from _common import TINY_QWEN3, random_model, smollm2, table, write_result
from _layouts import MESHES, Part, ask, compare_layouts, serve
from transformers import AutoModelForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.engines.native.weights import copy_weights
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.mesh_config import MeshConfig
from antiphon.learning.torch_learner import TorchLearner
from antiphon.weights.base import CHANNELS, TransferContext
from antiphon.weights.reshard import receive_weights

MEASURES = ("antiphon.weights", "antiphon.learning.torch_learner", "antiphon.learning.parallel.sharding")
RANKS = 4
NETWORK = "10.203.77"  # .1 to .4 are the ranks, .9 is the engine
SENDERS = ("first", "all")
CHANNEL = "distributed"
UPDATE = "update.pickle"


class Rank:
    """A rank of the learner."""

    def __init__(self, number: int, model: str, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.learner = TorchLearner(model, LearnerConfig(mesh=MeshConfig(shard=RANKS)), 0)

    def host(self) -> str:
        """Return the address at which the ranks meet."""
        return self.learner.host(f"{NETWORK}.1")

    def join(self, where: str) -> str:
        """Join the others."""
        self.learner.join(self.number, where)
        self.learner.begin(AlgorithmConfig(), OptimizerConfig(learning_rate=1e-4), 1)
        return "joined"

    def publish(self, senders: str, version: str) -> str:
        """Publish; the first rank leaves the update where the engine finds it."""
        update = self.learner.publish(
            int(version), TransferContext(self.folder, CHANNEL, f"{NETWORK}.1", senders=senders)
        )
        if self.number == 0:
            (self.folder / UPDATE).write_bytes(pickle.dumps(update))
        return "published"

    @torch.no_grad()
    def change(self) -> str:
        """Change every element of every shard."""
        for _, piece in self.learner.shards.local_parameters():
            piece.mul_(1.001)
        return "changed"


class Engine:
    """Has a model, and takes weights for it."""

    def __init__(self, model: str, folder: Path) -> None:
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def load(self) -> str:
        """Copy what comes into the model."""
        update = pickle.loads((self.folder / UPDATE).read_bytes())
        copy_weights(self.model, receive_weights(CHANNELS.resolve(CHANNEL), update))
        return "loaded"

    def digest(self) -> str:
        """Return a digest of the model's tensors."""
        found = hashlib.blake2b()
        for parameter in self.model.parameters():
            found.update(parameter.detach().numpy().tobytes())
        return found.hexdigest()


def run(*command: str) -> None:
    """Run a command of the system."""
    subprocess.run(command, check=True)


def make_network(stack: ExitStack, names: dict[str, str]) -> None:
    """Make a namespace for each name, with an address, and join them by a bridge; `stack` removes all."""
    bridge = f"groups{os.getpid() % 10_000}"
    run("ip", "link", "add", bridge, "type", "bridge")
    stack.callback(run, "ip", "link", "del", bridge)
    run("ip", "link", "set", bridge, "up")
    for number, (name, address) in enumerate(names.items()):
        end = f"{bridge}-{number}"
        run("ip", "netns", "add", name)
        stack.callback(run, "ip", "netns", "del", name)
        run("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", end, "master", bridge, "up")
        for inside in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            run("ip", "-n", name, *inside)
        run("ip", "-n", name, "link", "set", "lo", "up")


def hold(name: str, megabytes: int) -> None:
    """Hold what leaves a namespace to so many megabytes a second; 0: to nothing."""
    subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", "eth0", "root"], check=False, stderr=subprocess.DEVNULL)
    if megabytes:
        rate = ("rate", f"{8 * megabytes}mbit", "burst", "256kb", "latency", "50ms")
        run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)


def measure(model: str, rounds: int, rates: tuple[int, ...]) -> tuple[dict[tuple[int, str], list[float]], int]:
    """Return the seconds of each transfer by rate and senders, and the digests that differ."""
    ranks = [f"rank-{os.getpid()}-{number}" for number in range(RANKS)]
    engine_name = f"engine-{os.getpid()}"
    found: dict[tuple[int, str], list[float]] = {(rate, senders): [] for rate in rates for senders in SENDERS}
    mismatches = 0
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(ranks, 1)}
        make_network(stack, addresses | {engine_name: f"{NETWORK}.9"})

        def start(name: str, role: str, number: int) -> Part:
            inside = "ip", "netns", "exec", name, sys.executable, __file__
            part = Part(*inside, "--serve", role, f"{number}", model, folder)
            stack.callback(part.process.wait)
            stack.callback(part.process.kill)
            return part

        learner = [start(name, "rank", number) for number, name in enumerate(ranks)]
        engine = start(engine_name, "engine", 0)
        (where,) = ask(learner[:1], "host")
        ask(learner, "join", where)
        for version in range(1, rounds + 2):
            for rate in rates:
                for name in ranks:
                    hold(name, rate)
                digests = set()
                for senders in SENDERS:
                    began = time.perf_counter()
                    ask(learner, "publish", senders, f"{version}")
                    ask([engine], "load")
                    found[rate, senders].append(time.perf_counter() - began)
                    digests |= set(ask([engine], "digest"))
                mismatches += len(digests) - 1
                for name in ranks:
                    hold(name, 0)
            ask(learner, "change")
    return {way: times[1:] for way, times in found.items()}, mismatches


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=int, default=100, help="megabytes a second that leave a rank, at most")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        role, number, model, folder = options.serve
        torch.set_num_threads(1)
        serve(Rank(int(number), model, Path(folder)) if role == "rank" else Engine(model, Path(folder)))
        return
    layouts, wrong = compare_layouts(MESHES[1:2] if options.tiny else MESHES)
    with tempfile.TemporaryDirectory() as scratch:
        model = scratch if options.tiny else str(smollm2())
        if options.tiny:
            random_model(TINY_QWEN3).float().save_pretrained(scratch)
        found, mismatches = measure(model, options.rounds, (options.rate, 0))
    figures: dict[str, float] = {"senders": RANKS, "layouts": layouts, "digest_mismatches": mismatches + wrong}
    figures["link_megabytes"] = options.rate
    for rate, name in ((options.rate, "throttled"), (0, "unthrottled")):
        pairs = zip(found[rate, "first"], found[rate, "all"], strict=True)
        figures[f"{name}_first_seconds"] = median(found[rate, "first"])
        figures[f"{name}_all_seconds"] = median(found[rate, "all"])
        figures[f"{name}_speedup"] = median(first / every for first, every in pairs)
    figures["senders_speedup"] = figures.pop("throttled_speedup")
    print(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()]))
    if not options.tiny or options.out:
        print("written:", write_result("update_groups", figures, options.out, measures=MEASURES))


if __name__ == "__main__":
    main()

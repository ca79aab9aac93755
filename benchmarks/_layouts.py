"""Learners of many layouts send weights to engines of many layouts, each part a process, and digests are compared.

What an engine must have is computed in its own process from the model's files: the weights there, changed as often as the
learner has changed them.
"""

import hashlib
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
from _common import TINY_QWEN3, random_model
from torch import distributed
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.engines.native.weights import copy_weights
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.mesh_config import MeshConfig
from antiphon.learning.torch_learner import TorchLearner
from antiphon.weights.base import CHANNELS, TransferContext
from antiphon.weights.reshard import receive_weights

UPDATE = "update.pickle"
FACTOR = 1.0078125  # of each change: exact in float32 for a while, and seen in bfloat16
MESHES: list[tuple[str, dict[str, int]]] = [
    ("dense", {}),
    ("dense", {"shard": 2}),
    ("dense", {"shard": 4}),
    ("dense", {"replicate": 2, "shard": 2}),
    ("dense", {"tensor": 2}),
    ("dense", {"shard": 2, "tensor": 2}),
    ("dense", {"context": 2}),
    ("dense", {"pipeline": 2}),
    ("dense", {"pipeline": 2, "shard": 2}),
    ("mixture", {"shard": 4, "expert": 2}),
]
RANKS, ENGINES = 4, 3
ENGINE_LAYOUTS = [*itertools.product((1, ENGINES), ("float32", "bfloat16"), ("first", "all"))]
TRANSFERS = [("shared_memory", "whole"), ("distributed", "whole"), ("distributed", "delta")]


class Rank:
    """A rank of one learner after another."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder

    def open(self, model: str, mesh: str) -> str:
        """Be a rank of a new learner."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        self.learner = TorchLearner(model, LearnerConfig(mesh=MeshConfig(**json.loads(mesh))), 0)
        return self.learner.host("127.0.0.1") if self.number == 0 else "opened"

    def join(self, where: str) -> str:
        """Join the others, if there are some."""
        if self.learner.config.mesh.world > 1:
            self.learner.join(self.number, where)
        self.learner.begin(AlgorithmConfig(), OptimizerConfig(), 1)
        return "joined"

    def publish(self, version: str, channel: str, encoding: str, dtype: str, senders: str) -> str:
        """Publish; the first rank leaves the update where engines find it."""
        place = self.folder / f"rank-{self.number}"
        place.mkdir(exist_ok=True)
        context = TransferContext(place, channel, dtype=dtype, encoding=encoding, senders=senders)
        update = self.learner.publish(int(version), context)
        if self.number == 0:
            (self.folder / UPDATE).write_bytes(pickle.dumps(update))
        return "published"

    @torch.no_grad()
    def change(self) -> str:
        """Change every element of every piece."""
        for _, piece in self.learner.shards.local_parameters():
            piece.mul_(FACTOR)
        return "changed"


class Engine:
    """Has a model, and takes weights for it."""

    def __init__(self, number: int, folder: Path) -> None:
        self.folder = folder

    def load(self, channel: str) -> str:
        """Copy what comes into the model; return a digest of it."""
        update = pickle.loads((self.folder / UPDATE).read_bytes())
        copy_weights(self.model, receive_weights(CHANNELS.resolve(channel), update))
        return _digest(self.model)

    @torch.no_grad()
    def expect(self, model: str, dtype: str, changes: str) -> str:
        """Take the weights of a model's files, changed so many times; return their digest, and forget them."""
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for parameter in self.model.parameters():
            for _ in range(int(changes)):
                parameter.mul_(FACTOR)
        self.model = self.model.to(getattr(torch, dtype))
        digest = _digest(self.model)
        for parameter in self.model.parameters():
            parameter.zero_()
        return digest


def _digest(model: Any) -> str:
    found = hashlib.blake2b()
    for name, tensor in sorted(model.named_parameters()):
        found.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def serve(part: Any) -> None:
    """Answer each command with a method of `part`, on a line of its own."""
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(part, command)(*arguments)), flush=True)


class Part:
    """A rank or an engine, in a process that calls `serve`."""

    def __init__(self, *command: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to: IO[str] = self.process.stdin
        self._from: IO[str] = self.process.stdout

    def tell(self, *command: str) -> None:
        """Send a command."""
        print(json.dumps(command), file=self._to, flush=True)

    def hear(self) -> str:
        """Return the answer to the first command that has none."""
        if not (line := self._from.readline()):
            sys.exit(f"{self.process.args} ended")
        answer: str = json.loads(line)
        return answer


def ask(parts: list[Part], *command: str) -> list[str]:
    """Give all parts a command at once; return their answers."""
    for part in parts:
        part.tell(*command)
    return [part.hear() for part in parts]


def compare_layouts(meshes: Sequence[tuple[str, dict[str, int]]] = MESHES) -> tuple[int, int]:
    """Return the pairs of layouts that were tried, each over all transfers, and the digests that differ."""
    wrong = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        random_model(TINY_QWEN3).float().save_pretrained(folder / "dense")
        mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY_QWEN3 | mixture)).save_pretrained(folder / "mixture")
        python = sys.executable, __file__
        ranks = [Part(*python, "rank", f"{number}", str(folder)) for number in range(RANKS)]
        engines = [Part(*python, "engine", f"{number}", str(folder)) for number in range(ENGINES)]
        for part in (*ranks, *engines):
            stack.callback(part.process.kill)
        for kind, mesh in meshes:
            learner = ranks[: MeshConfig(**mesh).world]
            wrong += sum(_differences(learner, engines, str(folder / kind), json.dumps(mesh)))
            print(f"{kind} {mesh}: {wrong} digests differ", flush=True)
    return len(meshes) * len(ENGINE_LAYOUTS), wrong


def _differences(learner: list[Part], engines: list[Part], model: str, mesh: str) -> Iterator[int]:
    """Yield the number of wrong digests of each transfer of a learner's weights: of two versions each."""
    where, *_ = ask(learner, "open", model, mesh)
    ask(learner, "join", where)
    versions, changes = itertools.count(1), 0
    for (channel, encoding), (count, dtype, senders) in itertools.product(TRANSFERS, ENGINE_LAYOUTS):
        for _ in range(2):
            (expected,) = set(ask(engines[:count], "expect", model, dtype, f"{changes}"))
            ask(learner, "publish", f"{next(versions)}", channel, encoding, dtype, senders)
            yield sum(digest != expected for digest in ask(engines[:count], "load", channel))
            ask(learner, "change")
            changes += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve((Rank if sys.argv[1] == "rank" else Engine)(int(sys.argv[2]), Path(sys.argv[3])))

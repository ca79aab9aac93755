"""What the run of `kills.py` is made of: the real learner and engine, which kill whom the orders name when a phase begins.

Orders lie beside the run, as JSON: {"at": a point, "count": how often it is to be reached first, "kill": a process}. Whoever
carries them out puts the moment in their place.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core import failpoints as points
from antiphon.core.types import Prompt, TrainBatch, WeightsUpdate
from antiphon.engines.config import EngineConfig
from antiphon.engines.native.engine import NativeEngine
from antiphon.engines.native.factory import open_engine
from antiphon.learning.config import OptimizerConfig
from antiphon.learning.torch_learner import TorchLearner
from antiphon.tasks.base import Generate, Transcript
from antiphon.weights.base import TransferContext

ORDERS = Path("orders.json")  # in the folder that the run was started in
GRADER, CONTROLLER = "grader", "controller"


def build(directory: Path, seed: int) -> None:
    """A model of a few thousand parameters that reads printable characters."""
    import string

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(["<eos>", *string.printable])}
    characters = Tokenizer(models.WordLevel(vocabulary, "?"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>")
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **heads, **ends)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def problems(split: str = "") -> Iterator[dict[str, str]]:
    """Sums."""
    for number in range(1000):
        text = f"{number // 10}+{number % 10}="
        yield {"id": text, "prompt": text, "answer": str(number)}


def digits(prompt: Prompt, transcript: Transcript) -> float:
    """The share of digits in a response."""
    return sum(map(str.isdigit, transcript.response)) / 16


class Judged:
    """What `digits` says, once a model has been asked, whatever that says."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    async def __call__(self, prompt: Prompt, transcript: Transcript) -> float:
        """See `AsyncReward`."""
        await self._generate(prompt.messages)
        return digits(prompt, transcript)


class Lengths:
    """Pays for digits, for as many turns as its seed says."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """See `Environment.reset`."""
        self.turns = 1 + seed % 3
        return "go", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `Environment.step`."""
        self.turns -= 1
        return "on", sum(map(str.isdigit, action)) / 16, self.turns == 0, False, {}

    def close(self) -> None:
        """See `Environment.close`."""


class Learner(TorchLearner):
    """Says which phase begins."""

    def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """See `TorchLearner.begin`."""
        watch()
        return super().begin(algorithm, optimizer, total_updates)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """See `TorchLearner.step`."""
        points.hit("train")
        return super().step(batch)

    def publish(self, version: int, exchange: TransferContext) -> WeightsUpdate:
        """See `TorchLearner.publish`."""
        points.hit("sync")
        return super().publish(version, exchange)

    def save(self, place: Path) -> None:
        """See `TorchLearner.save`."""
        points.hit("checkpoint")
        super().save(place)


def engine(model: str, config: EngineConfig, receive: Callable[[WeightsUpdate], Iterable[tuple[str, Tensor]]]) -> Any:
    """The native engine, which says when it generates."""
    watch()
    opened: NativeEngine = open_engine(model, config, receive)
    step = opened.step

    def stepping() -> Any:
        points.hit("generate")
        return step()

    opened.step = stepping  # type: ignore[method-assign]
    return opened


def watch() -> None:
    """Carry out orders in this process."""
    points.watch(lambda point, path: _obey(point))


def _obey(point: str) -> None:
    try:
        orders = json.loads(ORDERS.read_text())
    except (OSError, json.JSONDecodeError):
        return
    if orders.get("at") != point or not (victims := victims_of(orders["kill"])):
        return
    victim = victims[orders.get("which", 0) % len(victims)]
    ORDERS.write_text(json.dumps({"killed": time.time()}))
    os.kill(victim.pid, signal.SIGKILL)


def victims_of(role: str) -> list[psutil.Process]:
    """The processes of the run in this folder that have a role: a worker's, by the log that it writes."""
    folder = str(Path.cwd())
    return sorted(
        (process for process in psutil.process_iter() if _has_role(process, role, folder)), key=lambda each: each.pid
    )


def _has_role(process: psutil.Process, role: str, folder: str) -> bool:
    try:
        command = " ".join(process.cmdline())
        if role == CONTROLLER:
            return "antiphon train" in command and process.cwd() == folder
        if role == GRADER:
            return "tasks.grading.worker" in command and process.cwd() == folder
        log = _output(process.pid)
        ours = log.is_relative_to(folder) and log.stem.partition("-")[0] == role
        return ours and log != _output(process.ppid())  # what a worker starts itself may write there, too
    except (OSError, psutil.Error):
        return False


def _output(process: int) -> Path:
    return Path(os.readlink(f"/proc/{process}/fd/1"))

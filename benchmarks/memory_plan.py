"""How well `antiphon plan` foretells the memory of a learner's rank: its estimate, and what torch's own tracker counts.

    python benchmarks/memory_plan.py [--models Llama-3.1-8B] [--layers 4]

The first rank of a learner of models from 0.5B to 235B trains on a full pack and makes a step, as in a run, but under torch's
`FakeTensorMode`: tensors have shapes, types and lifetimes, and no numbers. Ranks beside it are torch's `fake` backend. Its
`MemTracker` counts what is alive; the peak is compared with `antiphon.simulate.device_memory.learner_memory`, which does not
run the model. Without and with `learner.gradient_checkpointing`. What an allocator adds, fragments, libraries' workspaces and
the transfer of weights are no part of either.
"""

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import table, write_result
from safetensors.torch import save_file
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.types import Pack
from antiphon.learning import mesh as meshes
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.parallel.sharding import ShardedModel
from antiphon.learning.torch_learner import TorchLearner
from antiphon.run.config import RunConfig
from antiphon.simulate.device_memory import learner_memory
from antiphon.simulate.model_facts import ModelFacts
from antiphon.simulate.model_shape import Architecture

MEASURES = (
    "antiphon.simulate.device_memory",
    "antiphon.simulate.model_shape",
    "antiphon.learning.torch_learner",
    "antiphon.learning.model",
    "antiphon.learning.parallel",
)


def _dense(
    kind: str, hidden: int, inner: int, layers: int, heads: int, keys: int, words: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": words,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
    } | more


SEQUENCES, PROMPT = 4, 64  # of a pack; tokens
TIED = {"tie_word_embeddings": True}
QWEN3 = {"head_dim": 128}
EXPERTS = QWEN3 | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
# Shapes as the models' config.json has them; and ranks that shard them.
MODELS = {
    "Qwen2.5-0.5B": (_dense("qwen2", 896, 4864, 24, 14, 2, 151_936, **TIED), 1),
    "Llama-3.2-1B": (_dense("llama", 2048, 8192, 16, 32, 8, 128_256, **TIED, head_dim=64), 1),
    "Qwen2.5-1.5B": (_dense("qwen2", 1536, 8960, 28, 12, 2, 151_936, **TIED), 2),
    "Llama-3.2-3B": (_dense("llama", 3072, 8192, 28, 24, 8, 128_256, **TIED, head_dim=128), 4),
    "Qwen3-4B": (_dense("qwen3", 2560, 9728, 36, 32, 8, 151_936, **TIED, **QWEN3), 4),
    "Llama-3.1-8B": (_dense("llama", 4096, 14_336, 32, 32, 8, 128_256), 8),
    "Qwen2.5-14B": (_dense("qwen2", 5120, 13_824, 48, 40, 8, 152_064), 16),
    "Qwen2.5-32B": (_dense("qwen2", 5120, 27_648, 64, 40, 8, 152_064), 32),
    "Llama-3.1-70B": (_dense("llama", 8192, 28_672, 80, 64, 8, 128_256), 64),
    "Qwen3-30B-A3B": (
        _dense("qwen3_moe", 2048, 6144, 48, 32, 4, 151_936, **EXPERTS, moe_intermediate_size=768),
        32,
    ),
    "Qwen3-235B-A22B": (
        _dense("qwen3_moe", 4096, 12_288, 94, 64, 4, 151_936, **EXPERTS, moe_intermediate_size=1536),
        128,
    ),
}


class _FirstRank(meshes.Mesh):
    """The first rank of a mesh of which there are no others: collectives return, and what arrives is not theirs."""

    def __init__(self, config: meshes.MeshConfig) -> None:
        self.config, self.rank, self.data, self.device = config, 0, 0, torch.device("cpu")
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.world)
        sizes = [getattr(config, axis) for axis in meshes.AXES]
        self.axes = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=meshes.AXES)
        self.axes["shard", "context", "expert"]._flatten("sharded")
        self.axes["shard", "context"]._flatten("around")

    def all_gather(self, own: Any, axis: str = "") -> list[Any]:
        return [own] * (distributed.get_world_size(self.group(axis)) if axis else self.config.world)


class _Unfilled(ShardedModel):
    def fill(self, *_: Any, **__: Any) -> None:
        """There are no files to fill it from."""


class _Learner(TorchLearner):
    """A learner whose model has shapes and no numbers."""

    sharded = _Unfilled

    def _load(self) -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(self.model_path), dtype=torch.float32, attn_implementation=self.attention
            )


class _PeakTracker(MemTracker):
    """Keeps the peak alone. Torch's own keeps one of each module, which takes time that grows with the square of the layers."""

    peak = 0  # bytes

    def _update_peak_stats(self, peak_state: Any) -> None:
        self.peak = max(self.peak, *(memory["Total"] for memory in self._curr_mem_snap.values()))


def full_pack(tokens: int) -> Pack:
    """A pack of four sequences, each a prompt of 64 tokens and a completion."""
    each = np.arange(SEQUENCES, dtype=np.int32)
    loss = np.arange(tokens) % (tokens // SEQUENCES) >= PROMPT
    return Pack(
        tokens=np.ones(tokens, np.int32),
        lengths=np.full(SEQUENCES, tokens // SEQUENCES, np.int32),
        parents=np.full(SEQUENCES, -1, np.int32),
        owners=each,
        ends=each,
        loss_mask=loss,
        logprobs=np.zeros(tokens, np.float32),
        advantages=loss.astype(np.float32),
        coefficients=loss / loss.sum(),
        temperatures=np.ones(tokens, np.float32),
    )


def measure(folder: Path, config: LearnerConfig) -> int:
    """Return the bytes alive at the peak of a pack's backward pass and a step, as torch's tracker counts them."""
    learner = _Learner(str(folder), config, 0)
    if config.mesh.world > 1:
        learner.mesh = _FirstRank(config.mesh)
        learner._load_model()
    with FakeTensorMode(allow_non_fake_inputs=True):
        learner.model.to_empty(device="cpu")
        learner.model.tie_weights()
        learner.begin(AlgorithmConfig(), OptimizerConfig(), 2)
        learner._sequences = SEQUENCES
        for parameter in learner.model.parameters():  # as after an earlier pack of the step, and after an earlier step
            parameter.grad = torch.empty_like(parameter)
        learner.optimizer.step()
        tracker = _PeakTracker()
        tracker.track_external(learner.model, learner.optimizer)
        with tracker:
            learner._backward(full_pack(config.tokens_per_pack))
            learner.optimizer.step()
    if config.mesh.world > 1:
        distributed.destroy_process_group()
    return tracker.peak


def estimate(folder: Path, config: LearnerConfig) -> int:
    """Return the bytes that `antiphon plan` expects on the rank."""
    run = {
        "name": "plan",
        "steps": 1,
        "model": {"path": str(folder)},
        "tasks": [{"name": "any", "prompts": {"source": "any:prompts"}, "reward": "any:reward"}],
        "rollout": {"groups_per_step": 1, "sampling": {"max_tokens": 1}},
        "learner": config.model_dump(),
    }
    facts = ModelFacts(shape=Architecture.read(folder), prompt_tokens=(PROMPT,))
    return sum(learner_memory(facts, RunConfig.model_validate(run)).values())


def main() -> None:
    """Measure and estimate each model; print the table, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    arguments.add_argument("--layers", type=int, help="of each model, in place of all that it has")
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    warnings.simplefilter("ignore")  # of torch, about fake collectives
    rows, errors, figures = [], [], {}
    with tempfile.TemporaryDirectory() as place:
        for name in options.models:
            shape, ranks = MODELS[name]
            folder = Path(place) / name
            folder.mkdir()
            layers = options.layers or shape["num_hidden_layers"]
            (folder / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": layers}))
            save_file({}, folder / "model.safetensors")
            for checkpointing in (False, True):
                config = LearnerConfig(dtype="bfloat16", gradient_checkpointing=checkpointing, mesh={"shard": ranks})
                there, told = measure(folder, config), estimate(folder, config)
                errors.append(told / there - 1)
                key = f"{name.replace('-', '_').replace('.', '_')}_{'checkpointed' if checkpointing else 'whole'}"
                figures |= {f"{key}_gib": there / 2**30, f"{key}_error": errors[-1]}
                gib = (f"{size / 2**30:.2f}" for size in (there, told))
                rows.append([name, str(ranks), "yes" if checkpointing else "no", *gib, f"{errors[-1]:+.1%}"])
                print(*rows[-1], flush=True)
    figures |= {"models": len(options.models), "worst_relative_error": max(map(abs, errors))}
    print(table(["model", "ranks", "checkpointing", "GiB, tracked", "GiB, estimated", "off by"], rows))
    print("written:", write_result("memory_plan", figures, options.out, measures=MEASURES))


if __name__ == "__main__":
    main()

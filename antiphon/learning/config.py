"""Configuration of consuming samples. Importing it imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from antiphon.core.config import Config, parse
from antiphon.learning.backend_options import (
    DeepSpeedOptions,
    MegatronOptions,
    megatron_incompatibilities,
)
from antiphon.learning.mesh_config import MeshConfig
from antiphon.tasks.config import PromptsConfig


class OptimizerConfig(Config):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps of linear warm-up."""
    final_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """Learning rate at the end, relative to the peak."""
    max_grad_norm: float = Field(1.0, gt=0.0)


class LoraConfig(Config):
    """Low-rank adapters, which alone are trained and sent to the engines. The model without them is the reference."""

    rank: int = Field(16, gt=0)
    alpha: float = Field(32.0, gt=0.0)
    """Adapters count alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that have one, such as q_proj; empty is all."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


def megatron_problems(learner: "LearnerConfig") -> Iterator[tuple[str, str]]:
    """Yield options that the Megatron learner lacks: (key, message)."""
    mesh = learner.mesh
    asked = {
        "lora": (learner.lora is not None, "it trains all weights"),
        "cpu_offload": (learner.cpu_offload, "options.distributed_optimizer is how it keeps less on each device"),
        "mesh.replicate": (mesh.replicate > 1, "ranks of mesh.shard all have a copy of the weights"),
        "mesh.context": (mesh.context > 1 and mesh.expert > 1, "context is divided, or experts are"),
        "mesh.pipeline_chunks": (mesh.pipeline_chunks > 1, "each rank has one stage"),
    }
    for key, (there, instead) in asked.items():
        if there:
            yield key, f"is not of the megatron learner: {instead}. Kind torch has it"


OPTIONS: dict[str, type[Config]] = {
    "deepspeed": DeepSpeedOptions,
    "megatron": MegatronOptions,
}  # of kinds that have some


class LearnerConfig(Config):
    """The learner's process and how it cuts its work."""

    kind: str = "torch"
    """`torch`, `deepspeed`, `megatron`, or package.module:attribute."""
    options: dict[str, Any] = {}
    """Options of this kind of learner: `stage` of `deepspeed`, `distributed_optimizer` of `megatron`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision that layers compute in (autocast). Weights, gradients and optimiser state are in float32 whatever it is."""
    device: str = "auto"
    threads: int = Field(1, gt=0)
    """CPU threads of the learner process."""
    tokens_per_pack: int = Field(4096, gt=0)
    """Token budget of one micro-batch. Changing it changes memory and speed, never the gradient."""
    share_prefixes: bool = True
    """Compute what samples begin with alike, a prompt or an agent's history, once for all of them in a pack. It changes speed
    and memory, never the gradient."""
    logits_chunk: int = Field(1024, gt=0)
    """Tokens whose logits exist at once."""
    gradient_checkpointing: bool = False
    mesh: MeshConfig = MeshConfig()
    cpu_offload: bool = False
    """Keep parameters and optimiser state in the machine's memory between their uses: with a mesh that shards. Of `meshes` it
    is for those that do."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights."""
    minibatches: int = Field(1, gt=0)
    """Optimiser steps that one pass over a training step's groups is cut into."""
    epochs: int = Field(1, gt=0)
    """Passes over a training step's groups."""
    stages: tuple[str, ...] = (
        "annotate",
        "rewards",
        "advantages",
        "update_critics",
        "update_actor",
    )
    """The stages of a step, in order: built-in names or package.module:function."""
    stage_options: dict[str, dict[str, Any]] = {}
    """Keyword-only arguments of stages of your own, by their names in `stages`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    on_nonfinite: Literal["skip", "fail"] = "skip"
    """Reaction to an update whose gradient is not finite. It is never made; with `skip` the run goes on without it, unless 10
    updates in a row are skipped, and with `fail` it ends.
    """
    timeout: float = Field(14400.0, gt=0.0)
    """Seconds that a stage of a training step, or a step of supervised fine-tuning, may take; then the run ends. With
    `rollout.workers` all stages of a step together."""

    @property
    def special(self) -> Config:
        """The parsed `options` of this kind of learner; a user's own kind takes any."""
        return parse(OPTIONS.get(self.kind, Config), {} if ":" in self.kind else self.options)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        _ = self.special
        return self

    @property
    def copies(self) -> tuple[int, int]:
        """Copies of the weights, and of the gradients, on all ranks together."""
        if self.kind != "deepspeed":
            return self.mesh.replicate, self.mesh.replicate
        stage = self.options.get("stage", 2)
        own = 0 if self.lora else 1  # of DeepSpeed's optimiser
        return own + (1 if stage == 3 else self.mesh.shard), self.mesh.shard if stage == 1 else 1

    @property
    def updates(self) -> int:
        """Optimiser steps of a training step."""
        return self.minibatches * self.epochs

    def with_mesh(self, mesh: MeshConfig) -> "LearnerConfig":
        """Return the settings on another mesh; a mesh that shards nothing offloads nothing."""
        sharded = mesh.data * mesh.context > 1
        return self.model_copy(update={"mesh": mesh, "cpu_offload": self.cpu_offload and sharded})

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield options that cannot be combined with the mesh: (key, message)."""
        mesh = self.mesh
        if mesh.shard % mesh.expert:
            yield "mesh.expert", f"{mesh.expert} is no divisor of the {mesh.shard} ranks of mesh.shard"
        if mesh.context_attention != "heads" and mesh.context == 1:
            yield "mesh.context_attention", f"{mesh.context_attention!r} is of several ranks, and mesh.context is 1"
        if mesh.pipeline_chunks > 1 and mesh.pipeline == 1:
            yield "mesh.pipeline_chunks", f"{mesh.pipeline_chunks} is of several ranks, and mesh.pipeline is 1"
        if self.cpu_offload and mesh.data * mesh.context == 1:
            yield "cpu_offload", "is of what is sharded, and mesh.shard is 1"
        if self.kind == "deepspeed":
            yield from mesh.unused_beside_shard("deepspeed")
        if self.kind == "megatron":
            yield from megatron_problems(self)

    def incompatibilities(self, shape: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield what this learner cannot train in a model, from its config.json: (key, message)."""
        yield from ((f"mesh.{key}", message) for key, message in self.mesh.incompatibilities(shape))
        if self.kind == "megatron":
            yield from megatron_incompatibilities(shape, self.mesh)


class CriticConfig(Config):
    """Critics: models that learn the value of a state.

    Each runs in a process of its own that is set up as the learner's is, but on torch whatever `learner.kind` is.
    """

    path: str = ""
    """Model that critics begin with: a directory or Hugging Face id; empty is the model that is trained."""
    count: int = Field(1, gt=0)
    disjoint: bool = False
    """Each learns from a share of every group's trajectories that no other sees."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    warmup_steps: int = Field(0, ge=0)
    """Training steps in which they alone learn."""
    value_clip: float = Field(0.0, ge=0.0)
    """Bound of the change of a value from before the step, beyond which it gains nothing; 0 is none."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Lambda of their regression targets: 1 is the return, below it their own later values come in."""


class TeacherConfig(Config):
    """A model whose log-probs of what the policy says are learned from, in a process of its own."""

    path: str
    """A directory or Hugging Face id; its tokenizer must be that of the model that is trained."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks it teaches; empty is all. Of several teachers of a task, the mean of their log-probs counts."""


class CheckpointConfig(Config):
    """When a run can be gone on from."""

    every: int = Field(10, ge=0)
    """Steps between checkpoints, the first before any step and the last after all; 0 saves at the end only, and a run that is
    killed before cannot be gone on with."""
    keep_last: int = Field(2, gt=0)
    """While one is written, there is one more. Each has 12 bytes a weight that is trained, with what AdamW keeps of it."""
    keep_every: int = Field(0, ge=0)
    """Keep those whose step this divides, too; 0 keeps no others."""
    timeout: float = Field(3600.0, gt=0.0)
    """Seconds that a checkpoint may keep the learner, that the rest of it may take to be written, and that one may take to be
    read; then the run ends."""
    restarts: int = Field(1, ge=0)
    """Most restarts in a row, without a new checkpoint in between, of a run that lost its learner."""


class SftConfig(Config):
    """Supervised fine-tuning: the verb `sft`, or a warm start before `train`."""

    steps: int = Field(gt=0)
    """Most optimiser steps."""
    batch_size: int = Field(32, gt=0)
    """Examples of one optimiser step."""
    response: str = "response"
    """Key of the target text in a prompt's payload."""
    prompts: PromptsConfig | None = None
    """Examples to be tuned on, instead of the prompts of the tasks: what tasks in environments need."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    stop_accuracy: float = Field(0.0, ge=0.0, le=1.0)
    """Stop when the validation accuracy, sampled at temperature 1, reaches this; 0 runs all steps."""
    evaluate_every: int = Field(10, gt=0)
    """Optimiser steps between validations, when `stop_accuracy` is set."""

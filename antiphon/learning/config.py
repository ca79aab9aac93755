"""Configuration of training: learner, critics, teachers, checkpoints, supervised fine-tuning. Importing it imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from antiphon.core.config import Config, options_by_kind, parse, unit
from antiphon.learning.backend_options import (
    DeepSpeedOptions,
    MegatronOptions,
    megatron_incompatibilities,
)
from antiphon.learning.mesh_config import MeshConfig
from antiphon.tasks.config import PromptsConfig


class OptimizerConfig(Config):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, unit("per optimizer step")] = Field(1e-6, gt=0.0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's means of gradients and of squared gradients."""
    eps: Annotated[float, unit("gradient")] = Field(1e-8, gt=0.0)
    """Added to the denominator of AdamW."""
    weight_decay: Annotated[float, unit("factor")] = Field(0.0, ge=0.0)
    """Decoupled weight decay of AdamW; the rate of decay is this times the learning rate."""
    moments: Literal["float32", "8bit"] = "float32"
    """Precision of AdamW's two moments: `8bit` takes one byte for each, quantised in blocks of 256, and needs bitsandbytes and
    the torch learner. Checkpoints have them in float32."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: `constant`, or falling linearly or along a cosine to `final_ratio` of the peak."""
    warmup_steps: Annotated[int, unit("optimizer steps")] = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    final_ratio: Annotated[float, unit("share")] = Field(0.0, ge=0.0, le=1.0)
    """Learning rate at the end of the schedule, relative to the peak."""
    max_grad_norm: Annotated[float, unit("gradient norm")] = Field(1.0, gt=0.0, allow_inf_nan=True)
    """Gradients of a larger norm are scaled down to this norm; `.inf` scales none."""

    def incompatibilities(self, kind: str) -> Iterator[tuple[str, str]]:
        """Yield what a kind of learner does not support: (key, message)."""
        if kind in OPTIONS and self.moments != "float32":
            yield "moments", f"{self.moments!r} is not supported by the {kind} learner. Use kind: torch"

    @property
    def moment_bytes(self) -> float:
        """Bytes that one moment takes per trained parameter: with `8bit` one, and a float32 scale for each block of 256."""
        return 1 + 4 / 256 if self.moments == "8bit" else 4


class LoraConfig(Config):
    """Low-rank adapters. They are trained and sent to the engines; the model without them is the reference."""

    rank: Annotated[int, unit("dimensions")] = Field(16, gt=0)
    """Rank of the adapters."""
    alpha: Annotated[float, unit("factor")] = Field(32.0, gt=0.0)
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter, such as q_proj; empty means all."""
    dropout: Annotated[float, unit("share")] = Field(0.0, ge=0.0, lt=1.0)
    """Share of the numbers of each adapter's input that an update sets to 0. Engines sample without it, and log-probs that are
    recorded are computed without it."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole beside the adapters and sent with them, such as embed_tokens, lm_head or norm.
    The reference has them as they were. Critics train adapters and their own heads alone."""
    quantize: Literal["none", "nf4"] = "none"
    """`nf4` holds the frozen weights of the linear layers in four bits (QLoRA), and needs bitsandbytes. A run begins
    with a copy of the model that is rounded so, and engines and checkpoints have it, too."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank

    def saves(self, parameter: str) -> bool:
        """Return True if a parameter of this name is in one of `modules_to_save`, which may be the ends of modules' names."""
        return any(f".{module}." in f".{parameter}" for module in self.modules_to_save)


def megatron_problems(learner: "LearnerConfig") -> Iterator[tuple[str, str]]:
    """Yield options that the Megatron learner does not support: (key, message)."""
    mesh = learner.mesh
    unsupported = {
        "freeze": (bool(learner.freeze), "it trains all weights, or adapters"),
        "lora.modules_to_save": (
            bool(learner.lora and learner.lora.modules_to_save),
            "it trains all weights, or adapters",
        ),
        "activation_offload": (learner.activation_offload, "its layers keep what they need on their device"),
        "cpu_offload": (learner.cpu_offload, "options.distributed_optimizer saves device memory instead"),
        "mesh.replicate": (mesh.replicate > 1, "each rank of mesh.shard has a copy of the weights"),
        "mesh.shard": (
            mesh.context > 1 and mesh.shard > mesh.expert > 1,
            "with mesh.context and mesh.expert, it must be as large as mesh.expert",
        ),
    }
    for key, (is_set, reason) in unsupported.items():
        if is_set:
            yield key, f"is not supported by the megatron learner: {reason}. Use kind: torch"


# Options of the learner kinds that have some.
OPTIONS: dict[str, type[Config]] = {"deepspeed": DeepSpeedOptions, "megatron": MegatronOptions}


class LearnerConfig(Config):
    """The learner: its kind, memory, mesh, and the stages and updates of a training step."""

    kind: str = "torch"
    """`torch`, `deepspeed`, `megatron`, or package.module:attribute."""
    options: Annotated[dict[str, Any], options_by_kind(OPTIONS)] = {}
    """Options of this kind of learner: `stage` of `deepspeed`, `distributed_optimizer` of `megatron`."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision of the layers' computation (autocast). Weights, gradients and optimizer state are always in float32. `auto`
    takes the faster one on the learner's device, which is measured when a run starts."""
    device: str = "auto"
    """`auto`, or a device of torch such as cpu or cuda:0."""
    threads: Annotated[int, unit("threads")] = Field(1, gt=0)
    """CPU threads of the learner process."""
    tokens_per_pack: Annotated[int, unit("tokens")] = Field(4096, gt=0)
    """Token budget of one micro-batch. It affects memory and speed, not the gradient. If it is not set, a run on CPUs uses
    1,024, or fewer where activations would take more than an eighth of the machine's memory."""
    share_prefixes: bool = True
    """Compute a common prefix, such as a prompt or an agent's history, once for all samples of a pack that begin with it.
    It affects speed and memory, not the gradient."""
    logits_chunk: Annotated[int, unit("tokens")] = Field(1024, gt=0)
    """Number of tokens whose logits are in memory at once. If it is not set, a run on CPUs uses 512, or fewer where they would
    take more than a 64th of the machine's memory."""
    gradient_checkpointing: bool = False
    """Recompute the layers in the backward pass, to save memory."""
    activation_offload: bool = False
    """Keep what `gradient_checkpointing` keeps, the hidden states between layers, in host memory until the backward pass."""
    mesh: MeshConfig = MeshConfig()
    """Ranks of the learner."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory: each layer is copied to the device when it computes, and
    AdamW runs on the CPU."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: patterns of their names in the model, such as `model.embed_tokens.*` or
    `*.mlp.gate.weight`. With `lora` they get no adapters. Critics train all of theirs."""
    minibatches: Annotated[int, unit("optimizer steps")] = Field(1, gt=0)
    """Number of optimizer steps in one pass over the groups of a training step."""
    epochs: Annotated[int, unit("passes")] = Field(1, gt=0)
    """Passes over the groups of a training step."""
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
    """The optimizer and its schedule."""
    on_nonfinite: Literal["skip", "fail"] = "skip"
    """Reaction to an update whose gradient is not finite. The update is never applied. `skip` continues without it, and
    ends the run after 10 such updates in a row; `fail` ends the run."""
    timeout: Annotated[float, unit("seconds")] = Field(14400.0, gt=0.0)
    """Time limit in seconds of a stage of a training step (with `rollout.workers`, of all stages together) and of a step of
    supervised fine-tuning; when it passes, the run ends."""

    @property
    def special(self) -> Config:
        """The parsed `options` of this kind of learner; options of a user's own kind are not checked."""
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
        stage = DeepSpeedOptions.model_validate(self.options).stage
        own = 0 if self.lora else 1  # of DeepSpeed's optimiser
        return own + (1 if stage == 3 else self.mesh.shard), self.mesh.shard if stage == 1 else 1

    @property
    def updates(self) -> int:
        """Optimizer steps of a training step."""
        return self.minibatches * self.epochs

    @property
    def uses_fsdp(self) -> bool:
        """True if the torch learner cuts its layers with FSDP, which also offloads them."""
        return self.mesh.data * self.mesh.context > 1 or self.cpu_offload

    @property
    def forms_group(self) -> bool:
        """True if its ranks meet in a process group: if there are several, and for FSDP on one."""
        return self.mesh.world > 1 or self.uses_fsdp

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield options that cannot be combined with the mesh: (key, message)."""
        mesh = self.mesh
        if mesh.shard % mesh.expert:
            yield "mesh.expert", f"{mesh.expert} must divide mesh.shard = {mesh.shard}"
        if mesh.context_attention != "heads" and mesh.context == 1:
            yield "mesh.context_attention", f"{mesh.context_attention!r} needs mesh.context above 1"
        if mesh.pipeline_chunks > 1 and mesh.pipeline == 1:
            yield "mesh.pipeline_chunks", f"{mesh.pipeline_chunks} needs mesh.pipeline above 1"
        if self.activation_offload and not self.gradient_checkpointing:
            yield "activation_offload", "needs gradient_checkpointing: true"
        if self.freeze and mesh.pipeline > 1:
            yield (
                "freeze",
                "cannot be combined with mesh.pipeline: a stage without trained parameters has no backward pass",
            )
        yield from ((f"optimizer.{key}", message) for key, message in self.optimizer.incompatibilities(self.kind))
        if self.lora and self.lora.quantize != "none" and (self.forms_group or self.kind != "torch"):
            yield "lora.quantize", "needs the torch learner on one rank, without cpu_offload"
        if self.kind == "deepspeed":
            yield from mesh.unused_beside_shard("deepspeed")
        if self.kind == "megatron":
            yield from megatron_problems(self)

    def debug_problems(self) -> Iterator[tuple[str, str]]:
        """Yield the reason why it needs a process of its own, which `cluster.debug` does not give it: (key, message)."""
        if self.mesh.world > 1:
            yield "cluster.debug", f"cannot be combined with learner.mesh: its {self.mesh.world} ranks are processes"
        elif self.cpu_offload:
            yield "cluster.debug", "cannot be combined with learner.cpu_offload, which needs a process of its own"
        elif self.kind == "megatron":
            yield "cluster.debug", "cannot be combined with learner.kind: megatron, which needs a process of its own"

    def incompatibilities(self, shape: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the reasons why this learner cannot train a model, from its config.json: (key, message)."""
        yield from ((f"mesh.{key}", message) for key, message in self.mesh.incompatibilities(shape))
        if self.kind in OPTIONS and "vision_config" in shape:
            yield "kind", f"{self.kind!r} trains no vision-language models. Use kind: torch"
        if self.kind == "megatron":
            yield from megatron_incompatibilities(shape, self.mesh)


class CriticConfig(Config):
    """Critics: models that learn the value of a state.

    Each runs in a process of its own with the settings of `learner`.
    """

    kind: Literal["auto", "torch"] = "auto"
    """`torch`, or `auto`: that of the learner, and `torch` where the learner is of your own, or cannot divide a model as the
    critics' mesh says. Name `torch` for a critic of an architecture that Megatron-Core lacks."""
    path: str = ""
    """Initial model of the critics: a directory or Hugging Face id; empty means the policy's initial model."""
    count: Annotated[int, unit("models")] = Field(1, gt=0)
    """Number of critics."""
    disjoint: bool = False
    """Train each critic on a share of every group's trajectories that no other critic is trained on."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    """The critics' optimizer and its schedule."""
    warmup_steps: Annotated[int, unit("training steps")] = Field(0, ge=0)
    """Training steps at the beginning in which only the critics are trained."""
    value_clip: Annotated[float, unit("value")] = Field(0.0, ge=0.0)
    """Clip the change of a value since before the step in the value loss, as PPO does; 0 does not clip."""
    gae_lambda: Annotated[float, unit("factor")] = Field(1.0, ge=0.0, le=1.0)
    """Lambda of the regression targets: 1 uses the return; less uses the critics' values of later tokens too."""


class TeacherConfig(Config):
    """A teacher: a model, in a process of its own, whose log-probs of the policy's tokens are learned from."""

    path: str
    """A directory or Hugging Face id. Its tokenizer must be the policy's."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks that it teaches; empty means all. For a task with several teachers, their advantages are averaged."""
    weight: Annotated[float, unit("factor")] = Field(1.0, ge=0.0)
    """Factor of the advantages that it gives, beside `algorithm.teacher_coefficient`."""


class CheckpointConfig(Config):
    """Checkpoints, from which a run can be resumed."""

    every: Annotated[int, unit("training steps")] = Field(10, ge=0)
    """Steps between checkpoints; the first is written before any step, the last after all steps. With 0 only the last is
    written, and a run that is killed before cannot be resumed."""
    keep_last: Annotated[int, unit("checkpoints")] = Field(2, gt=0)
    """Number of the newest checkpoints to keep; one more exists while it is written. A checkpoint takes 12 bytes per
    trained weight, the state of AdamW included."""
    keep_every: Annotated[int, unit("training steps")] = Field(0, ge=0)
    """Also keep checkpoints whose step is a multiple of this; 0 keeps no others."""
    timeout: Annotated[float, unit("seconds")] = Field(3600.0, gt=0.0)
    """Time limit in seconds, each, of the learner's part of a checkpoint, of writing the rest, and of reading one; when it
    passes, the run ends."""
    upload: str = ""
    """A shell command that is run for each complete checkpoint, with all rights of the run's user, to copy it elsewhere. The
    environment variable ANTIPHON_CHECKPOINT is its directory, ANTIPHON_RUN the run's name. Training goes on meanwhile; the next
    checkpoint waits for it, for `timeout` at most. If it fails, the run reports that and goes on."""
    restarts: Annotated[int, unit("resumes")] = Field(1, ge=0)
    """How many times in a row a run that lost its learner is resumed from the same checkpoint."""


class SftConfig(Config):
    """Supervised fine-tuning: the command `sft`, or a warm start before `train`."""

    steps: Annotated[int, unit("optimizer steps")] = Field(gt=0)
    """Maximum number of optimizer steps."""
    batch_size: Annotated[int, unit("examples")] = Field(32, gt=0)
    """Examples per optimizer step."""
    response: str = "response"
    """Key of the target text in a prompt's payload."""
    prompts: PromptsConfig | None = None
    """Source of the examples, if it is not the prompts of the tasks; tasks with environments need one."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    """The optimizer and its schedule."""
    stop_accuracy: Annotated[float, unit("share")] = Field(0.0, ge=0.0, le=1.0)
    """Stop when the validation accuracy, sampled at temperature 1, reaches this; 0 runs all steps."""
    evaluate_every: Annotated[int, unit("optimizer steps")] = Field(10, gt=0)
    """Optimizer steps between validations, if `stop_accuracy` is set."""

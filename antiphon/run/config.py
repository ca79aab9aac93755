"""The root configuration of a run, composed of the packages' own; importing it imports no torch.

`RunConfig` refuses combinations that cannot work (`run.config_checks`).
"""

from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.cluster.config import ClusterConfig, PlacementConfig
from antiphon.core.config import Config, unit
from antiphon.core.errors import ValidatorError
from antiphon.core.types import REFERENCE_LOGPROBS
from antiphon.engines.config import EngineConfig
from antiphon.learning.config import OPTIONS, CheckpointConfig, CriticConfig, LearnerConfig, SftConfig, TeacherConfig
from antiphon.learning.mesh_config import MeshesConfig
from antiphon.record.config import RunRecordConfig
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.evaluation import TaskPlan
from antiphon.run.config_checks import find_problems
from antiphon.tasks.config import CheckConfig, GradingConfig, TaskConfig
from antiphon.tasks.rewards.judge_options import iterate_remote_judges
from antiphon.tasks.rewards.reward_model import ClassifierOptions, iterate_classifiers
from antiphon.weights.config import WeightSyncConfig


class ModelConfig(Config):
    """The model that is trained."""

    path: str
    """A directory, a Hugging Face id, or modelscope:OWNER/NAME; or package.module:function, called with (directory, seed) to
    write one there."""
    chat_template: str = ""
    """A file with a chat template in Jinja, which replaces the model's in the run and in its checkpoints. Empty: the model's
    own."""


class EvaluationConfig(Config):
    """Accuracy on the tasks' `test` prompts, before and after training and on the way.

    Accuracy is the share of successes: completions with a score of at least 1, or as `tasks[].evaluation` says. That of the run
    is averaged over the test prompts of tasks that are trained on (weight above 0), if these have any.
    """

    every: Annotated[int, unit("training steps")] = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates before and after only."""
    blocking: bool = False
    """Training waits for each evaluation, so that every evaluation measures a single version. Otherwise evaluations run beside
    training, and only those before and after training measure a single version. With `rollout.deterministic`, training always
    waits."""
    concurrency: Annotated[int, unit("attempts")] = Field(0, ge=0)
    """Number of attempts of an evaluation that run at once beside training. Their requests precede those of waiting rollouts. 0
    is a quarter of all slots of the engines."""
    samples: Annotated[int, unit("completions")] = Field(1, gt=0)
    """Completions a prompt, where a task has no number of its own."""
    temperature: Annotated[float, unit("factor")] | None = Field(None, ge=0.0)
    """0 is greedy. null, the default, is 0 for one completion a prompt and 1 for several, which would be equal at 0."""
    limit: Annotated[int, unit("prompts")] = Field(0, ge=0)
    """Number of test prompts to use, from the first of all tasks together; 0 uses all."""
    minimum_accuracy: Annotated[float, unit("share")] = Field(0.0, ge=0.0, le=1.0)
    """The run fails when the final accuracy is below this."""

    def resolve_temperature(self, samples: int) -> float:
        """Return the temperature at which `samples` completions a prompt are drawn."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if samples == 1 else 1.0


class ProfileConfig(Config):
    """Profiles of training steps: of models, engines and reward models by torch's profiler, of other graders by Python's."""

    steps: tuple[Annotated[int, unit("training step"), Field(gt=0)], ...] = ()
    """Numbers of the training steps to profile. For each, `profile/step_000003/` in the run's directory gets a Chrome trace of
    each rank of each model and of each engine, and a table of the functions that each grading process called."""
    memory: bool = False
    """Also write a snapshot of each GPU's memory with all allocations and releases of the step. The learner must use CUDA."""


RoleName = Annotated[str, StringConstraints(pattern="^[a-z][a-z0-9_]*$")]


class RoleConfig(Config):
    """A role of your own."""

    factory: str
    """package.module:attribute of a class, or of a function that returns an object; called with `options` in each worker."""
    options: dict[str, Any] = {}
    """Passed to the factory."""
    workers: Annotated[int, unit("processes")] = Field(1, gt=0)
    """Workers, each with an object of its own. A role with state has one."""
    placement: str = ""
    """Devices of the workers, as those of other roles (`placement`); they take no turns with roles that train or generate."""
    timeout: Annotated[float, unit("seconds")] = Field(600.0, gt=0.0)
    """Seconds that one call, or the start of a worker, may take."""


class RunConfig(Config):
    """A run: `antiphon train` reads it, and `antiphon sft` where `sft` is set."""

    name: str
    """Name of the run, and of its directory in `record.directory`."""
    seed: Annotated[int, unit("seed")] = Field(0, ge=0)
    """Seed of the prompts' order, of sampling and of newly made models. With the same seed, `rollout.deterministic` repeats a
    run."""
    steps: Annotated[int, unit("training steps")] = Field(gt=0)
    """Training steps: published updates."""
    model: ModelConfig
    """The model that is trained."""
    tasks: tuple[TaskConfig, ...] = Field(min_length=1)
    """The tasks of the mixture: their prompts, environments and rewards."""
    rollout: RolloutConfig
    """How samples are generated: sizes, freshness, limits and sampling."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Rewards, advantages and loss; `algorithm: dapo` names a recipe."""
    learner: LearnerConfig = LearnerConfig()
    """The learner: memory, mesh, optimizer, and the stages of a training step."""
    critic: CriticConfig | None = None
    """Value models, for algorithms that need values."""
    teachers: tuple[TeacherConfig, ...] = ()
    """Models whose log-probs of the policy's tokens are learned from, see `algorithm.teacher_coefficient`."""
    meshes: MeshesConfig = MeshesConfig()
    """Meshes of reference, critics and teachers that differ from the learner's."""
    engine: EngineConfig = EngineConfig()
    """The engines that generate."""
    grading: GradingConfig = GradingConfig()
    """Worker processes of the rewards."""
    check: CheckConfig = CheckConfig()
    """Checks of the rewards before the run starts."""
    cluster: ClusterConfig = ClusterConfig()
    """Cluster that the workers run on."""
    placement: PlacementConfig = PlacementConfig()
    """Devices of each role."""
    weights: WeightSyncConfig = WeightSyncConfig()
    """Transfer of weights from the learner to the engines."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Accuracy on the test prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints, from which the run can be resumed."""
    record: RunRecordConfig = RunRecordConfig()
    """What the run writes, and where."""
    profile: ProfileConfig = ProfileConfig()
    """Profiles of training steps, for work on the speed and memory of the learner."""
    roles: dict[RoleName, RoleConfig] = {}
    """Roles of your own: objects in workers, whose methods your stages call."""
    sft: SftConfig | None = None
    """Supervised warm start before the reinforcement learning."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        problems = list(find_problems(self))
        if problems:
            raise ValidatorError(problems)
        return self

    @property
    def only_evaluated(self) -> frozenset[str]:
        """Names of the tasks that are not trained on."""
        return frozenset(task.name for task in self.tasks if not task.weight)

    def plan_evaluation(self, samples: int | None = None, temperature: float | None = None) -> dict[str, TaskPlan]:
        """Return how each task is evaluated; arguments that are not None hold for all tasks.

        There is no beam search for several samples, or at a temperature.
        """
        settings, plans = self.evaluation, dict[str, TaskPlan]()
        for task in self.tasks:
            own = task.evaluation
            count = samples or own.samples or settings.samples
            base = task.sampling.apply(self.rollout.sampling.sampling())
            drawn = own.sampling.apply(replace(base, temperature=settings.resolve_temperature(count)))
            drawn = drawn if temperature is None else replace(drawn, temperature=temperature)
            plans[task.name] = TaskPlan(
                samples=count,
                sampling=replace(drawn, num_beams=1) if count > 1 or drawn.temperature > 0 else drawn,
                success_at=own.success_at,
                success_part=own.success_part,
            )
        return plans

    @property
    def weights_dtype(self) -> str:
        """Torch's name of the half precision in which weights travel to engines; empty: as the learner holds them."""
        kinds = {(engine.kind, engine.dtype) for engine in self.engine.engine_kinds}
        halves = {("native", "bfloat16"), ("native", "float16")}
        return kinds.pop()[1] if self.weights.dtype == "engine" and len(kinds) == 1 and kinds <= halves else ""

    @property
    def weight_senders(self) -> str:
        """`first` or `all`: the ranks of the learner that send weights, see `weights.senders`."""
        if self.weights.senders != "auto":
            return self.weights.senders
        pieces = self.weights.channel == "distributed" and self.learner.kind == "torch" and self.learner.lora is None
        return "all" if pieces else "first"

    @property
    def classifiers(self) -> list[ClassifierOptions]:
        """The reward models that tasks ask, each once."""
        found = (model for task in self.tasks for model in iterate_classifiers(task.reward, task.reward_options))
        return list(dict.fromkeys(found))

    @property
    def remote_judges(self) -> list[dict[str, Any]]:
        """The options of the judges behind an address that tasks ask."""
        return [each for task in self.tasks for each in iterate_remote_judges(task.reward, task.reward_options)]

    @property
    def placements(self) -> dict[str, str]:
        """The devices of each role that has a placement, your own roles as `roles.NAME`."""
        own = {f"roles.{name}": role.placement for name, role in self.roles.items() if role.placement}
        return self.placement.roles | own

    @property
    def evaluation_attempts(self) -> int:
        """Number of attempts of an evaluation that run at once beside training."""
        slots = sum(engine.slots for engine in self.engine.engine_kinds)
        if self.rollout.placement == "pinned":  # an attempt holds the slots of a group
            slots //= self.rollout.group_size + self.rollout.redundancy
        return self.evaluation.concurrency or max(slots // 4, 1)

    @property
    def judged_together(self) -> frozenset[str]:
        """Names of the tasks whose siblings are scored together."""
        return frozenset(task.name for task in self.tasks if task.group_reward or (task.agent and task.agent.atropos))

    @property
    def models(self) -> tuple[str, ...]:
        """Paths of all models that are loaded."""
        critic = (self.critic.path,) if self.critic and self.critic.path else ()
        return (self.model.path, *critic, *(teacher.path for teacher in self.teachers))

    @property
    def counts(self) -> dict[str, int]:
        """Number of models of each role; each model has the ranks of its mesh.

        The reference of adapters is the learner's own model, and counts 0.
        """
        reference = REFERENCE_LOGPROBS in self.algorithm.required_streams and self.learner.lora is None
        critics = self.critic.count if self.critic else 0
        return {"learner": 1, "reference": int(reference), "critic": critics, "teacher": len(self.teachers)}

    def learner_of(self, role: str) -> LearnerConfig:
        """Return the learner settings of a role: the learner's own on the role's mesh.

        Critics use torch where that is named, or the learner's kind is the user's own or cannot divide a model as their mesh
        says.
        """
        settings, own = self.learner, self.meshes.roles.get(role)
        settings = settings.model_copy(update={"mesh": own}) if own else settings
        torch_named = self.critic is not None and self.critic.kind == "torch"
        if role == "critic" and (torch_named or settings.kind not in OPTIONS or any(settings.problems())):
            settings = settings.model_copy(update={"kind": "torch", "options": {}})
        if role == "teacher":  # is not trained
            settings = settings.model_copy(update={"lora": None})
        if role != "learner":
            added = settings.lora and settings.lora.model_copy(update={"modules_to_save": ()})
            settings = settings.model_copy(update={"freeze": (), "lora": added})
        return settings

    def mesh_of(self, role: str) -> str:
        """Return the dotted key of a role's mesh."""
        return f"meshes.{role}" if role in self.meshes.roles else "learner.mesh"

    def derived(self) -> dict[str, int]:
        """Return the numbers that follow from the configuration, such as the samples of a step."""
        rollout = self.rollout
        samples = rollout.groups_per_step * rollout.group_size
        own = (task.sampling.max_tokens or rollout.sampling.max_tokens for task in self.tasks if not task.route)
        longest = rollout.max_turns * max(own, default=0)
        updates = self.learner.updates
        ranks = {"learner ranks": self.learner.mesh.world} if self.learner.mesh.world > 1 else {}
        ranks |= {f"{role} ranks": self.counts[role] * mesh.world for role, mesh in self.meshes.roles.items()}
        return ranks | {
            "groups alive": rollout.capacity,
            "attempts alive": rollout.capacity * (rollout.group_size + rollout.redundancy),
            "sequences decoded at once": sum(engine.slots for engine in self.engine.engine_kinds),
            "most versions between start and use": rollout.max_age,
            "samples a step": samples,
            "most sampled tokens a step": samples * longest,
            "optimiser steps a step": updates,
            "optimiser steps in total": updates * self.steps,
        }

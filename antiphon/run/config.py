"""The root configuration, composed of each room's own. Importing it imports no torch.

`RunConfig` refuses combinations that cannot work; `derived` and `memory_estimate` say what a configuration amounts to.
"""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from antiphon.algorithms.config import AlgorithmConfig, LossWeightConfig, RewardConfig
from antiphon.algorithms.registry import ADVANTAGES, LOSSES
from antiphon.cluster.base import CLUSTERS
from antiphon.cluster.config import ClusterConfig, PlacementConfig
from antiphon.cluster.placement import ANYWHERE, problems
from antiphon.core.config import Config, Problems, load, read_secret
from antiphon.core.errors import ConfigError, DataError
from antiphon.core.registry import Registry
from antiphon.core.types import OnUpdate
from antiphon.engines.config import LOADING, EngineConfig, EngineKind
from antiphon.engines.worker import ENGINES
from antiphon.learning.config import (
    OPTIONS,
    CheckpointConfig,
    CriticConfig,
    LearnerConfig,
    MeshesConfig,
    SftConfig,
    TeacherConfig,
)
from antiphon.learning.learner import LEARNERS
from antiphon.learning.stages import STAGES
from antiphon.record.config import RecordConfig
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.filters import FILTERS
from antiphon.tasks.config import CheckConfig, GradingConfig, PromptsConfig, TaskConfig
from antiphon.tasks.environments import ENVIRONMENTS, max_turns
from antiphon.tasks.prompts import SOURCES
from antiphon.tasks.rewards import ASYNCHRONOUS, COMPOSED, GROUP_REWARDS, REWARDS
from antiphon.tasks.tool_calls import TOOL_FORMATS
from antiphon.weights.base import CHANNELS, weight_files
from antiphon.weights.config import WeightSyncConfig


class ModelConfig(Config):
    """The model that is trained."""

    path: str
    """A directory or Hugging Face id; or package.module:function, called with (directory, seed) to write one there."""


class EvaluationConfig(Config):
    """Accuracy on the tasks' `test` prompts, before and after training and on the way."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates before and after only."""
    samples: int = Field(1, gt=0)
    """Completions a prompt."""
    temperature: float | None = Field(None, ge=0.0)
    """0 is greedy. null, the default, is 0 for one completion a prompt and 1 for several, which would be equal at 0."""
    limit: int = Field(0, ge=0)
    """Use only the first so many test prompts; 0 uses all."""
    minimum_accuracy: float = Field(0.0, ge=0.0, le=1.0)
    """The run fails when the final accuracy is below this."""

    def resolve_temperature(self, samples: int) -> float:
        """Return the temperature at which `samples` completions a prompt are drawn."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if samples == 1 else 1.0


class RunConfig(Config):
    """A run: `antiphon train` reads it, and `antiphon sft` where `sft` is set."""

    name: str
    seed: int = Field(0, ge=0)
    steps: int = Field(gt=0)
    """Training steps: published updates."""
    model: ModelConfig
    tasks: tuple[TaskConfig, ...] = Field(min_length=1)
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig | None = None
    """What says how good a state is, for the algorithms that ask."""
    teachers: tuple[TeacherConfig, ...] = ()
    """Whose opinion of the policy's tokens is learned from, see `algorithm.teacher_coefficient`."""
    meshes: MeshesConfig = MeshesConfig()
    """Ranks of reference, critics and teachers that are not as many as the learner's, or divide their work otherwise."""
    engine: EngineConfig = EngineConfig()
    grading: GradingConfig = GradingConfig()
    check: CheckConfig = CheckConfig()
    cluster: ClusterConfig = ClusterConfig()
    placement: PlacementConfig = PlacementConfig()
    """Which devices each role has."""
    weights: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()
    sft: SftConfig | None = None
    """Supervised warm start before the reinforcement learning."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        problems = [
            *_names(self),
            *_tasks(self),
            *_cluster(self),
            *_placement(self),
            *_servers(self),
            *_sampling(self),
            *_ranks(self),
            *_meshes(self),
            *_scheduling(self),
            *_joining(self),
            *_workers(self),
            *_critics(self),
            *_turns(self),
            *_turn_pay(self),
            *_stages(self),
            *_teachers(self),
            *_accuracy(self),
        ]
        if problems:
            raise Problems(problems)
        return self

    @property
    def judged_together(self) -> frozenset[str]:
        """Tasks whose siblings are judged together."""
        return frozenset(task.name for task in self.tasks if task.group_reward)

    @property
    def models(self) -> tuple[str, ...]:
        """Where the models that are loaded lie."""
        critic = (self.critic.path,) if self.critic and self.critic.path else ()
        return (self.model.path, *critic, *(teacher.path for teacher in self.teachers))

    @property
    def counts(self) -> dict[str, int]:
        """Models of each role that is trained or asked, of which each has the ranks of its mesh. Adapters' reference is the
        learner's own model."""
        reference = "reference_logprobs" in self.algorithm.required_streams and self.learner.lora is None
        critics = self.critic.count if self.critic else 0
        return {"learner": 1, "reference": int(reference), "critic": critics, "teacher": len(self.teachers)}

    def learner_of(self, role: str) -> LearnerConfig:
        """The settings of a model that is trained or asked: the learner's, on the role's mesh. Critics are torch's."""
        settings, own = self.learner, self.meshes.roles.get(role)
        if role == "critic":
            settings = settings.model_copy(update={"kind": "torch", "options": {}})
        if role == "teacher":  # is not trained
            settings = settings.model_copy(update={"lora": None})
        return settings.with_mesh(own) if own else settings

    def mesh_of(self, role: str) -> str:
        """Where the mesh of a role is said."""
        return f"meshes.{role}" if role in self.meshes.roles else "learner.mesh"

    def derived(self) -> dict[str, int]:
        """What the numbers of the configuration amount to."""
        rollout = self.rollout
        samples = rollout.groups_per_step * rollout.group_size
        longest = rollout.max_turns * rollout.sampling.max_tokens
        updates = self.learner.updates
        ranks = {"learner ranks": self.learner.mesh.world} if self.learner.mesh.world > 1 else {}
        ranks |= {f"{role} ranks": self.counts[role] * mesh.world for role, mesh in self.meshes.roles.items()}
        return ranks | {
            "groups alive": rollout.capacity,
            "attempts alive": rollout.capacity * (rollout.group_size + rollout.redundancy),
            "sequences decoded at once": sum(engine.slots for engine in self.engine.each),
            "most versions between start and use": rollout.max_age,
            "samples a step": samples,
            "most sampled tokens a step": samples * longest,
            "optimiser steps a step": updates,
            "optimiser steps in total": updates * self.steps,
        }


# --- combinations that cannot work: each yields (dotted path, message) -------------------------------------------------

# Advantages that compare the siblings of a group with one another.
GROUP_ADVANTAGES = frozenset(
    {"grpo", "dr_grpo", "rloo", "lite_ppo", "reinforce_plus_plus_baseline", "step_reinforce", "gigpo"}
)
# Advantages that pay turns on their own.
TURN_ADVANTAGES = frozenset({"turn_reinforce", "step_reinforce", "gigpo"})

Found = Iterator[tuple[str, str]]


def _names(config: RunConfig) -> Found:
    if config.name != Path(config.name).name or config.name.startswith("."):
        yield "name", f"{config.name!r} must be the plain name of a folder"
    seen = set()
    for index, task in enumerate(config.tasks):
        if task.name in seen:
            yield f"tasks.{index}.name", f"{task.name!r} is the name of an earlier task too"
        seen.add(task.name)
    yield from _registered(ADVANTAGES, config.algorithm.advantage, "algorithm.advantage")
    yield from _registered(LOSSES, config.algorithm.loss, "algorithm.loss")
    for at, engine in _engines(config):
        yield from _registered(ENGINES, engine.kind, f"{at}.kind")
    yield from _registered(LEARNERS, config.learner.kind, "learner.kind")
    yield from _registered(CLUSTERS, config.cluster.kind, "cluster.kind")
    yield from _registered(CHANNELS, config.weights.channel, "weights.channel")
    for index, stage in enumerate(config.learner.stages):
        yield from _registered(STAGES, stage, f"learner.stages.{index}")
    if config.rollout.filter is not None:
        yield from _registered(FILTERS, config.rollout.filter, "rollout.filter")
    yield from _registered(TOOL_FORMATS, config.rollout.tool_format, "rollout.tool_format")


def _engines(config: RunConfig) -> Iterator[tuple[str, EngineKind]]:
    """What kinds there are in the pool, and where each is said."""
    yield "engine", config.engine
    for number, other in enumerate(config.engine.also):
        yield f"engine.also.{number}", other


def _agent(config: RunConfig, task: TaskConfig, at: str) -> Found:
    if task.agent and task.environment:
        yield (
            f"{at}.agent",
            f"task {task.name!r} has an environment: it is played by turns, or by an agent, not by both",
        )
    if task.agent and config.rollout.deterministic:
        yield f"{at}.agent", "when an agent asks is up to it: not with rollout.deterministic"


def _tasks(config: RunConfig) -> Found:
    for index, task in enumerate(config.tasks):
        at = f"tasks.{index}"
        for field in ("prompts", "validation", "test"):
            prompts: PromptsConfig | None = getattr(task, field)
            if prompts:
                yield from _registered(SOURCES, prompts.source, f"{at}.{field}.source")
        yield from _registered(REWARDS, task.reward, f"{at}.reward")
        if task.judge is not None:
            yield from _enough_questions(config, task, f"{at}.judge.minimum")
            if task.reward in REWARDS.built_in and task.reward not in ASYNCHRONOUS | COMPOSED:
                yield f"{at}.judge", f"reward {task.reward!r} asks no model"
            if ":" in task.judge.path:
                yield f"{at}.judge.path", f"{task.judge.path!r} must be a directory or a Hugging Face id"
            if config.rollout.deterministic:
                yield (
                    f"{at}.judge",
                    "what engines of its own say depends on who asks when: not with rollout.deterministic",
                )
        yield from _group_reward(config, task, at)
        yield from _agent(config, task, at)
        if task.environment:
            yield from _registered(ENVIRONMENTS, task.environment, f"{at}.environment")
            yield from _lengths(config, task)
        elif task.reward == "environment_return":
            yield f"{at}.reward", "'environment_return' is paid by an environment, and this task has none"


def _enough_questions(config: RunConfig, task: TaskConfig, at: str) -> Found:
    """Whether a judge can need more engines than are always there; how much other rewards ask at once, nobody knows."""
    if task.judge is None or task.reward != "judge":
        return
    least, questions = task.judge.minimum or task.judge.replicas, (task.grading or config.grading).concurrency
    if least < task.judge.replicas and questions <= (slots := least * config.engine.slots):
        yield (
            at,
            f"{least} with {slots} slots (engine.slots) have room for the {questions} questions that are asked at once "
            "(grading.concurrency), and no other would ever start: give more concurrency or fewer slots",
        )


def _lengths(config: RunConfig, task: TaskConfig) -> Found:
    """Whether an environment may have its last word."""
    most, last = config.rollout.max_turns, max_turns(str(task.environment), task.environment_options)
    if most == 1:
        yield "rollout.max_turns", f"task {task.name!r} acts in an environment, which needs more than 1 turn"
    elif last is not None and most < last:
        yield (
            "rollout.max_turns",
            f"{most} would end episodes of task {task.name!r} before its environment judges them, which is after {last} "
            f"turns: give {last} or more, or set turns to {most} in its environment_options",
        )


def _group_reward(config: RunConfig, task: TaskConfig, at: str) -> Found:
    if task.group_reward is None:
        if task.group_reward_options:
            yield f"{at}.group_reward_options", "there is no group_reward that they could be for"
        return
    yield from _registered(GROUP_REWARDS, task.group_reward, f"{at}.group_reward")
    if config.rollout.sampler:
        yield f"{at}.group_reward", "a sampler of your own judges siblings one by one: judge them together in it"
    if config.rollout.group_size == 1:
        yield f"{at}.group_reward", "1 sibling (rollout.group_size) has no others to be judged with"


def _registered(registry: Registry, name: str, path: str) -> Found:
    try:
        registry.check(name)
    except ConfigError as error:
        yield path, str(error)


def _cluster(config: RunConfig) -> Found:
    cluster = config.cluster
    if cluster.debug and cluster.kind == "ray":
        yield "cluster.debug", "Ray's workers are processes; only cluster.kind = local has them as threads"
    if cluster.kind == "local" and config.weights.channel == "object_store":
        yield "weights.channel", "the object store is Ray's, and cluster.kind is local"
    if cluster.address and cluster.kind == "local":
        yield "cluster.address", f"{cluster.address!r} is the address of a Ray, and cluster.kind is local"
    if cluster.kind == "ray" and cluster.address and not re.fullmatch(r"auto|[^/]+:\d+", cluster.address):
        yield "cluster.address", f"{cluster.address!r} is neither 'auto' nor host:port"
    if cluster.kind == "ray" and not config.rollout.workers:  # their engines are processes beside them
        for at, engine in _engines(config):
            if engine.python:
                yield f"{at}.python", f"{engine.python!r}: Ray has one interpreter for all: use cluster.kind = local"


def _placement(config: RunConfig) -> Found:
    placement, cluster = config.placement, config.cluster
    for role, problem in problems(placement):
        yield f"placement.{role}", problem
    if placement.auto:
        yield from _planned(config)
    if (placement.auto or placement.roles) and cluster.debug:
        yield "cluster.debug", "threads of one process cannot be placed: leave out placement"
    for index, task in enumerate(config.tasks):
        if task.prefers and not placement.engine:
            yield f"tasks.{index}.prefers", f"{task.prefers!r}: engines have no devices of their own (placement.engine)"
    for role, text in placement.roles.items():
        if text == ANYWHERE and cluster.kind == "local":
            yield f"placement.{role}", "'anywhere' is of a cluster of several nodes, and cluster.kind is local"
        if role in ("learner", "reward") and text == ANYWHERE:
            yield f"placement.{role}", f"{role} is not 'anywhere': give it devices, or leave it beside the controller"
    if placement.engine == ANYWHERE and config.weights.channel == "shared_memory" and not config.weights.directory:
        yield (
            "weights.channel",
            "the shared memory of one node does not reach engines on others (placement.engine): use object_store or "
            "distributed, or name a weights.directory that all nodes see",
        )


def _planned(config: RunConfig) -> Found:
    if config.placement.roles:
        role = next(iter(config.placement.roles))
        yield "placement.auto", f"the planner places all or nothing, and {role} is placed already"
    if config.engine.also:
        yield "engine.also", "the planner (placement.auto) takes all engines for alike: place the roles"
    if config.cluster.address:
        yield "placement.auto", "the planner divides this machine alone, not a Ray (cluster.address): place the roles"


def _servers(config: RunConfig) -> Found:
    if any(engine.servers for _, engine in _engines(config)) and (config.placement.engine or config.placement.auto):
        yield "placement.engine", "servers (engine.kind) run where they were started: they are not placed"
    if config.engine.servers is None:
        return
    for index, task in enumerate(config.tasks):
        if task.judge is not None:
            yield f"tasks.{index}.judge", "servers (engine.kind) run the policy, and cannot run a judge besides"


def check_servers(config: RunConfig) -> None:
    """`ConfigError` if the servers that are its engines cannot be given what the run learns. An evaluation has nothing for
    them."""
    for at, engine in _engines(config):
        servers = engine.servers
        if servers is None:
            continue
        if servers.key:
            read_secret(servers.key)
        if servers.flavour not in LOADING:
            raise ConfigError(
                f"{at}.options.flavour: a server of flavour {servers.flavour!r} cannot be given weights, and is for "
                f"`antiphon eval` only; those that can are {', '.join(sorted(LOADING))}"
            )
        if config.rollout.on_update is OnUpdate.KEEP:
            raise ConfigError(
                f"rollout.on_update: 'keep' is not for servers ({at}.kind): what they send does not tell which weights a "
                "token came from; valid are recompute, restart and drain"
            )


def _sampling(config: RunConfig) -> Found:
    sampling = config.rollout.sampling
    at = "rollout.sampling"
    if sampling.temperature == 0.0:
        yield (
            f"{at}.temperature",
            "0 is greedy: siblings would all be equal, and their log-probs mean nothing; use more than 0",
        )
    for field, neutral in {"top_p": 1.0, "top_k": 0, "min_p": 0.0}.items():
        value = getattr(sampling, field)
        if value != neutral:
            yield (
                f"{at}.{field}",
                f"{value:g} cuts the distribution, and the learner cannot know what was cut off: the support is not "
                f"recorded. Train on {neutral:g}",
            )


TOLD = "routers are told of the pack that comes next: with a pipeline not with learner.gradient_checkpointing"


def _ranks(config: RunConfig) -> Found:
    learner, algorithm = config.learner, config.algorithm
    yield from ((f"learner.{key}", message) for key, message in learner.problems())
    if config.engine.routed_experts and learner.kind == "megatron":
        yield "engine.routed_experts", "the megatron learner does not replay what experts the engine chose; torch does"
    if algorithm.expert_balance and learner.kind in OPTIONS:
        yield (
            "algorithm.expert_balance",
            f"routers are told to by the torch learner alone, not by {learner.kind!r} (learner.kind)",
        )
    if config.cluster.debug and learner.kind == "megatron":
        yield "cluster.debug", "each megatron learner is a process of its own"
    if learner.mesh.world == 1:
        return
    if config.cluster.debug:
        yield "cluster.debug", f"the {learner.mesh.world} ranks of learner.mesh are processes"
    if algorithm.rhythm.reads_attention and learner.mesh.world > learner.mesh.data and learner.kind in OPTIONS:
        yield (
            "learner.mesh",
            f"attention (algorithm {algorithm.recipe!r}) is read on replicate and shard only by {learner.kind!r}",
        )
    if algorithm.rhythm.reads_attention and learner.mesh.context > 1 and learner.mesh.context_attention == "keys":
        yield (
            "learner.mesh.context_attention",
            f"'keys', and algorithm {algorithm.recipe!r} reads attention: by 'heads' only",
        )
    told = {"engine.routed_experts": config.engine.routed_experts, "algorithm.expert_balance": algorithm.expert_balance}
    if learner.mesh.pipeline > 1 and learner.gradient_checkpointing:
        for key in (key for key, on in told.items() if on):
            yield key, TOLD


ASKS = {"reference": "algorithm.kl", "critic": "critic", "teacher": "teachers"}  # what a role is there for


def _meshes(config: RunConfig) -> Found:
    """What is wrong with the meshes that are not the learner's."""
    for role, mesh in config.meshes.roles.items():
        at, settings = f"meshes.{role}", config.learner_of(role)
        if role == "reference" and config.learner.lora:
            yield (
                at,
                "the reference of adapters (learner.lora) is the learner's own model, on learner.mesh: leave it out",
            )
        elif not config.counts[role]:
            yield at, f"the run has no {role} ({ASKS[role]}), whose ranks these would be: leave it out"
        for key, message in settings.problems():
            if key.startswith("mesh."):  # all else is the learner's, too
                yield at + key.removeprefix("mesh"), message
        if config.cluster.debug and mesh.world > 1:
            yield "cluster.debug", f"the {mesh.world} ranks of {at} are processes"
        balanced = role == "critic" and config.algorithm.expert_balance
        if balanced and mesh.pipeline > 1 and settings.gradient_checkpointing:
            yield f"{at}.pipeline", f"{mesh.pipeline}, and algorithm.expert_balance is more than 0: {TOLD}"


def _scheduling(config: RunConfig) -> Found:
    rollout, learner = config.rollout, config.learner
    if rollout.group_size == 1 and config.algorithm.advantage in GROUP_ADVANTAGES:
        advantage = config.algorithm.advantage
        yield (
            "rollout.group_size",
            f"with 1 sibling {advantage!r} has nobody to compare with: every advantage would be 0",
        )
    if rollout.group_size == 1 and rollout.filter == "spread":
        yield "rollout.filter", "'spread' would drop every group: the score of 1 sibling has no spread"
    if learner.minibatches > rollout.groups_per_step:
        yield (
            "learner.minibatches",
            f"{learner.minibatches} optimiser steps cannot share the {rollout.groups_per_step} groups of a step "
            "(rollout.groups_per_step)",
        )
    for at, engine in _engines(config):
        if engine.max_length and rollout.sampling.max_tokens >= engine.max_length:
            yield (
                "rollout.sampling.max_tokens",
                f"{rollout.sampling.max_tokens} leaves no room for a prompt in {at}.max_length = {engine.max_length}",
            )


def _joining(config: RunConfig) -> Found:
    if config.engine.minimum and config.rollout.workers:
        yield "engine.minimum", "each of rollout.workers begins with all of its engines: give 0"
    if config.engine.minimum and config.rollout.deterministic:
        yield "engine.minimum", "who answers what depends on who is there: not with rollout.deterministic"


def _workers(config: RunConfig) -> Found:
    """What cannot be divided among rollout workers."""
    workers, replicas = config.rollout.workers, config.engine.replicas
    if not workers:
        return
    if replicas % workers:
        yield "engine.replicas", f"{replicas} engines cannot be divided evenly among rollout.workers = {workers}"
    if config.engine.also:
        yield "engine.also", "each of rollout.workers has as many engines, all alike: leave it out"
    if any(task.prefers for task in config.tasks):
        yield "tasks.prefers", "each of rollout.workers has engines of one class of devices: leave it out"
    if config.engine.servers is not None:
        yield "rollout.workers", "servers (engine.kind) are the controller's to ask: give 0"
    if config.rollout.deterministic:
        yield "rollout.workers", "workers do not wait for each other: not with rollout.deterministic"
    if config.weights.channel == "object_store":
        yield (
            "weights.channel",
            "only Ray's own workers read its object store, and engines of rollout.workers are none: use distributed",
        )
    yield from _beside_workers(config.placement)
    for index, task in enumerate(config.tasks):
        if task.judge is not None:
            yield f"tasks.{index}.judge", "each of rollout.workers would have judge engines of its own: give 0"


def _beside_workers(placement: PlacementConfig) -> Found:
    for role in ("reward", "environment", "auto"):
        if getattr(placement, role):
            yield (
                f"placement.{role}",
                "rewards and environments run beside their worker: leave it out with rollout.workers",
            )
    for role in ("reference", "critic", "teacher"):
        if placement.roles.get(role) == ANYWHERE:
            yield f"placement.{role}", "'anywhere' is not the node of the learner, where rollout.workers have it be"


def _critics(config: RunConfig) -> Found:
    algorithm, critic = config.algorithm, config.critic
    if critic is None:
        if "values" in algorithm.required_streams:
            yield (
                "critic",
                f"algorithm {algorithm.recipe!r} needs values, and there is no critic: give critic: {{count: 1}}",
            )
        return
    if "values" not in algorithm.required_streams:
        yield "critic", f"algorithm {algorithm.recipe!r} asks for no values: it would be trained for nothing"
    if ":" in critic.path:
        yield "critic.path", f"{critic.path!r} must be a directory or a Hugging Face id"
    if critic.disjoint and critic.count > config.rollout.group_size:
        yield (
            "critic.count",
            f"{critic.count} critics cannot have disjoint shares of the {config.rollout.group_size} siblings of a group "
            "(rollout.group_size)",
        )
    if algorithm.agreement_mask or algorithm.disagreement_mask:
        compare = "agreement_mask and disagreement_mask compare"
        if critic.count == 1:
            yield "critic.count", f"1 critic always agrees with itself; {compare} 2 or more"
        elif not critic.disjoint:
            yield "critic.disjoint", f"critics that learn the same always agree; {compare} some that do not: give true"
    if critic.warmup_steps >= config.steps:
        yield "critic.warmup_steps", f"{critic.warmup_steps} leaves nothing of the {config.steps} steps to train in"


def _turns(config: RunConfig) -> Found:
    if config.rollout.max_turns > 1:
        return
    algorithm = config.algorithm
    asked = {
        "advantage": algorithm.advantage if algorithm.advantage in TURN_ADVANTAGES else None,
        "ratio_level": algorithm.ratio_level,
        "correction.level": algorithm.correction.level,
        "correction.filter_level": algorithm.correction.filter_level,
    }
    for key, value in asked.items():
        if value == "turn" or value in TURN_ADVANTAGES:
            yield f"algorithm.{key}", f"{value!r} asks for turns, and every response has one (rollout.max_turns)"


def _turn_pay(config: RunConfig) -> Found:
    """What is made of the scores of whole trajectories, where turns are paid on their own."""
    algorithm = config.algorithm
    paid = config.rollout.max_turns > 1 and any(task.environment for task in config.tasks)
    if algorithm.advantage in TURN_ADVANTAGES or (algorithm.advantage == "gae" and paid):
        for key in algorithm.reward.without_turns:
            yield (
                f"algorithm.reward.{key}",
                f"{getattr(algorithm.reward, key)!r} is of whole trajectories, and {algorithm.advantage!r} pays turns "
                "(algorithm.advantage), which have no share in it: leave it out; scale divides turns, too",
            )


def _stages(config: RunConfig) -> Found:
    """What is configured, and no stage looks at; rewards that come to nothing."""
    algorithm, stages = config.algorithm, config.learner.stages
    if (algorithm.reward, algorithm.weight) != (RewardConfig(), LossWeightConfig()) and "rewards" not in stages:
        yield "learner.stages", "without 'rewards' nothing comes of algorithm.reward and algorithm.weight"
    if config.critic is not None and "update_critics" not in stages:
        yield "learner.stages", "without 'update_critics' no critic learns"
    if algorithm.reward.overlong_tokens and config.rollout.max_turns > 1:
        yield (
            "algorithm.reward.overlong_tokens",
            "is of the length of a response, and there are several (rollout.max_turns)",
        )
    if config.rollout.group_size == 1 and algorithm.reward.baseline == "group":
        yield "algorithm.reward.baseline", "'group' leaves nothing of the score of 1 sibling (rollout.group_size)"


def _teachers(config: RunConfig) -> Found:
    if config.algorithm.teacher_coefficient and not config.teachers:
        yield (
            "teachers",
            f"algorithm {config.algorithm.recipe!r} asks teachers, and there are none: give teachers: [{{path: …}}]",
        )
    if config.teachers and not config.algorithm.teacher_coefficient:
        yield "algorithm.teacher_coefficient", "0 listens to no teacher, and there are teachers"
    names = {task.name for task in config.tasks}
    for index, teacher in enumerate(config.teachers):
        if ":" in teacher.path:
            yield f"teachers.{index}.path", f"{teacher.path!r} must be a directory or a Hugging Face id"
        for unknown in sorted(set(teacher.tasks) - names):
            yield f"teachers.{index}.tasks", f"{unknown!r} is no task of this run; there are {', '.join(sorted(names))}"


def _accuracy(config: RunConfig) -> Found:
    wanted = {
        "evaluation.every": config.evaluation.every,
        "evaluation.minimum_accuracy": config.evaluation.minimum_accuracy,
    }
    if not any(task.test for task in config.tasks):
        for path, value in wanted.items():
            if value:
                yield path, f"{value:g} needs accuracy on test prompts, and no task has any (tasks.0.test)"
    if config.sft and config.sft.stop_accuracy and not any(task.validation for task in config.tasks):
        yield (
            "sft.stop_accuracy",
            f"{config.sft.stop_accuracy:g} needs accuracy on validation prompts, and no task has any (tasks.0.validation)",
        )


CHANGEABLE = (
    "steps",
    "record",
    "checkpoint",
    "evaluation.minimum_accuracy",
    "cluster",
    "placement",
    "weights",
    "engine.replicas",
    "engine.minimum",
    "engine.options.urls",
    "engine.also",
    "rollout.workers",
    "rollout.timeout",
    "rollout.engine_timeout",
    "learner.kind",
    "learner.options",
    "learner.threads",
    "learner.mesh",
    "learner.cpu_offload",
    "learner.on_nonfinite",
    "learner.timeout",
    "meshes",
    "grading",
    "check",
)


def check_same(written: Path, config: RunConfig) -> None:
    """`ConfigError` if `config` is not the configuration that a run was written with, apart from what may change."""
    before, now = (dict(flatten(tree)) for tree in (load(written, model=RunConfig).model_dump(), config.model_dump()))
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) != now.get(path) and not path.startswith(CHANGEABLE):
            raise ConfigError(
                f"{written}: {path} was {before.get(path)!r} and is {now.get(path)!r} now: that would be another run. "
                f"A resume may change {', '.join(CHANGEABLE)}"
            )


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, each with its dotted path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


# --- the model's size --------------------------------------------------------------------------------------------------

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def check_model_path(path: str) -> None:
    """`DataError` unless `path` is an existing directory, a Hugging Face id, or package.module:function."""
    if ":" in path or Path(path).is_dir():
        return
    parts = path.split("/")
    if len(parts) > 2 or not all(part and not part.startswith((".", "~")) for part in parts):
        raise DataError(f"model {path!r}: there is no such directory")


def model_shape(model: Path) -> dict[str, Any]:
    """What the config.json of a model directory says of the language model in it. `DataError` if there is none."""
    try:
        shape: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"model {str(model)!r} has no config.json that can be read, as Hugging Face models have"
        ) from error
    return dict(shape.get("text_config", shape))


def check_weights(directory: Path) -> None:
    """`DataError` if a model directory describes a model that is not there."""
    if (directory / "config.json").is_file() and not {*directory.glob("*.safetensors"), *directory.glob("*.bin")}:
        raise DataError(
            f"model {str(directory)!r} has a config.json and no weights (*.safetensors): enough for `antiphon plan` and "
            "--dry-run, and for nothing else"
        )


def count_parameters(path: str) -> int | None:
    """Parameters in a local model directory, read from the headers of its safetensors files; None if there are none."""
    files = weight_files(Path(path))
    total = 0
    for file in files:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for extent in tensor["shape"]:
                    count *= extent
                total += count
    return total if files else None


LEARNT = 4  # bytes of a parameter that is trained, of its gradient and of each moment, whatever is computed in


def memory_estimate(parameters: int, config: RunConfig) -> dict[str, int]:
    """Bytes that a model of so many parameters takes in each part of a run, on all ranks together, without activations, caches
    and adapters; and on each rank of the learner."""
    mesh, (weights, gradients) = config.learner.mesh, config.learner.copies
    reference = config.counts["reference"] * config.learner_of("reference").copies[0]
    trained = 0 if config.learner.lora else parameters
    learner = {
        "learner weights": parameters * LEARNT * weights,
        "learner gradients": trained * LEARNT * gradients,
        "optimiser moments": 2 * trained * LEARNT * mesh.replicate,
    }
    estimate = {
        **learner,
        "reference weights": parameters * LEARNT * reference,
        **_others(parameters, config),
        "engine weights": sum(parameters * BYTES.get(engine.dtype, 4) for engine in config.engine.each),
        "weights in transit": trained * LEARNT,
    }
    each = {"each learner rank": sum(learner.values()) // mesh.world} if mesh.world > 1 else {}
    return {**estimate, "all": sum(estimate.values()), **each}


def _others(parameters: int, config: RunConfig) -> dict[str, int]:
    """Bytes of critics (weights, gradients, moments) and of teachers, if there are any."""
    found, critic = {}, config.critic
    if critic is not None:
        own = (count_parameters(critic.path) if critic.path else None) or parameters
        size = LEARNT * config.learner_of("critic").mesh.replicate
        found["critics"] = (1 if config.learner.lora else 4) * own * size * critic.count
    if config.teachers:
        weights = LEARNT * config.learner_of("teacher").copies[0]
        found["teachers"] = sum((count_parameters(each.path) or parameters) * weights for each in config.teachers)
    return found

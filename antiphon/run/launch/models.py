"""Starting the models that a run trains and asks."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from antiphon.algorithms.declarations import declaration_of
from antiphon.algorithms.registry import resolve_advantage, resolve_loss
from antiphon.core.errors import ConfigError
from antiphon.core.profiles import ProfiledHandles
from antiphon.core.rng import derive
from antiphon.core.types import REFERENCE_LOGPROBS
from antiphon.core.workers import WorkerHandle
from antiphon.learning.backend import Fetch, LocalTraining, TrainBackend, identity
from antiphon.learning.learner import (
    LEARNERS,
    LoraBaseReference,
    ModelRoles,
    Offloadable,
    Predictor,
    Trainer,
    WorkerLearner,
    objective_learner,
)
from antiphon.learning.parallel.rank_group import RankGroup
from antiphon.learning.remote import RemoteTrainer
from antiphon.learning.roles import Ask, Role
from antiphon.learning.stages import resolve_stages
from antiphon.learning.step import StepPipeline, Wait, wait_forever
from antiphon.learning.token_recorder import TokenRecorder
from antiphon.record.run_dir import RunLineage
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.model_checks import check_model, check_tokenizers
from antiphon.run.launch.model_directory import model_directory
from antiphon.run.model_files import model_shape
from antiphon.run.profiler import StepProfiler
from antiphon.run.waits import RunWaits
from antiphon.tasks.rendering import Renderer

TRAINER, TRAINER_WORKER = "trainer", "antiphon.run.trainer_process:TrainerProcess"


def make_step_pipeline(
    config: RunConfig,
    learner: Trainer,
    reference: Predictor | None = None,
    critics: Sequence[Trainer] = (),
    teachers: Sequence[Predictor] = (),
    roles: Mapping[str, Ask] | None = None,
    open_renderer: Callable[[], Renderer] | None = None,
) -> StepPipeline:
    """Return the stages of a training step, which turn groups into updates of learner and critics."""
    return StepPipeline(
        learner=learner,
        reference=reference,
        critics=critics,
        teachers=list(zip(config.teachers, teachers, strict=True)),
        algorithm=config.algorithm,
        config=config.learner,
        critic=config.critic,
        critic_ranks=config.learner_of("critic").mesh.data,
        estimate_advantages=resolve_advantage(config.algorithm),
        loss=declaration_of(resolve_loss(config.algorithm)),
        stages=resolve_stages(config.learner),
        max_tokens=config.rollout.sampling.max_tokens,
        open_renderer=open_renderer and lru_cache(maxsize=1)(open_renderer),
        roles={name: Role(name, ask) for name, ask in (roles or {}).items()},
    )


def make_local_training(
    config: RunConfig,
    models: ModelRoles,
    workers: Sequence[WorkerHandle] = (),
    *,
    wait: Wait = wait_forever,
    fetch: Fetch = identity,
    record: RunLineage | None = None,
    roles: Mapping[str, Ask] | None = None,
    model: Path | None = None,
) -> LocalTraining:
    """Return a backend that trains `models`.

    It records tokens and profiles in `record`, and its stages ask `roles` and read texts with the tokenizer in the directory
    `model`; see `LocalTraining` for the other arguments.
    """
    others = models.reference, models.critics, models.teachers
    pipeline = make_step_pipeline(config, models.learner, *others, roles, partial(Renderer, model) if model else None)
    if (names := tuple(dict.fromkeys(config.record.token_stats))) and record is not None:
        run = record.directory.path
        recorder = TokenRecorder(names=names, learner=models.learner, run=run, lineage=record.lineage)
        pipeline.stages = [recorder.measure, *pipeline.stages, recorder.write]
    if config.profile.steps and record is not None:
        ranks = ProfiledHandles(lambda: workers)
        profiler = StepProfiler(config=config.profile, models=ranks, directory=record.directory.profile)
        pipeline.stages = [profiler.start, *pipeline.stages, profiler.write]
    return LocalTraining(models=models, pipeline=pipeline, workers=workers, wait=wait, fetch=fetch)


async def start_training(context: LaunchContext, model: Path, record: RunLineage) -> TrainBackend:
    """Start the models of a run, in workers of this process or, with rollout workers, beside a trainer process."""
    wait = partial(RunWaits(context.config, context.deadlines), name="step", on="the learner")
    if context.config.rollout.workers:
        return await _start_trainer(context, model, record, wait)
    started = await start_models(context, model)
    return make_local_training(context.config, *started, wait=wait, record=record, roles=context.roles, model=model)


async def _start_trainer(context: LaunchContext, model: Path, record: RunLineage, wait: Wait) -> RemoteTrainer:
    """Start the trainer process on the learner's node; it starts the models with `start_models`."""
    config, at = context.config, context.placement.place("learner")
    place = at and replace(at, cores=(), gpus=context.placement.training_gpus)
    args = (str(model), config, record, context.placement)
    trainer = RemoteTrainer(context.cluster.spawn(TRAINER, TRAINER_WORKER, *args, place=place), wait, context.roles)
    on, deadline, key = "the trainer to start its models", config.learner.timeout, "learner.timeout"
    await context.deadlines.wait(trainer.started(), name="start", owner="run", on=on, deadline=deadline, key=key)
    return trainer


async def start_models(context: LaunchContext, model: Path) -> tuple[ModelRoles, list[WorkerHandle]]:
    """Start the models that the algorithm needs, each rank in a process of its own.

    Args:
        context: The run.
        model: Directory that all models begin as, but for teachers and for critics with a path of their own. It has passed
            `check_model`.

    Returns:
        The models by their roles, and the handles of all processes.
    """
    config, launcher = context.config, _RankLauncher(context)
    critic_model, teacher_models = await _locate_other_models(context, model)
    if config.algorithm.expert_balance and not {"num_experts", "num_local_experts"} & model_shape(model).keys():
        raise ConfigError(f"the model at {model} has no experts that a loss balances", key="algorithm.expert_balance")
    kind, critic = LEARNERS.known.get(config.learner.kind, config.learner.kind), config.critic
    learner = launcher.start("learner", kind, model)
    reference: Offloadable | None = None
    if REFERENCE_LOGPROBS in config.algorithm.required_streams:
        reference = LoraBaseReference(learner) if config.learner.lora else launcher.start("reference", kind, model)
    critics = range(critic.count if critic else 0)
    critic_kind = objective_learner("CriticLearner", config.learner_of("critic").kind)
    models = ModelRoles(
        learner=learner,
        reference=reference,
        critics=[launcher.start(f"critic-{number}", critic_kind, critic_model, critic) for number in critics],
        teachers=[launcher.start(f"teacher-{number}", kind, path) for number, path in enumerate(teacher_models)],
    )
    await launcher.wait_ready()
    return models, launcher.workers


async def _locate_other_models(context: LaunchContext, model: Path) -> tuple[Path, list[Path]]:
    """Return the directories of critic and teachers, after a check of all models beside the learner."""
    config = context.config

    async def locate(path: str) -> Path:
        return await model_directory(context.cluster, path, Path(), config.seed) if path else model

    teachers = [await locate(teacher.path) for teacher in config.teachers]
    critic = await locate(config.critic.path if config.critic else "")
    for role, path in [("reference", model), ("critic", critic), *(("teacher", path) for path in teachers)]:
        settings = config.learner_of(role)
        if path != model:
            check_tokenizers(model, path)
        if config.counts[role] and (path, settings) != (model, config.learner):
            await check_model(context.cluster, path, settings, config.mesh_of(role))
    return critic, teachers


class _RankLauncher:
    """Starts the ranks of models, and notes what is to be waited for."""

    def __init__(self, context: LaunchContext) -> None:
        self.workers: list[WorkerHandle] = []
        self._meetings: list[Awaitable[None]] = []  # of the ranks of each model
        self._context = context

    def start(self, name: str, kind: str, path: Path, *more: Any) -> WorkerLearner:
        """Start all ranks of the model `name`, such as learner or critic-1."""
        config, placement = self._context.config, self._context.placement
        role, _, number = name.partition("-")
        settings = config.learner_of(role)
        ranks = settings.mesh.world
        args = (str(path), settings, derive(config.seed, name), *more)
        members = [
            self._context.cluster.spawn(
                name if ranks == 1 else f"{name}-rank-{rank}",
                kind,
                *args,
                place=placement.place(role, int(number or 0) * ranks + rank),
            )
            for rank in range(ranks)
        ]
        self.workers.extend(members)
        if not settings.forms_group:
            return WorkerLearner(members[0])
        group = RankGroup(members, settings.mesh)
        self._meetings.append(group.rendezvous(config.weights.host))
        return WorkerLearner(group)

    async def wait_ready(self) -> None:
        """Wait until the ranks of each model have met; raise `ConfigError` if the learner's cannot be profiled."""
        await asyncio.gather(*self._meetings)
        if self._context.config.profile.memory:
            await self.workers[0].call("check_memory_profile")

"""The root configurations of the offline verbs, which learn from responses that are there. Importing it imports no torch."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, model_validator

from antiphon.algorithms.offline_config import DistillationConfig, PreferenceConfig
from antiphon.cluster.base import CLUSTERS
from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.placement import find_problems
from antiphon.core.config import Config, unit
from antiphon.core.errors import ConfigError, Mistake, ValidatorError
from antiphon.learning.config import CheckpointConfig, LearnerConfig
from antiphon.learning.learner import LEARNERS
from antiphon.record.config import RecordConfig
from antiphon.record.run_dir import is_folder_name
from antiphon.run.config import ModelConfig
from antiphon.tasks.config import PairsConfig, ResponsesConfig
from antiphon.tasks.prompts import SOURCES


class OfflinePlacementConfig(Config):
    """Devices of the models, as in `placement` of `antiphon train`; empty: any."""

    learner: str = ""
    """Devices of the learner, divided evenly among the ranks of its mesh."""
    teacher: str = ""
    """Devices of the teacher, which has as many ranks as the learner; `with learner` shares the learner's."""
    host: str = "127.0.0.1"
    """Address at which the ranks of a model meet: one of the first rank's node, reached from those of the others."""

    @property
    def roles(self) -> dict[str, str]:
        """The roles that have devices of their own."""
        return {role: text for role in ("learner", "teacher") if (text := getattr(self, role))}


class OfflineConfig(Config):
    """Settings that the offline verbs share."""

    name: str
    """Name of the run, and of its directory in `record.directory`."""
    seed: Annotated[int, unit("seed")] = Field(0, ge=0)
    """Seed of the order of the data."""
    model: ModelConfig
    """The model that is trained."""
    data: PairsConfig | ResponsesConfig
    """Rows that are trained on."""
    validation: PairsConfig | ResponsesConfig | None = None
    """Never trained on: loss and accuracy before and after, and on the way."""
    batch_size: Annotated[int, unit("rows")] = Field(32, gt=0)
    """Rows of the data of one optimiser step."""
    epochs: Annotated[int, unit("passes")] = Field(1, gt=0)
    """Passes over the data."""
    steps: Annotated[int, unit("optimizer steps")] = Field(0, ge=0)
    """Optimiser steps, however many passes that takes; 0 is as many as `epochs` comes to."""
    evaluate_every: Annotated[int, unit("optimizer steps")] = Field(0, ge=0)
    """Optimiser steps between validations; 0 validates before and after only."""
    timeout: Annotated[float, unit("seconds")] = Field(14400.0, gt=0.0)
    """Seconds after which any wait for a model fails the run: to load it, to save it, a step, a pack of the validation."""
    learner: LearnerConfig = LearnerConfig()
    cluster: ClusterConfig = ClusterConfig()
    placement: OfflinePlacementConfig = OfflinePlacementConfig()
    """Devices of the models."""
    checkpoint: CheckpointConfig = CheckpointConfig(every=100)
    """Checkpoints, from which the run can be resumed; its steps are optimiser steps."""
    record: RecordConfig = RecordConfig()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        problems = [*_names(self), *_unused(self), *_devices(self)]
        if self.evaluate_every and self.validation is None:
            problems.append(("evaluate_every", f"{self.evaluate_every} needs data to validate on; give `validation`"))
        if problems:
            raise ValidatorError(problems)
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """Paths of the models that are loaded."""
        return (self.model.path,)

    def derived(self) -> dict[str, int]:
        """Quantities that follow from the configuration."""
        return {"responses an optimiser step": self.batch_size * len(self.data.responses)}


class DpoConfig(OfflineConfig):
    """`antiphon dpo`: a policy from pairs of responses."""

    data: PairsConfig
    """Preference pairs that are trained on."""
    validation: PairsConfig | None = None
    """Preference pairs that are only evaluated on."""
    dpo: PreferenceConfig = PreferenceConfig()
    """The loss."""


class RewardModelConfig(OfflineConfig):
    """`antiphon reward-model`: a reward model from pairs of responses."""

    data: PairsConfig
    """Preference pairs that are trained on."""
    validation: PairsConfig | None = None
    """Preference pairs that are only evaluated on."""


class DistillConfig(OfflineConfig):
    """`antiphon distill`: a student from a teacher's distributions over responses."""

    data: ResponsesConfig
    """Prompts with responses that are trained on."""
    validation: ResponsesConfig | None = None
    """Prompts with responses that are only evaluated on."""
    distill: DistillationConfig
    """The teacher and the loss."""

    @property
    def models(self) -> tuple[str, ...]:
        """Paths of the models that are loaded."""
        return (self.model.path, self.distill.teacher)


Found = Iterator[Mistake | tuple[str, str]]  # a tuple: dotted key, message


def _names(config: OfflineConfig) -> Found:
    if not is_folder_name(config.name):
        yield "name", f"{config.name!r} must be the plain name of a folder"
    parts = {"data": config.data, "validation": config.validation}
    named = [(CLUSTERS, config.cluster.kind, "cluster.kind"), (LEARNERS, config.learner.kind, "learner.kind")]
    named += [(SOURCES, part.source, f"{name}.source") for name, part in parts.items() if part]
    for registry, value, path in named:
        try:
            registry.check(value)
        except ConfigError as error:
            yield Mistake(path, str(error), value, error.valid, suggestions=error.suggestions)


def _devices(config: OfflineConfig) -> Found:
    """Check the learner's mesh, and the devices of its ranks."""
    learner = config.learner
    yield from ((f"learner.{key}", message) for key, message in learner.problems())
    yield from ((f"placement.{role}", message) for role, message in find_problems(config.placement.roles))
    if config.placement.teacher and not isinstance(config, DistillConfig):
        yield "placement.teacher", f"{config.placement.teacher!r} is for `antiphon distill`: there is no other teacher"
    if config.cluster.debug:
        yield from learner.debug_problems()


def _unused(config: OfflineConfig) -> Found:
    """Keys that mean nothing here."""
    if config.record.events:
        yield "record.events", "true is for reinforcement learning: here there are no attempts to tell of"
    if config.record.spans:
        yield "record.spans", "is for reinforcement learning: here there are no attempts to tell of"
    if ":" in config.learner.kind:
        yield "learner.kind", f"must be {', '.join(LEARNERS.known)}: a learner of your own has no loss for this command"
    instead_of = {"stages": "", "stage_options": ""}
    instead_of |= {"minibatches": "batch_size", "epochs": "epochs", "timeout": "timeout"}
    for field, instead in instead_of.items():
        value, default = getattr(config.learner, field), LearnerConfig.model_fields[field].default
        if value != default:
            hint = f"; give `{instead}` of the run" if instead else ""
            yield f"learner.{field}", f"{value!r} is for reinforcement learning, here it is {default!r}{hint}"

"""One training step as its stages see it (`Step`): the samples, their streams, and the models that are asked and trained.

`StepPipeline` runs the stages. The built-in ones are in `learning/stages.py`; `docs/new_loss.md` shows one of a user's own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import Declaration
from antiphon.algorithms.registry import resolve_streams
from antiphon.algorithms.rewards import AlgorithmState
from antiphon.algorithms.trajectories import Arrays, Samples
from antiphon.core.errors import ConfigError, StateError
from antiphon.core.types import (
    LEARNER_STREAMS,
    PROXIMAL_LOGPROBS,
    STREAMS,
    Credit,
    Group,
    Sample,
    StreamSpec,
    TrainBatch,
)
from antiphon.learning.batch import digest_batches, make_samples, summarize_credit
from antiphon.learning.config import CriticConfig, LearnerConfig, TeacherConfig
from antiphon.learning.learner import Predictor, Trainer
from antiphon.learning.roles import Role

if TYPE_CHECKING:  # it imports transformers, for which reading a configuration does not wait
    from antiphon.tasks.rendering import Renderer

T = TypeVar("T")

EstimateAdvantages = Callable[[Samples, AlgorithmConfig], Arrays]
Wait = Callable[[Awaitable[Any]], Awaitable[Any]]  # awaits with a deadline

MODELS = ("learner", "reference", "critics", "teachers")  # producers of streams that the `annotate` stage asks


class SampleKey(NamedTuple):
    """Identifies a sample of a step."""

    group: int
    position: int  # in its group


def by_key(nested: Sequence[Sequence[T]]) -> dict[SampleKey, T]:
    """Return what is nested as [group][sample], keyed by sample."""
    return {SampleKey(g, n): value for g, group in enumerate(nested) for n, value in enumerate(group)}


async def wait_forever(work: Awaitable[Any]) -> Any:
    """Await without a deadline."""
    return await work


@dataclass(slots=True, kw_only=True)
class StepPipeline:
    """Models, settings and stages that turn groups into updates, from step to step.

    Attributes:
        critic_ranks: Data-parallel ranks of a critic.
        estimate_advantages: The advantage function of the algorithm.
        loss: What the loss function of the algorithm declares.
        max_tokens: Token limit of one completion.
        open_renderer: Returns the tokenizer of the model, the same one each time.
        roles: The user's own roles, by name.
        algorithm_state: Running moments and adapted coefficients; part of a checkpoint.
    """

    learner: Trainer
    reference: Predictor | None = None
    critics: Sequence[Trainer] = ()
    teachers: Sequence[tuple[TeacherConfig, Predictor]] = ()
    algorithm: AlgorithmConfig
    config: LearnerConfig
    critic: CriticConfig | None = None
    critic_ranks: int
    estimate_advantages: EstimateAdvantages
    loss: Declaration
    stages: Sequence["Stage"]
    max_tokens: int
    open_renderer: "Callable[[], Renderer] | None" = None
    roles: Mapping[str, Role] = field(default_factory=dict)
    algorithm_state: AlgorithmState = field(default_factory=AlgorithmState)

    async def learn(
        self, number: int, version: int, groups: Sequence[Group], wait: Wait = wait_forever
    ) -> tuple[dict[str, float], str, list[Credit]]:
        """Run the stages on the groups of one step.

        Args:
            number: Number of the step, from 1.
            version: Number of the policy version before the step.
            groups: Groups with their trajectories.
            wait: Awaits one stage, with a deadline.

        Returns:
            Metrics, the digest of the batches given to the learner, and the credit of each trajectory.
        """
        step = Step(number=number, version=version, samples=make_samples(groups), pipeline=self)
        for stage in self.stages:
            await wait(stage(step))
        step.metrics |= {f"role/{name}/seconds": role.take_seconds() for name, role in self.roles.items()}
        return step.metrics, digest_batches(step.batches), summarize_credit(step.samples)


@dataclass(slots=True, kw_only=True)
class Step:
    """The state of one training step.

    Attributes:
        number: Number of the step, from 1.
        version: Number of the policy version before the step.
        samples: Samples of each group, [group][sample]; those of a trajectory are neighbours. `by_key` gives them the keys
            that `add_stream` takes.
        algorithm: Settings with the coefficients of this step; the only ones that stages read.
        metrics: Metrics of the step.
        batches: Batches that the learner was given.
    """

    number: int
    version: int
    samples: list[list[Sample]]
    pipeline: StepPipeline
    algorithm: AlgorithmConfig = field(init=False)
    metrics: dict[str, float] = field(default_factory=dict)
    batches: list[TrainBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.algorithm, adapted = self.pipeline.algorithm, self.pipeline.algorithm_state.kl
        if adapted is not None:
            kl = self.algorithm.kl.model_copy(update={"coefficient": adapted})
            self.algorithm = self.algorithm.model_copy(update={"kl": kl})

    @property
    def roles(self) -> Mapping[str, Role]:
        """The user's own roles, by name (`learning/roles.py`)."""
        return self.pipeline.roles

    @property
    def renderer(self) -> "Renderer":
        """Tokenizer and chat template of the model: `decode` returns the text of tokens, `split` that of each token.

        Raises:
            StateError: The run is simulated and has no model.
            RecordError: The step is replayed, and its run holds no tokenizer.
        """
        if self.pipeline.open_renderer is None:
            raise StateError("this step has no model directory, and so no tokenizer")
        return self.pipeline.open_renderer()

    @property
    def flat(self) -> list[Sample]:
        """All samples."""
        return [sample for group in self.samples for sample in group]

    def streams_to_query(self) -> list[StreamSpec]:
        """Return the streams that models are asked for.

        In a step of one update the proximal policy is the policy being trained, so its log-probs are asked for only where a
        function of the user reads them.
        """
        required = self.algorithm.required_streams
        if self.pipeline.config.updates == 1 and PROXIMAL_LOGPROBS.name not in self.algorithm.streams:
            required -= {PROXIMAL_LOGPROBS}
        return [spec for spec in STREAMS.values() if spec in required and spec.producer in MODELS]

    def learner_streams(self) -> frozenset[StreamSpec]:
        """Return the streams that the learner gets: those that it, the loss, or a term beside the loss reads.

        Raises:
            ConfigError: A sample lacks a stream that the loss declares.
        """
        for spec in self.pipeline.loss.needs:
            if any(spec not in sample.streams for sample in self.flat):
                raise ConfigError(
                    f"{self.algorithm.loss!r} needs the stream {spec.name!r}, which not all samples of step {self.number} "
                    f"have: it is to come from {spec.producer!r}",
                    key="algorithm.loss",
                    value=self.algorithm.loss,
                )
        requested = (*self.pipeline.loss.needs, *resolve_streams(self.algorithm))
        return LEARNER_STREAMS | self.algorithm.loss_term_streams | frozenset(requested)

    def add_stream(self, spec: StreamSpec, arrays: Mapping[SampleKey, NDArray[Any]]) -> None:
        """Add a stream to every sample, or replace it.

        Args:
            spec: What the stream is.
            arrays: Array [L, …] of each sample.

        Raises:
            ValueError: The array of a sample is missing, or has another dtype or shape than `spec` says.
        """
        samples = by_key(self.samples)
        if missing := [key for key in samples if key not in arrays]:
            raise ValueError(f"stream {spec.name!r} lacks {len(missing)} of {len(samples)} samples, first {missing[0]}")
        self.update_samples({key: {"streams": samples[key].streams.with_stream(spec, arrays[key])} for key in samples})

    def update_samples(self, changes: Mapping[SampleKey, Mapping[str, Any]]) -> None:
        """Replace fields of samples: of each sample that `changes` has, the fields that it names."""
        self.samples = [
            [replace(sample, **changes.get(SampleKey(g, n), {})) for n, sample in enumerate(group)]
            for g, group in enumerate(self.samples)
        ]


Stage = Callable[[Step], Awaitable[None]]


async def gather_keyed(work: Mapping[T, Awaitable[Any]]) -> dict[T, Any]:
    """Await all values at once; return the results under the same keys."""
    return dict(zip(work, await asyncio.gather(*work.values()), strict=True))

"""Records numbers of each token that a step trains on, as `record.token_stats` asks for."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from antiphon.core.types import ATTENTION_RHYTHM, AttemptId, FloatArray, Sample, Segment, StreamSpec
from antiphon.learning.learner import Learner
from antiphon.learning.model_streams import query_samples
from antiphon.learning.step import Step, by_key
from antiphon.record import token_stats
from antiphon.record.run_dir import convert_write_errors
from antiphon.record.token_stats import SegmentStats

# Log-prob of each sampled token and entropy where it was sampled, under the policy before the step.
POLICY = StreamSpec("policy_before", "float32", (2,), "learner")
FROM_POLICY = frozenset({"entropy", "log_ratio"})  # what costs a forward pass


@dataclass(slots=True, kw_only=True)
class TokenRecorder:
    """Two stages: one measures the samples of a step before all others, one writes their numbers after all others.

    Nothing that it measures is a stream of the samples, so that a step learns the same with it and without it.

    Attributes:
        names: Numbers that are written, of `token_stats.STATS`.
        learner: The policy.
        run: The run directory.
        lineage: The lineage that is recorded.
    """

    names: Sequence[str]
    learner: Learner
    run: Path
    lineage: int
    _segments: list[tuple[Segment, AttemptId, int]] = field(default_factory=list, init=False)
    _measured: list[FloatArray] = field(default_factory=list, init=False)  # [L, 2] a segment

    async def measure(self, step: Step) -> None:
        """Number the segments of each attempt, and ask the policy about them where a number needs it."""
        samples, counts = by_key(step.samples), dict[AttemptId, int]()
        self._segments, self._measured = [], []
        for sample in samples.values():
            number = counts[sample.meta.id] = counts.get(sample.meta.id, -1) + 1
            self._segments.append((sample.segment, sample.meta.id, number))
        if FROM_POLICY & set(self.names):
            query = {POLICY: self.learner.logprobs_and_entropies}
            answers = await query_samples(samples, query, step.pipeline.config)
            self._measured = list(answers[POLICY].values())

    async def write(self, step: Step) -> None:
        """Write the numbers of the samples that the stages left."""
        left = {id(sample.segment): sample for sample in step.flat}  # a stage may have dropped some
        rows = [
            SegmentStats(attempt, number, self._list_values(left[id(segment)], place))
            for place, (segment, attempt, number) in enumerate(self._segments)
            if id(segment) in left
        ]
        if rows:
            with convert_write_errors(self.run):
                await asyncio.to_thread(token_stats.write, self.run, self.lineage, step.number, rows)
        self._segments, self._measured = [], []

    def _list_values(self, sample: Sample, place: int) -> dict[str, FloatArray]:
        """Return the numbers of a sample by name, [L] each, NaN where the policy sampled nothing."""
        segment = sample.segment
        known = {"advantage": sample.advantages}
        if self._measured:
            logprobs, entropies = self._measured[place].T
            known |= {"entropy": entropies, "log_ratio": logprobs - segment.logprobs}
        if (rhythm := sample.streams.get(ATTENTION_RHYTHM, None)) is not None:
            known |= dict(zip(("waad", "fai"), rhythm.T, strict=True))
        sampled = segment.loss_mask.copy()
        sampled[:1] = False  # nothing predicts the first token
        nothing = np.full(len(sampled), np.nan, np.float32)
        return {name: np.where(sampled, known.get(name, nothing), np.nan).astype(np.float32) for name in self.names}

"""The recorder of tokens: what it writes of a step, seen by pandas and by transformers; and what readers of it refuse."""

import asyncio

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.errors import RecordError
from antiphon.core.types import AttemptId
from antiphon.learning.stages import advantages, annotate, update_actor
from antiphon.learning.step import Step
from antiphon.learning.token_recorder import TokenRecorder
from antiphon.record import token_stats
from antiphon.record.token_stats import SegmentStats, read_segment
from tests.raising import raises_with

from .conftest import make_sample
from .test_stages import Here, training

RHYTHM = AlgorithmConfig(rhythm={"kind": "coupled", "window": 3, "horizon_low": 1, "horizon_high": 4})


class Learner(Here):
    async def logprobs_and_entropies(self, packs):
        return self.learner.logprobs_and_entropies(list(packs))


def record_step(run, directory, algorithm, stages, names):
    """Take a step of two groups of two attempts, of which the first has two segments; return its samples."""
    rng = np.random.default_rng(4)
    samples = [[make_sample(rng, 9, AttemptId(group, n, 0), score=float(n)) for n in range(2)] for group in range(2)]
    samples[0].insert(1, make_sample(rng, 7, AttemptId(0, 0, 0), score=0.0))
    pipeline = training(directory, algorithm)
    pipeline.learner = Learner(pipeline.learner.learner)
    recorder = TokenRecorder(names=names, learner=pipeline.learner, run=run, lineage=2)
    step = Step(number=5, version=4, samples=samples, pipeline=pipeline)

    async def take():
        await recorder.measure(step)
        for stage in stages:
            await stage(step)
        await recorder.write(step)

    asyncio.run(take())
    return [sample for group in samples for sample in group]


def test_numbers_are_those_of_the_samples(model_directories, tmp_path):
    names = ["fai", "entropy", "log_ratio", "waad", "advantage"]
    stages = [annotate, advantages, update_actor]
    samples = record_step(tmp_path, model_directories["llama"], RHYTHM, stages, names)
    table = pandas.read_parquet(tmp_path / "token_stats" / "2-000005.parquet")
    assert list(table.columns) == [*token_stats.KEYS, *names]
    assert table[["grp", "sibling", "try", "segment"]].values.tolist() == [
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 1, 0, 0],
        [1, 0, 0, 0],
        [1, 1, 0, 0],
    ]
    before = AutoModelForCausalLM.from_pretrained(model_directories["llama"])
    for row, sample in zip(table.itertuples(), samples, strict=True):
        mask = sample.segment.loss_mask
        assert mask.any() and not mask[0]
        for name in names:
            assert np.isfinite(np.array(getattr(row, name))).tolist() == mask.tolist()
        tokens = torch.from_numpy(sample.segment.tokens)[None].long()
        found = before(tokens).logits[0, :-1].log_softmax(-1)
        entropies = -(found.exp() * found).sum(-1).detach().numpy()
        logprobs = found.gather(1, tokens[0, 1:, None])[:, 0].detach().numpy()
        ratio = logprobs - sample.segment.logprobs[1:]
        assert np.abs(ratio[mask[1:]]).max() > 0.1
        np.testing.assert_allclose(np.array(row.entropy)[1:][mask[1:]], entropies[mask[1:]], rtol=1e-3)
        np.testing.assert_allclose(np.array(row.log_ratio)[1:][mask[1:]], ratio[mask[1:]], rtol=1e-3, atol=1e-4)
    assert np.nanmax(table.waad.iloc[2]) > 0


def test_samples_that_a_stage_drops_have_no_row(model_directories, tmp_path):
    async def drop(step):
        step.samples = [step.samples[0][1:], step.samples[1][:1]]

    record_step(tmp_path, model_directories["llama"], AlgorithmConfig(), [drop, advantages], ["advantage"])
    table = pandas.read_parquet(tmp_path / "token_stats")
    assert table[["grp", "sibling", "try", "segment"]].values.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0]]


def test_only_what_needs_the_policy_asks_it(model_directories, tmp_path):
    class Silent(Learner):
        async def logprobs_and_entropies(self, packs):
            raise AssertionError

    rng = np.random.default_rng(0)
    pipeline = training(model_directories["llama"], AlgorithmConfig())
    step = Step(number=1, version=0, samples=[[make_sample(rng, 5, 0)]], pipeline=pipeline)
    asyncio.run(TokenRecorder(names=["advantage"], learner=Silent(None), run=tmp_path, lineage=0).measure(step))
    recorder = TokenRecorder(names=["entropy"], learner=Silent(None), run=tmp_path, lineage=0)
    with pytest.raises(AssertionError):
        asyncio.run(recorder.measure(step))


@pytest.fixture
def wide(tmp_path):
    """A file of 40 segments of 6,000 tokens: entropy n + 1 in segment n."""
    values = {n: np.full(6000, n + 1, np.float32) for n in range(40)}
    rows = [SegmentStats(AttemptId(n // 4, n % 4, 0), 0, {"entropy": values[n]}) for n in range(40)]
    rows[3] = replace_values(rows[3], np.array([1e9, -np.inf, np.nan, 0.1], np.float32))
    token_stats.write(tmp_path, 0, 1, rows)
    return tmp_path


def replace_values(row, values):
    return row._replace(values={"entropy": values})


def test_a_segment_is_read_alone(wide):
    file = pq.ParquetFile(wide / "token_stats" / "0-000001.parquet")
    assert max(file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)) <= 12
    for group, sibling in ((0, 0), (5, 2), (9, 3)):
        found = read_segment(wide, 0, 1, AttemptId(group, sibling, 0), 0)
        assert set(found["entropy"].tolist()) == {4 * group + sibling + 1} and len(found["entropy"]) == 6000
    for lineage, step, attempt, segment in (
        (1, 1, (0, 0, 0), 0),
        (0, 2, (0, 0, 0), 0),
        (0, 1, (0, 0, 1), 0),
        (0, 1, (0, 0, 0), 1),
    ):
        assert read_segment(wide, lineage, step, AttemptId(*attempt), segment) == {}


def test_numbers_beyond_16_bits_are_bounded(wide):
    (found,) = read_segment(wide, 0, 1, AttemptId(0, 3, 0), 0).values()
    assert found.tolist()[:2] == [65504, -65504] and np.isnan(found[2]) and found[3] == np.float16(0.1)


@pytest.mark.parametrize("version", [b"2", b"0", b"one", None])
def test_other_versions_are_refused(wide, version):
    path = wide / "token_stats" / "0-000001.parquet"
    table = pq.read_table(path)
    assert table.schema.metadata[b"antiphon.token_stats"] == b"1"
    pq.write_table(table.replace_schema_metadata(version and {b"antiphon.token_stats": version}), path)
    with raises_with(RecordError, path=path if version in (b"2", b"0") else str(path)):
        read_segment(wide, 0, 1, AttemptId(0, 0, 0), 0)

"""One attempt is read from a rollout file as if the whole file were, from the row group that holds it."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from antiphon.core.errors import RecordError
from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    PolicyVersion,
    Sampling,
    Score,
    Segment,
    Trajectory,
    TrajectoryMeta,
    Turn,
)
from antiphon.record import safe_files, trajectories
from antiphon.record.trajectories import GROUP_TOKENS


def make(number, segments):
    meta = TrajectoryMeta(
        id=AttemptId(number, 1, 0),
        prompt_id=f"p{number}",
        task="t",
        started=PolicyVersion(0, 0),
        newest=PolicyVersion(0, 1),
        status=AttemptStatus.FINISHED,
        score=Score.of(number / 10),
    )
    parts = []
    for place in range(segments):
        size = 3 + number + place
        parts.append(
            Segment(
                tokens=np.arange(size, dtype=np.int32) + number,
                loss_mask=np.arange(size) > 1,
                logprobs=-np.arange(size, dtype=np.float32),
                versions=np.full(size, number, np.int32),
                turns=(Turn(start=2, stop=size, sampling=Sampling(max_tokens=9)),),
                parent=place - 1 if place else None,
            )
        )
    return Trajectory(meta=meta, payload=tuple(parts))


@pytest.fixture(params=[1, 4, 1000])
def file(tmp_path, request):
    """A file of 12 attempts, of which each third has several segments, in row groups of 1, 4 or all rows."""
    path = tmp_path / "whole.parquet"
    trajectories.write(path, 0, [make(number, 1 + 2 * (number % 3 == 0)) for number in range(12)])
    pq.write_table(pq.read_table(path), tmp_path / "rollouts.parquet", row_group_size=request.param)
    return tmp_path / "rollouts.parquet"


def test_attempt_equals_that_of_the_whole_file(file):
    whole = trajectories.read(file)
    assert len(whole) == 12
    for attempt, expected in whole.items():
        found = trajectories.read_attempt(file, attempt)
        assert found.meta == expected.meta
        for one, other in zip(found.segments, expected.segments, strict=True):
            assert (one.turns, one.parent) == (other.turns, other.parent)
            for name in ("tokens", "loss_mask", "logprobs", "versions"):
                assert np.array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(("count", "length"), [(1, 10), (400, 10), (40, GROUP_TOKENS // 10), (3, 2 * GROUP_TOKENS)])
def test_row_groups_have_about_as_many_tokens_as_one_read_may_take(tmp_path, count, length):
    """As many rows as that takes: one row each would make files large, and all in one would make reading slow."""
    path = tmp_path / "rollouts.parquet"
    attempts = []
    for number in range(count):
        whole = make(number, 1)
        zeros = np.zeros(length, np.int32)
        segment = replace(
            whole.segments[0],
            tokens=zeros,
            loss_mask=zeros > 0,
            logprobs=zeros.astype(np.float32),
            versions=zeros,
            turns=(),
        )
        attempts.append(replace(whole, payload=(segment,)))
    trajectories.write(path, 0, attempts)
    groups = pq.ParquetFile(path).metadata.num_row_groups
    assert groups == min(-(-count * length // GROUP_TOKENS), count)


def test_absent_attempt_is_none(file):
    assert trajectories.read_attempt(file, AttemptId(99, 0, 0)) is None


def test_rows_across_row_groups_are_read(file):
    whole = pq.read_table(file)
    for first, count in ((0, 1), (2, 5), (0, whole.num_rows), (whole.num_rows - 1, 1), (whole.num_rows, 3)):
        found = safe_files.read_rows(file, trajectories.SCHEMA, first, count)
        assert found.column("grp").to_pylist() == whole.column("grp").to_pylist()[first : first + count]


def test_only_the_row_groups_of_the_attempt_are_decoded(tmp_path, monkeypatch):
    path = tmp_path / "whole.parquet"
    trajectories.write(path, 0, [make(number, 1) for number in range(12)])
    pq.write_table(pq.read_table(path), path, row_group_size=4)
    asked = []
    original = pq.ParquetFile.iter_batches

    def record(self, *arguments, row_groups=None, **options):
        asked.append(row_groups)
        return original(self, *arguments, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", record)
    safe_files.read_rows(path, trajectories.SCHEMA, 5, 2)
    assert asked == [[1]]


def test_damaged_file_is_named(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(RecordError) as caught:
        trajectories.read_attempt(file, AttemptId(1, 1, 0))
    assert str(file) in str(caught.value)


def test_writer_limits_the_tokens_of_a_row_group(tmp_path, monkeypatch):
    monkeypatch.setattr("antiphon.record.trajectories.GROUP_TOKENS", 30)
    path = tmp_path / "rollouts.parquet"
    written = [make(number, 1) for number in range(12)]
    trajectories.write(path, 0, written)
    with pq.ParquetFile(path) as file:
        groups = [file.read_row_group(number, ["tokens"]) for number in range(file.num_row_groups)]
    sizes = [sum(len(row.as_py()) for row in group.column("tokens")) for group in groups]
    assert len(sizes) > 3 and max(sizes) <= 2 * 30  # by mean length: rows differ
    assert list(trajectories.read(path)) == [each.meta.id for each in written]

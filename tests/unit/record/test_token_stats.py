"""Numbers of every token on disk: what was written is read, as 16 bits hold it; other versions are refused."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from antiphon.core.errors import RecordError
from antiphon.core.types import AttemptId
from antiphon.record import token_stats
from antiphon.record.token_stats import SegmentStats
from tests.raising import raises_with

FIRST, SECOND = AttemptId(3, 0, 1), AttemptId(3, 1, 0)


@pytest.fixture
def run(tmp_path):
    """A step with two segments of one attempt, and one of another."""
    entropy = [np.array(values, np.float32) for values in ([0.5, np.nan], [2.0], [1e9, -1.0, 0.25])]
    places = [(FIRST, 0), (FIRST, 1), (SECOND, 0)]
    rows = [SegmentStats(*place, {"entropy": values}) for place, values in zip(places, entropy, strict=True)]
    token_stats.write(tmp_path, 0, 7, rows)
    return tmp_path


@pytest.mark.parametrize(
    ("attempt", "segment", "values"),
    [(FIRST, 0, [0.5, np.nan]), (FIRST, 1, [2.0]), (SECOND, 0, [65504.0, -1.0, 0.25])],
)
def test_each_segment_has_its_own(run, attempt, segment, values):
    read = token_stats.read_segment(run, 0, 7, attempt, segment)
    assert list(read) == ["entropy"]
    np.testing.assert_array_equal(read["entropy"], np.array(values, np.float32))


@pytest.mark.parametrize(
    ("lineage", "step", "attempt", "segment"),
    [(1, 7, FIRST, 0), (0, 8, FIRST, 0), (0, 7, FIRST, 2), (0, 7, AttemptId(4, 0, 1), 0)],
)
def test_what_was_not_recorded_is_empty(run, lineage, step, attempt, segment):
    assert token_stats.read_segment(run, lineage, step, attempt, segment) == {}


@pytest.mark.parametrize("version", ["0", "2"])
def test_files_of_other_versions_are_refused(run, version):
    path = run / token_stats.file_name(0, 7)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"antiphon.token_stats": version}), path)
    with raises_with(RecordError, match=f"has version {version}", path=path):
        token_stats.read_segment(run, 0, 7, FIRST, 0)

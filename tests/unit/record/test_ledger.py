"""The ledger: one writer, all of a batch or nothing, and clear errors; trajectories come back to the last bit."""

import asyncio
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from antiphon.core.errors import RecordError
from antiphon.core.types import (
    MIXED_CACHE,
    AttemptId,
    AttemptStatus,
    Failure,
    FinishReason,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    Segment,
    Streams,
    StreamSpec,
    Timing,
    Trajectory,
    TrajectoryMeta,
    Turn,
)
from antiphon.record import schema, trajectories
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger, run_synchronously
from antiphon.record.reader import RunReader
from antiphon.record.resume import Lineages, open_first_lineage
from antiphon.record.store import LedgerStore
from tests.raising import raises_with

PROMPT = Prompt(id="task/1", task="task", messages=())
VALUES = StreamSpec("values", "float32", (2, 3))
floats = st.floats(allow_nan=False, allow_infinity=False)


def trajectory(attempt, *segments, **meta):
    fields = {"status": AttemptStatus.FINISHED, "score": Score.of(0.5)} | meta
    version = PolicyVersion(0, 0)
    named = TrajectoryMeta(id=attempt, prompt_id="task/1", task="task", started=version, newest=version, **fields)
    return Trajectory(meta=named, payload=segments)


@st.composite
def segments(draw):
    length = draw(st.integers(1, 6))

    def array(dtype, elements=None):
        return draw(arrays.arrays(dtype, length, elements=elements))

    turns = draw(
        st.lists(
            st.builds(
                lambda reward, seconds, text, finish: Turn(
                    start=0,
                    stop=length,
                    sampling=Sampling(max_tokens=5, temperature=seconds, stop=(text,), seed=2**62 + 1),
                    finish=finish,
                    reward=reward,
                    state_key=text,
                    timing=Timing(queued=seconds),
                ),
                st.none() | floats,
                floats,
                st.text(st.characters(exclude_categories=["Cs"])),
                st.sampled_from(FinishReason),
            ),
            max_size=2,
        )
    )
    return Segment(
        tokens=array(np.int32),
        loss_mask=array(np.bool_),
        logprobs=array(np.float32),
        versions=array(np.int32),
        turns=tuple(turns),
        streams=Streams(
            {MIXED_CACHE: array(np.bool_), VALUES: draw(arrays.arrays(np.float32, (length, 2, 3)))}
            if draw(st.booleans())
            else {}
        ),
        parent=draw(st.none() | st.integers(0, 3)),
    )


@given(made=st.lists(st.lists(segments(), min_size=1, max_size=3), min_size=1, max_size=4))
def test_trajectories_come_back_to_the_last_bit(tmp_path_factory, made):
    path = tmp_path_factory.mktemp("rollouts") / "file.parquet"
    failure = Failure(source="reward", message="the grader was lost")
    written = [
        trajectory(AttemptId(5, sibling, 2), *pieces, failure=failure if sibling else None)
        for sibling, pieces in enumerate(made)
    ]
    trajectories.write(path, 3, written)
    back = trajectories.read(path)
    assert list(back) == [each.meta.id for each in written]
    for each in written:
        assert back[each.meta.id].meta == each.meta
        for ours, theirs in zip(each.segments, back[each.meta.id].segments, strict=True):
            assert (ours.turns, ours.parent) == (theirs.turns, theirs.parent)
            for name in ("tokens", "loss_mask", "logprobs", "versions"):
                assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes()
            assert {s: ours.streams[s].tobytes() for s in ours.streams} == {
                s: theirs.streams[s].tobytes() for s in theirs.streams
            }


def rows(directory, query):
    with closing(sqlite3.connect(directory / "ledger.db")) as db:
        return db.execute(query).fetchall()


def told(ledger):
    ledger.add_group(0, PROMPT, PolicyVersion(0, 0))
    ledger.add_attempt(AttemptId(0, 0, 0), PolicyVersion(0, 0))
    ledger.add_trajectory(trajectory(AttemptId(0, 0, 0)))
    ledger.set_status(AttemptId(0, 0, 0), AttemptStatus.FINISHED)
    ledger.balance = lambda: {"dispatched": 1}


def test_a_commit_holds_all_that_was_said(tmp_path):
    async def main():
        ledger = Ledger(LedgerStore(tmp_path), Events())
        told(ledger)
        assert rows(tmp_path, "SELECT * FROM attempts") == []
        await ledger.commit()
        assert rows(tmp_path, "SELECT status, score FROM attempts") == [("finished", 0.5)]
        assert rows(tmp_path, "SELECT task, id, epoch FROM prompts") == [("task", "task/1", 0)]
        assert rows(tmp_path, "SELECT status, attempts FROM balance") == [("dispatched", 1)]
        await ledger.close()

    asyncio.run(main())


def test_a_crash_loses_a_few_seconds_of_rows_at_most(tmp_path):
    """Nobody waits for a commit, and the rows of the last one are some seconds old: what comes next is written at once."""
    now = 100.0

    async def main():
        nonlocal now
        ledger = Ledger(LedgerStore(tmp_path), Events(clock=lambda: now), run=run_synchronously)
        committing = asyncio.ensure_future(ledger.commit_on_request())
        await ledger.commit()
        found = []
        for number, later in enumerate([1.0, 1.0, 30.0]):
            now += later
            ledger.add_attempt(AttemptId(0, number, 0), PolicyVersion(0, 0))
            ledger.add_trajectory(trajectory(AttemptId(0, number, 0)))
            for _ in range(5):  # turns of the loop
                await asyncio.sleep(0)
            found += rows(tmp_path, "SELECT count(*) FROM attempts")
        committing.cancel()
        await ledger.close()
        assert found == [(0,), (0,), (3,)]

    asyncio.run(main())


def test_what_is_said_during_a_commit_is_not_durable_with_it(tmp_path):
    async def main():
        disk = asyncio.Event()

        async def slowly(function, *args):
            await disk.wait()
            function(*args)

        ledger = Ledger(LedgerStore(tmp_path), Events(), run=slowly)
        told(ledger)
        commit = asyncio.ensure_future(ledger.commit())
        await asyncio.sleep(0)
        ledger.add_attempt(AttemptId(0, 1, 0), PolicyVersion(0, 0))
        ledger.add_trajectory(trajectory(AttemptId(0, 1, 0)))
        disk.set()
        await commit
        assert rows(tmp_path, "SELECT count(*) FROM attempts") == [(1,)]
        await ledger.wait_durable(ledger.sequence_number)
        assert rows(tmp_path, "SELECT count(*) FROM attempts") == [(2,)]
        await ledger.close()

    asyncio.run(main())


def test_of_a_batch_that_fails_nothing_is_there(tmp_path):
    async def main():
        store = LedgerStore(tmp_path)
        ledger = Ledger(store, Events(), run=run_synchronously)
        told(ledger)
        ledger.set_status(AttemptId(0, 0, 0), AttemptStatus.TRAINED)
        ledger._add_statement("INSERT INTO nowhere VALUES (?)")
        with raises_with(RecordError, match="--resume", path=tmp_path / "ledger.db"):
            await ledger.commit()
        assert rows(tmp_path, "SELECT * FROM attempts") == []
        ledger.add_attempt(AttemptId(1, 0, 0), PolicyVersion(0, 0))
        with raises_with(RecordError, path=tmp_path / "ledger.db"):
            await ledger.commit()  # what comes later means nothing without what was lost
        assert rows(tmp_path, "SELECT * FROM attempts") == []
        await ledger.close()

    asyncio.run(main())


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path):
    store = LedgerStore(tmp_path)
    with raises_with(RecordError, match="process", path=tmp_path):
        LedgerStore(tmp_path)
    store.close()
    LedgerStore(tmp_path).close()


def set_version(run, version):
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        db.execute(f"PRAGMA user_version = {version}")


def test_newer_schema_is_refused(tmp_path):
    LedgerStore(tmp_path).close()
    set_version(tmp_path, schema.VERSION + 1)
    for opens in (LedgerStore, RunReader.open):
        with raises_with(RecordError, match=f" {schema.VERSION + 1}", path=tmp_path / "ledger.db"):
            opens(tmp_path)


@pytest.mark.parametrize("version", [0, 1])
def test_ledger_of_an_older_version_is_read_and_upgraded(tmp_path, version):
    store = LedgerStore(tmp_path)
    open_first_lineage(store)
    with store.connection as db:
        db.execute("DROP TABLE credit")
    store.close()
    set_version(tmp_path, version)
    with RunReader.open(tmp_path) as reader:
        assert [row.lineage for row in reader.list_lineages()] == [0]
    LedgerStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
        assert db.execute("SELECT count(*) FROM lineages").fetchone() == (1,)
        assert db.execute("SELECT count(*) FROM credit").fetchone() == (0,)


def test_a_file_that_is_no_ledger_is_named(tmp_path):
    (tmp_path / "ledger.db").write_bytes(b"not a database" * 100)
    with raises_with(RecordError, path=tmp_path / "ledger.db"):
        LedgerStore(tmp_path)


def test_versions_are_one_where_lives_agree():
    lineages = Lineages({0: (None, 0), 1: (0, 4), 2: (0, 4), 3: (2, 6)})
    assert lineages.is_current(0, 4, 3) and lineages.is_current(1, 4, 3) and lineages.is_current(2, 6, 3)
    assert not lineages.is_current(0, 5, 3), "0 went on after the cut, and that was undone"
    assert not lineages.is_current(1, 5, 3), "1 was given up"
    assert not lineages.is_current(2, 7, 3)
    assert lineages.find_origin(3, 5) == (2, 5) and lineages.find_origin(3, 2) == (0, 2)

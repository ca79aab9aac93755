"""Trajectories that are kept where they end: one file for what comes together, and references to it."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pytest

from antiphon.core import failpoints as points
from antiphon.core.errors import RecordError
from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    Group,
    GroupOutcome,
    PayloadReference,
    PlacedImage,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    Segment,
    TextStatistics,
    Trajectory,
    TrajectoryMeta,
    Turn,
)
from antiphon.record import trajectories
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger, run_synchronously
from antiphon.record.payloads import PayloadReader, PayloadWriter
from antiphon.record.store import LedgerStore
from tests.raising import raises_with

NOW = PolicyVersion(2, 0)
PROMPT = Prompt(id="task/1", task="task", messages=())


def made(sibling, length=4):
    segment = Segment(
        tokens=np.arange(length, dtype=np.int32) + sibling,
        loss_mask=np.ones(length, np.bool_),
        logprobs=np.full(length, -0.5, np.float32),
        versions=np.zeros(length, np.int32),
        turns=(Turn(start=0, stop=length, sampling=Sampling(max_tokens=9)),),
    )
    meta = TrajectoryMeta(
        id=AttemptId(1, sibling, 0),
        prompt_id=PROMPT.id,
        task=PROMPT.task,
        started=NOW,
        newest=NOW,
        status=AttemptStatus.FINISHED,
        score=Score.of(1.0),
        wording=TextStatistics(0.25, 7),
    )
    return Trajectory(meta=meta, payload=(segment,))


def group(*members):
    return Group(id=1, prompt=PROMPT, trajectories=members, outcome=GroupOutcome.COMPLETE)


def kept(folder, *siblings):
    async def body():
        files = PayloadWriter(folder, "lineage-2-rollout-0", 2)
        return await asyncio.gather(*(files.write(made(sibling)) for sibling in siblings))

    return asyncio.run(body())


@pytest.fixture
def held():
    """The first file is not written to its end before this is set."""
    release, first = threading.Event(), threading.Event()

    def look(point, path):
        if point == "rollouts.write" and not first.is_set():
            first.set()
            assert release.wait(60)

    points.watch(look)
    yield first, release
    points.watch(None)


def test_what_ends_while_a_file_is_written_goes_into_the_next(tmp_path, held):
    first, release = held

    async def body():
        files = PayloadWriter(tmp_path, "lineage-2-rollout-0", 2)
        alone = asyncio.create_task(files.write(made(0)))
        await asyncio.to_thread(first.wait, 60)
        others = [asyncio.create_task(files.write(made(sibling))) for sibling in (1, 2, 3)]
        await asyncio.sleep(0)
        alone.cancel()
        others[0].cancel()
        assert [file.name[0] for file in tmp_path.iterdir()] == ["."], "a file that is not whole has no name of its own"
        release.set()
        rest = await asyncio.gather(*others[1:])
        await files.close()
        return rest

    rest = asyncio.run(body())
    assert [each.payload.file for each in rest] == ["lineage-2-rollout-0-000001.parquet"] * 2
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"lineage-2-rollout-0-00000{n}.parquet" for n in (0, 1)]
    assert len(trajectories.read(tmp_path / "lineage-2-rollout-0-000001.parquet")) == 3, (
        "who was cancelled takes nobody along"
    )


def test_what_is_fetched_is_what_was_kept(tmp_path):
    referred = kept(tmp_path, 0, 1)
    taken_over = trajectories.with_id(referred[1], AttemptId(8, 0, 0))
    (fetched,) = PayloadReader(tmp_path).fetch([group(referred[0], taken_over, made(2))])
    assert [each.meta for each in fetched.trajectories] == [made(0).meta, taken_over.meta, made(2).meta]
    for sibling, each in enumerate(fetched.trajectories):
        assert trajectories.digest(each) == trajectories.digest(made(sibling))
    assert trajectories.read_metas(tmp_path / referred[0].payload.file)[AttemptId(1, 0, 0)] == made(0).meta


def test_changed_payload_is_refused(tmp_path):
    (referred,) = kept(tmp_path, 0)
    path = tmp_path / referred.payload.file
    trajectories.write(path, 2, [made(0, length=5)])
    with raises_with(RecordError, match=r"1\.0\.0", path=path):
        PayloadReader(tmp_path).fetch([group(referred)])
    path.unlink()
    with raises_with(RecordError, match=r"record\.directory", path=path):
        PayloadReader(tmp_path).fetch([group(referred)])


def test_payload_elsewhere_is_refused(tmp_path):
    """The very trajectory lies there, but a worker is not to choose which files are opened."""
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    (referred,) = kept(rollouts, 0)
    outside = (rollouts / referred.payload.file).rename(tmp_path / "outside.parquet")
    link = rollouts / "link.parquet"
    link.symlink_to(outside)
    for name in ("../outside.parquet", str(outside), "link.parquet"):
        elsewhere = replace(referred, payload=replace(referred.payload, file=name))
        with raises_with(RecordError, match="leads out", path=rollouts / name):
            PayloadReader(rollouts).fetch([group(elsewhere)])


def test_a_disk_that_cannot_be_written_is_one_clear_error(tmp_path):
    with raises_with(RecordError, match="--resume") as caught:
        kept(tmp_path / "nowhere", 0)
    assert Path(caught.value.path).is_relative_to(tmp_path / "nowhere")


def test_ledger_refers_to_payloads_in_other_files(tmp_path):
    async def body():
        store = LedgerStore(tmp_path)
        referred = (await PayloadWriter(store.rollouts, "lineage-2-rollout-0", 2).write(made(0))).payload
        ledger = Ledger(store, Events(), lineage=2, run=run_synchronously)
        ledger.add_group(1, PROMPT, NOW)
        for sibling, payload in enumerate((referred, made(1).payload, ())):
            ledger.add_attempt(AttemptId(1, sibling, 0), NOW)
            ledger.add_trajectory(replace(made(sibling), payload=payload))
        ledger.add_attempt(AttemptId(1, 3, 0), NOW)
        older = PayloadReference("lineage-1-rollout-4-000007.parquet", AttemptId(5, 0, 0), 99)
        ledger.add_reused_trajectory(replace(made(3), payload=older), "1:5.0.0", older.file)
        await ledger.commit()
        rows = store.connection.execute("SELECT file, digest, origin FROM attempts ORDER BY sibling").fetchall()
        await ledger.close()
        return referred, rows

    referred, rows = asyncio.run(body())
    own = trajectories.digest(made(1))
    assert rows == [
        (referred.file, referred.digest, None),
        ("000000.parquet", own, None),
        (None, None, None),
        ("lineage-1-rollout-4-000007.parquet", 99, "1:5.0.0"),
    ]
    LedgerStore(tmp_path).close()  # numbers its files on
    assert len(list((tmp_path / "rollouts").iterdir())) == 2


def test_a_part_of_a_column_of_lists_is_split_as_the_whole():
    whole = pa.array([[1, 2], [], [3], [4, 5, 6], []], pa.list_(pa.int32()))
    for begin, count in ((0, 5), (2, 2), (1, 4), (3, 0)):
        part = whole.slice(begin, count)
        assert [each.tolist() for each in trajectories._split(pa.chunked_array([part]))] == part.to_pylist()


def with_images(sibling, *images):
    """A trajectory whose segment has images of two tokens each."""
    trajectory = made(sibling, 2 * max(len(images), 2))
    placed = tuple(PlacedImage(image, 2 * number, 2 * number + 2) for number, image in enumerate(images))
    return replace(trajectory, payload=(replace(trajectory.segments[0], images=placed),))


def test_images_are_kept_once_and_found_again(tmp_path):
    files = PayloadWriter(tmp_path, "lineage-2-rollout-0", 2)

    async def body():
        written = await asyncio.gather(
            *(files.write(with_images(n, *images)) for n, images in enumerate(([b"a"], [b"a", b"b"], [])))
        )
        return [*written, await files.write(with_images(3, b"b"))]

    references = asyncio.run(body())
    (found,) = PayloadReader(tmp_path).fetch([group(*references)])
    images = [each.segments[0].images for each in found.trajectories]
    assert [[image.data for image in each] for each in images] == [[b"a"], [b"a", b"b"], [], [b"b"]]
    assert images[1][1] == PlacedImage(b"b", 2, 4)
    assert len(list((tmp_path / "_images").iterdir())) == 2
    assert len(pandas.read_parquet(tmp_path)) == 4  # as the page on the record reads it
    one = references[1].payload
    assert trajectories.read_attempt(tmp_path / one.file, one.attempt).segments[0].images == images[1]


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"another")], ids=["gone", "changed"]
)
def test_image_that_is_not_the_recorded_one_is_named(tmp_path, damage):
    files = PayloadWriter(tmp_path, "lineage-2-rollout-0", 2)
    written = asyncio.run(files.write(with_images(0, b"a")))
    (image,) = (tmp_path / "_images").iterdir()
    damage(image)
    with pytest.raises(RecordError) as raised:
        PayloadReader(tmp_path).fetch([group(written)])
    assert image.name in str(raised.value)


def test_exchanged_images_are_another_trajectory():
    one, other, moved = with_images(0, b"a", b"b"), with_images(0, b"b", b"a"), with_images(0, b"a")
    assert len({trajectories.digest(each) for each in (one, other, moved)}) == 3

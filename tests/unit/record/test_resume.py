"""What a resume finds in the directory of a run that was killed, damaged or ended, and what it makes of it."""

import asyncio
import json
from contextlib import AsyncExitStack, closing
from types import SimpleNamespace

import numpy as np
import pytest

from antiphon.core import failpoints
from antiphon.core.errors import RecordError
from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    Segment,
    Trajectory,
    TrajectoryMeta,
    Turn,
)
from antiphon.record import trajectories
from antiphon.record.checkpoint import checkpoint_name, publish_checkpoint, staging_dir
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger, run_synchronously
from antiphon.record.reader import RunReader
from antiphon.record.resume import find_reusable, open_first_lineage, open_next_lineage
from antiphon.record.run_dir import RunDirectory
from antiphon.record.store import LedgerStore
from antiphon.run.launch.record import _open_events

START = PolicyVersion(0, 0)
GROUPS = 4  # of an attempt each, with a file each


def made(group):
    segment = Segment(
        tokens=np.arange(4, dtype=np.int32),
        loss_mask=np.ones(4, np.bool_),
        logprobs=np.zeros(4, np.float32),
        versions=np.zeros(4, np.int32),
        turns=(Turn(start=0, stop=4, sampling=Sampling(max_tokens=4)),),
    )
    meta = TrajectoryMeta(
        id=AttemptId(group, 0, 0),
        prompt_id=f"task/{group}",
        task="task",
        started=START,
        newest=START,
        status=AttemptStatus.FINISHED,
        score=Score.of(1.0),
    )
    return Trajectory(meta=meta, payload=(segment,))


async def record(run):
    store = LedgerStore(run)
    open_first_lineage(store)
    ledger = Ledger(store, Events(), run=run_synchronously)
    for group in range(GROUPS):
        ledger.add_group(group, Prompt(id=f"task/{group}", task="task", messages=()), START)
        ledger.add_attempt(AttemptId(group, 0, 0), START)
        ledger.add_trajectory(made(group))
        ledger.set_status(AttemptId(group, 0, 0), AttemptStatus.FINISHED)
        await ledger.commit()
    await ledger.close()


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory.create(tmp_path, "run")
    asyncio.run(record(directory.path))
    place = directory.checkpoints / checkpoint_name(0)
    publish_checkpoint(staging_dir(place), place, {"step": 0, "version": 0, "lineage": 0, "scheduler": {}})
    return directory


@pytest.mark.parametrize("refer", [False, True])
def test_files_that_cannot_be_read_are_not_reused(run, refer):
    whole, gone, torn, other = (run.rollouts / f"{number:06d}.parquet" for number in range(GROUPS))
    gone.unlink()
    torn.write_bytes(torn.read_bytes()[:100])
    trajectories.write(other, 0, [made(9)])
    told = []
    with closing(LedgerStore(run.path)) as store:
        found = open_next_lineage(store, run.checkpoints, 1, told.append, refer=refer)
        assert [key.id for key in found.reusable.by_prompt] == ["task/0"] and whole.exists()
        assert [line.split()[0] for line in told] == [f"rollouts/{file.name}" for file in (gone, torn, other)]
        with pytest.raises(RecordError):  # a replay needs them all
            find_reusable(RunReader(run.path, store.connection), found.lineage, 0, 0, refer=refer)


def test_a_step_has_the_attempts_of_the_one_that_stands(run):
    with closing(LedgerStore(run.path)) as store, store.connection as db:
        db.execute("UPDATE attempts SET step = 1 + grp / 2")
        db.executemany(
            "INSERT INTO steps (lineage, step, taken, took, undone) VALUES (0, ?, 0, 0, ?)", [(1, 0), (2, 1)]
        )
    with RunReader.open(run.path) as reader:
        found = {step: [row.id.group for row in reader.iterate_finished(step, "", "grp")] for step in (1, 2, None)}
    assert found == {1: [0, 1], 2: [], None: [0, 1, 2, 3]}


def test_a_kill_leaves_no_torn_trajectories(run):
    (run.rollouts / "000000 copy.parquet").write_bytes(b"a user's")
    names = []

    def die(point, path):
        if point == "rollouts.write":
            names.extend(file.name for file in run.rollouts.glob("0*.parquet"))
            raise MemoryError

    async def main():
        ledger = Ledger(LedgerStore(run.path), Events(), run=run_synchronously)
        ledger.add_group(8, Prompt(id="task/8", task="task", messages=()), START)
        ledger.add_attempt(AttemptId(8, 0, 0), START)
        ledger.add_trajectory(made(8))
        failpoints.watch(die)
        try:
            with pytest.raises(MemoryError):
                await ledger.commit()
        finally:
            failpoints.watch(None)
            ledger._store.close()

    asyncio.run(main())
    assert sorted(names) == ["000000 copy.parquet", *(f"{number:06d}.parquet" for number in range(GROUPS))]


def test_a_torn_line_of_events_spoils_no_trace(run):
    taken = {"event": "take", "groups": [1]}
    damaged = '{"t": 0.5, "ev{"t": 0.6, "event": "load"}\n'  # of a run of an older version
    run.events.write_text(json.dumps({"t": 0.0, **taken}) + "\n" + damaged + '{"t": 1.0, "event": "ta')
    config = SimpleNamespace(record=SimpleNamespace(events=True, spans=""))

    async def main():
        async with AsyncExitStack() as stack:
            _open_events(config, run, 0, stack).add("publish", version=1)

    asyncio.run(main())
    lines = run.events.read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[2])["event"] == "publish"
    assert "step 1" in {event["name"] for event in json.loads(run.trace.read_text())["traceEvents"]}

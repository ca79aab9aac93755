"""What is said to be durable is, by the kernel's account: after a crash at that moment it is there."""

import shutil
import sqlite3
from contextlib import closing

import pytest

from antiphon.inspect.audit import audit
from antiphon.record import trajectories
from antiphon.record.checkpoint import list_checkpoints, newest_checkpoint, verify_checkpoint
from antiphon.record.notes import Notes, read_notes
from tests.system.disk import SUPPORTED, watched

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="hears system calls of Linux on x86_64 and aarch64")

LEDGER = """
import asyncio
from pathlib import Path
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger
from antiphon.record.store import LedgerStore
from antiphon.core.types import *
import numpy as np
from tests.unit.record.test_ledger import told, trajectory
piece = Segment(tokens=np.arange(4, dtype=np.int32), loss_mask=np.ones(4, bool), logprobs=np.zeros(4, np.float32),
                versions=np.zeros(4, np.int32), turns=())
async def main():
    ledger = Ledger(LedgerStore(Path(sys.argv[1])), Events())
    told(ledger)
    await ledger.wait_durable(ledger.sequence_number)
    mark("first")
    ledger.add_attempt(AttemptId(0, 1, 0), PolicyVersion(0, 0))
    ledger.add_trajectory(trajectory(AttemptId(0, 1, 0), piece))
    await ledger.wait_durable(ledger.sequence_number)
    mark("second")
    await ledger.close()
asyncio.run(main())
"""


def test_what_the_ledger_calls_durable_is(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    moments = watched(LEDGER, str(run))
    for moment, count in (("first", 1), ("second", 2)):
        left = moments[moment].lay_out(run, tmp_path / moment)
        with closing(sqlite3.connect(left / "ledger.db")) as db:
            rows = db.execute("SELECT sibling, file FROM attempts WHERE score IS NOT NULL ORDER BY sibling").fetchall()
        assert len(rows) == count, moment
    (found,) = trajectories.read(left / "rollouts" / rows[1][1]).values()
    assert found.segments[0].tokens.tolist() == [0, 1, 2, 3]


CHECKPOINT = """
from pathlib import Path
from antiphon.record.run_dir import write_json
from tests.unit.record.test_checkpoint import make
run = Path(sys.argv[1])
write_json(run / "run.json", {"step": 3})
mark("written")
make(run / "checkpoints", 3)
write_json(run / "other.json", {})
mark("made")
make(run / "checkpoints", 6)
mark("made-again")
"""


def test_a_checkpoint_that_was_made_is_whole(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    moments = watched(CHECKPOINT, str(run))
    written = moments["written"].lay_out(run, tmp_path / "written")
    assert (written / "run.json").read_text() == '{\n  "step": 3\n}\n'
    for moment, name in (("made", "step_000003"), ("made-again", "step_000006")):
        left = moments[moment].lay_out(run, tmp_path / moment)
        found = newest_checkpoint(left / "checkpoints", lambda text: pytest.fail(text))
        assert found is not None and found.name == name
        verify_checkpoint(found)


NOTES = """
from pathlib import Path
from antiphon.record.notes import write_notes
run = Path(sys.argv[1])
os.fsync(os.open(run, os.O_RDONLY))
for text in ("once", "twice", ""):
    write_notes(run, ["kept"] if text else [], text)
    mark(text or "removed")
"""


def test_notes_that_were_saved_are_there(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("name: run\n")
    moments = watched(NOTES, str(run))
    for text in ("once", "twice"):
        assert read_notes(moments[text].lay_out(run, tmp_path / text)) == Notes(("kept",), text)
    assert read_notes(moments["removed"].lay_out(run, tmp_path / "removed")) == Notes()


TRAIN = """
from pathlib import Path
from antiphon.cli.app import main
os.chdir(Path(sys.argv[1]).parent)
sys.argv = ["antiphon", "train", sys.argv[1]]
try:
    main()
except SystemExit as error:
    assert not error.code, error.code
"""


def test_a_whole_run_is_left_by_a_crash_at_its_end(project, tmp_path):
    """The learner writes checkpoints in a process of its own: there too the calls are heard."""
    path = project.config(steps=3, checkpoint={"every": 1})
    (project.folder / "runs").mkdir(exist_ok=True)
    moments = watched(TRAIN, str(path))
    run = project.folder / "runs" / "run"
    left = moments["end"].lay_out(run, tmp_path / "left")
    for name in ("config.yaml", "metrics.jsonl", "summary.json"):
        if not (left / name).exists() and (run / name).exists():
            shutil.copy(run / name, left / name)  # told to people, and made again by a resume
    assert [place.name for place in list_checkpoints(left / "checkpoints")] == [
        place.name for place in list_checkpoints(run / "checkpoints")
    ]
    for place in list_checkpoints(left / "checkpoints"):
        verify_checkpoint(place)
    assert not audit(left).violations


STAGE = """
import __main__
async def begin(step):
    __main__.mark(f"step-{step.number}")
"""


def test_what_is_trained_on_is_on_a_slow_disk_before(project, tmp_path):
    """A step that did not wait for its trajectories would begin while the disk is still at work on them."""
    (project.folder / "probe.py").write_text(STAGE)
    stages = ["probe:begin", "annotate", "rewards", "advantages", "update_critics", "update_actor"]
    path = project.config(steps=3, learner={"stages": stages}, checkpoint={"every": 100})
    moments = watched(TRAIN, str(path), latency=0.1)
    run = project.folder / "runs" / "run"
    trained = "SELECT grp, sibling FROM attempts WHERE step = ?"
    graded = "SELECT grp, sibling FROM attempts WHERE score IS NOT NULL"
    for step in (1, 2, 3):
        left = moments[f"step-{step}"].lay_out(run, tmp_path / f"left-{step}")
        with closing(sqlite3.connect(run / "ledger.db")) as all_, closing(sqlite3.connect(left / "ledger.db")) as then:
            wanted = set(all_.execute(trained, (step,)))
            assert len(wanted) == 8 and wanted <= set(then.execute(graded)), step

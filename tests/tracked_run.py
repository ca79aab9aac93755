"""A small run's record with trackers, in a process of its own: `python -m tests.tracked_run RUN TRACKERS LINEAGE CUT FIRST LAST
[kill]`, where TRACKERS is the section `record.trackers` as JSON."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from antiphon.record.metrics import Metrics
from antiphon.record.run_dir import RunDirectory
from antiphon.record.trackers import TrackedRun, TrackersConfig, open_trackers

ROW = {"prompt": "2+2=", "completion": "4 | four", "reward": 1.0, "advantage": 0.5, "outcome": "trained"}


def write_steps(run: TrackedRun, first: int, last: int, notify=lambda: None, phase: str = "") -> None:
    """Write steps whose values name their lineage."""
    counter = "sft_step" if phase else "step"
    with Metrics(run.directory.metrics, lineage=run.lineage) as metrics:
        for step in range(first, last + 1):
            if not phase:
                rows = [{"attempt": f"{run.lineage}:{step}.0.0", **ROW}]
                with run.directory.samples.open("a") as samples:
                    samples.write(json.dumps({"step": step, "lineage": run.lineage, "rows": rows}) + "\n")
            metrics.record_all({f"{phase}reward/mean": run.lineage + step / 100, f"{phase}loss": float("nan")})
            metrics.flush(step, counter)
            notify()


def main(folder: str, trackers: str, lineage: str, cut: str, first: str, last: str, kill: str = "") -> None:
    path = Path(folder)
    if int(lineage) == 0:
        RunDirectory.create(path.parent, path.name).write_config("name: tracked\nrollout: {group_size: 4}\n")
    run = TrackedRun(name="tracked", directory=RunDirectory(path), lineage=int(lineage), cut=int(cut))
    if not run.lineage:
        write_steps(run, 1, 3, phase="sft/")
    feeds = open_trackers(TrackersConfig.model_validate(json.loads(trackers)), run, time.time, print)
    write_steps(run, int(first), int(last), feeds.notify)
    if kill:
        for name in json.loads(trackers):  # until they have seen the last step
            state = path / name / "run.json"
            while not state.exists() or json.loads(state.read_bytes()).get("train") != int(last):
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoint = path / "checkpoints" / f"step_{int(last):06d}"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    run.directory.write_summary({})
    feeds.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Trackers write what others read back."""

import subprocess
import sys
from pathlib import Path

from antiphon.core.config import load
from antiphon.core.errors import ConfigError
from antiphon.record.config import RecordConfig
from antiphon.record.trackers import open_trackers
from tests.raising import raises_with

ROOT = Path(__file__).parents[3]


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    times = iter([1000.0, 1001.0])
    (tracker,) = open_trackers(["tensorboard"], tmp_path, lambda: next(times))
    tracker.log(1, {"reward/mean": 0.25, "age/max": 1})
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["age/max", "reward/mean"]
    rewards = [(event.step, event.value, event.wall_time) for event in events.Scalars("reward/mean")]
    assert rewards == [(1, 0.25, 1000.0), (2, 0.5, 1001.0)]


OWN_TRACKER = """
class Keeping:
    def __init__(self, directory, clock):
        self.directory, self.logged = directory, []

    def log(self, step, metrics):
        self.logged.append((step, dict(metrics)))

    def close(self):
        pass
"""


def test_own_tracker_is_named_in_the_configuration(tmp_path, monkeypatch):
    (tmp_path / "own_tracker.py").write_text(OWN_TRACKER)
    (tmp_path / "record.yaml").write_text('trackers: ["own_tracker:Keeping"]\n')
    monkeypatch.syspath_prepend(tmp_path)
    config = load(tmp_path / "record.yaml", model=RecordConfig)
    (tracker,) = open_trackers(config.trackers, tmp_path, float)
    tracker.log(1, {"x": 2.0})
    assert tracker.logged == [(1, {"x": 2.0})] and tracker.directory.parent == tmp_path


def test_unknown_tracker_is_refused(tmp_path):
    fields = {"value": "tensorbord", "valid": ("tensorboard",), "suggestions": ("tensorboard",)}
    with raises_with(ConfigError, key="trackers.0", **fields):
        load(None, ["trackers=[tensorbord]"], model=RecordConfig)
    with raises_with(ConfigError, **fields):
        open_trackers(["tensorbord"], tmp_path, float)


def test_tracking_and_viewing_import_no_torch(tmp_path):
    script = f"""
import sys
from pathlib import Path
from antiphon.record import live, metrics, run_dir
from antiphon.record.trackers import open_trackers
open_trackers(["tensorboard"], Path({str(tmp_path)!r}), float)[0].close()
print(*({{"torch", "tensorflow"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []

"""Trackers write what others read back."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from antiphon.core.config import dump, load
from antiphon.core.errors import ConfigError
from antiphon.record.config import RecordConfig
from antiphon.record.run_dir import RunDirectory
from antiphon.record.trackers import TrackedRun, TrackersConfig, open_trackers
from antiphon.record.trackers.feed import FAILURES
from tests.raising import raises_with
from tests.tracked_run import ROW, write_steps
from tests.tracker_readers import (
    READERS,
    mlflow_client,
    swanlab_records,
    trackio_environment,
    trackio_run,
    wandb_records,
)

ROOT = Path(__file__).parents[3]
OPTIONS = {"tensorboard": {}, "wandb": {"mode": "offline"}, "mlflow": {}, "trackio": {}, "swanlab": {"mode": "offline"}}


def record(run, tracker, *arguments):
    """Record steps of a lineage in a process of its own; the arguments are lineage, cut, first, last, and perhaps kill."""
    command = [sys.executable, "-m", "tests.tracked_run", str(run), json.dumps({tracker: OPTIONS[tracker]})]
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, env=trackio_environment(run)
    )
    assert done.returncode == (-signal.SIGKILL if "kill" in arguments else 0), done.stderr
    assert "failed (" not in done.stdout
    return done


def values(*lineages):
    """Points of steps from 1: the value of each names the lineage that logged it."""
    return [(step, pytest.approx(lineage + step / 100)) for step, lineage in enumerate(lineages, 1)]


@pytest.mark.parametrize("tracker", OPTIONS)
def test_metrics_are_read_back_by_step(tmp_path, tracker):
    run = tmp_path / "run"
    record(run, tracker, 0, 0, 1, 5)
    assert READERS[tracker](run, "reward/mean") == values(0, 0, 0, 0, 0)
    assert READERS[tracker](run, "sft/reward/mean") == values(0, 0, 0)


# Steps 4 and 5 were undone by a resume after step 3. Some libraries cannot take back what they were sent.
AFTER_RESUME = {"mlflow": (0, 0, 0, 0, 0, 1, 1), "trackio": (0, 0, 0, 0, 0, 1, 1)}


@pytest.mark.parametrize("how", ["kill", "close"])
@pytest.mark.parametrize("tracker", OPTIONS)
def test_resume_continues_the_same_history(tmp_path, tracker, how):
    run = tmp_path / "run"
    record(run, tracker, 0, 0, 1, 5, *(["kill"] if how == "kill" else []))
    identity = json.loads((run / tracker / "run.json").read_bytes()).get("id")
    record(run, tracker, 1, 3, 4, 7)
    assert json.loads((run / tracker / "run.json").read_bytes()).get("id") == identity
    points = READERS[tracker](run, "reward/mean")
    assert [step for step, _ in points] == [1, 2, 3, 4, 5, 6, 7]
    expected = [values(*AFTER_RESUME.get(tracker, (0, 0, 0, 1, 1, 1, 1)))]
    if tracker == "trackio" and how == "kill":  # what its own queue held was lost, and is sent again
        expected += [values(0, 0, 0, *undone, *([1] * (4 - len(undone)))) for undone in ((), (0,))]
    assert points in expected
    assert READERS[tracker](run, "sft/reward/mean") == values(0, 0, 0)


def test_tensorboard_shows_configuration_and_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path / "run", "tensorboard", 0, 0, 1, 2)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    (config,) = events.Tensors("config")
    assert b"group_size: 4" in config.tensor_proto.string_val[0]
    tables = events.Tensors("samples")
    assert [table.step for table in tables] == [1, 2]
    assert b"4 \\| four" in tables[0].tensor_proto.string_val[0]
    (model,) = events.Tensors("model")
    assert model.tensor_proto.string_val[0].endswith(b"step_000002")


def test_wandb_has_configuration_samples_and_model(tmp_path):
    run = tmp_path / "run"
    record(run, "wandb", 0, 0, 1, 2)
    records = list(wandb_records(run))
    config = {item.key: item.value_json for each in records for item in each.run.config.update}
    assert json.loads(config["rollout"]) == {"group_size": 4}
    tables = [json.loads(file.read_bytes()) for file in run.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert sorted(table["data"][0][0] for table in tables) == ["0:1.0.0", "0:2.0.0"]
    assert tables[0]["columns"][1:] == list(ROW) and tables[0]["data"][0][1:] == list(ROW.values())
    artifacts = [each.request.log_artifact.artifact for each in records if each.request.HasField("log_artifact")]
    artifacts += [each.artifact for each in records if each.HasField("artifact")]
    contents = {entry.path: entry.ref for artifact in artifacts for entry in artifact.manifest.contents}
    assert contents["model/model.safetensors"].endswith("/checkpoints/step_000002/model.safetensors")
    assert "config.yaml" in contents


def test_mlflow_has_configuration_samples_and_model(tmp_path):
    run = tmp_path / "run"
    record(run, "mlflow", 0, 0, 1, 2)
    client, identity = mlflow_client(run), json.loads((run / "mlflow" / "run.json").read_bytes())["id"]
    found = client.get_run(identity)
    assert found.info.status == "FINISHED" and found.info.run_name == "tracked"
    assert found.data.params["rollout.group_size"] == "4"
    assert found.data.tags["model"].endswith("/checkpoints/step_000002")
    (table,) = (run / "mlflow" / "artifacts" / identity).rglob("step_000001.json")
    read = json.loads(table.read_bytes())
    assert dict(zip(read["columns"], read["data"][0], strict=True)) == {"attempt": "0:1.0.0", **ROW}
    assert {each.path for each in client.list_artifacts(identity)} == {"config.yaml", "samples"}


def test_trackio_has_configuration_and_samples(tmp_path):
    run = tmp_path / "run"
    record(run, "trackio", 0, 0, 1, 2)
    found = trackio_run(run)
    assert found["runs"] == 1 and found["config"]["rollout"] == {"group_size": 4}
    tables = [row["samples"]["_value"] for row in found["rows"] if "samples" in row]
    assert [table[0] for table in tables] == [{"attempt": f"0:{step}.0.0", **ROW} for step in (1, 2)]


def test_swanlab_has_configuration_samples_and_model(tmp_path):
    run = tmp_path / "run"
    record(run, "swanlab", 0, 0, 1, 2)
    texts = {}
    for each in swanlab_records(run):
        if each.HasField("media"):
            (item,) = each.media.value.items
            (file,) = run.rglob(item.filename)
            texts[each.media.key, each.media.step] = file.read_text()
    assert set(texts) == {("samples", 1), ("samples", 2), ("model", 0)}
    assert "0:1.0.0" in texts["samples", 1] and "checkpoints/step_000002" in texts["model", 0]
    (config,) = run.glob("swanlab/run-*/files/config.yaml")
    assert "group_size" in config.read_text()


# --- trackers of the user's own, and trackers that fail -----------------------------------------------------------------

OWN_TRACKER = """
import threading
released = threading.Event()

class Keeping:
    logged, closed = [], []

    def __init__(self, directory, clock, **options):
        self.directory, self.options = directory, options

    def log(self, step, metrics):
        self.logged.append((step, metrics["reward/mean"]))

    def close(self):
        self.closed.append((self.directory, self.options))

class Failing(Keeping):
    calls, fails = 0, 10**9

    def log(self, step, metrics):
        type(self).calls += 1
        if self.calls <= self.fails:
            raise OSError("no space left")
        super().log(step, metrics)

class Leaving(Failing):
    def log(self, step, metrics):
        raise SystemExit("bye")

class Hanging(Keeping):
    def log(self, step, metrics):
        released.wait()
        super().log(step, metrics)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of trackers, imported anew."""
    (tmp_path / "own_tracker.py").write_text(OWN_TRACKER)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_tracker", None)
    import own_tracker

    yield own_tracker
    own_tracker.released.set()


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory.create(tmp_path, "run")
    directory.write_config("name: tracked\n")
    return TrackedRun(name="tracked", directory=directory)


def start(name, run, said):
    return open_trackers(TrackersConfig.model_validate({name: {}}), run, float, said.append)


def test_own_tracker_is_named_in_the_configuration(own, run, tmp_path):
    for text in ('trackers: ["own_tracker:Keeping"]\n', 'trackers: {"own_tracker:Keeping": {color: red}}\n'):
        (tmp_path / "record.yaml").write_text(text)
        config = load(tmp_path / "record.yaml", model=RecordConfig)
        (tmp_path / "dumped.yaml").write_text(dump(config))
        assert load(tmp_path / "dumped.yaml", model=RecordConfig) == config
    feeds = open_trackers(config.trackers, run, float, print)
    write_steps(run, 1, 2, feeds.notify)
    feeds.close()
    assert own.Keeping.logged == values(0, 0)
    assert own.Keeping.closed == [(run.directory.path / "own_tracker.Keeping", {"color": "red"})]


def test_own_tracker_gets_the_steps_after_a_resume(own, run):
    write_steps(run, 1, 5)
    resumed = TrackedRun(name="tracked", directory=run.directory, lineage=1, cut=3)
    feeds = start("own_tracker:Keeping", resumed, [])
    write_steps(resumed, 4, 6, feeds.notify)
    feeds.close()
    assert own.Keeping.logged == values(1, 1, 1, 1, 1, 1)[3:]


@pytest.mark.parametrize("kind", ["Failing", "Leaving"])
def test_failing_tracker_is_given_up_with_two_lines(own, run, kind):
    said, told = [], threading.Event()

    def report(line):
        said.append(line)
        if "in a row" in line:
            told.set()

    feeds = open_trackers(TrackersConfig.model_validate({f"own_tracker:{kind}": {}}), run, float, report)
    step = 0
    while not told.is_set():
        step += 1
        write_steps(run, step, step, feeds.notify)
    write_steps(run, step + 1, step + 1, feeds.notify)
    feeds.close()
    assert len(said) == 2 and all(f"own_tracker:{kind}" in line for line in said)
    assert own.Failing.calls == (FAILURES if kind == "Failing" else 0)


def test_tracker_that_recovers_misses_nothing(own, run):
    own.Failing.fails, said = 1, []
    feeds = start("own_tracker:Failing", run, said)
    write_steps(run, 1, 1, feeds.notify)
    while not said:
        pass
    write_steps(run, 2, 3, feeds.notify)
    feeds.close()
    assert own.Failing.logged == values(0, 0, 0)
    assert len(said) == 1 and "no space left" in said[0]


def test_hanging_tracker_blocks_nothing(own, run, monkeypatch):
    said = []
    feeds = start("own_tracker:Hanging", run, said)
    write_steps(run, 1, 50, feeds.notify)  # returns, though nothing is sent
    monkeypatch.setattr("antiphon.record.trackers.feed.CLOSING_SECONDS", 0.0)
    feeds.close()
    assert len(said) == 1 and "own_tracker:Hanging" in said[0]
    assert own.Hanging.logged == []


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_missing_key_is_a_warning(tmp_path, tracker):
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "SWANLAB_"))}
    variables |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    command = [sys.executable, "-m", "tests.tracked_run", str(tmp_path / "run"), json.dumps({tracker: {}}), *"0012"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "failed (" in line]
    assert len(said) == 1
    assert said[0].startswith(f"tracker {tracker} failed") and "API key" in said[0]


# --- configuration ------------------------------------------------------------------------------------------------------


def test_unknown_tracker_is_refused():
    names = ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")
    fields = {"value": "tensorbord", "valid": names, "suggestions": ("tensorboard",)}
    with raises_with(ConfigError, key="trackers.0", **fields):
        load(None, ["trackers=[tensorbord]"], model=RecordConfig)
    with raises_with(ConfigError, key="trackers.tensorbord", **fields | {"value": {}}):
        load(None, ["trackers={tensorbord: {}}"], model=RecordConfig)


def test_options_survive_dump_and_load(tmp_path):
    config = load(None, ["trackers={wandb: {tags: [a, b]}, mlflow: {tags: {c: d}}, swanlab: {}}"], model=RecordConfig)
    assert config.trackers.wandb.tags == ("a", "b")
    (tmp_path / "dumped.yaml").write_text(dump(config))
    assert load(tmp_path / "dumped.yaml", model=RecordConfig) == config
    names = [name for name, _ in config.trackers.list_enabled()]
    assert names == ["wandb", "mlflow", "swanlab"]


def test_unknown_option_is_refused():
    with raises_with(ConfigError, key="trackers.wandb.projekt", suggestions=("project",)):
        load(None, ["trackers={wandb: {projekt: mine}}"], model=RecordConfig)


@pytest.mark.parametrize("tracker", OPTIONS)
def test_missing_library_is_refused_before_the_run(run, tracker, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises_with(ConfigError, key="record.trackers", value=tracker):
        start(tracker, run, [])


def test_tracking_and_viewing_import_no_torch(tmp_path):
    script = f"""
import sys
from pathlib import Path
from antiphon.record import live, metrics
from antiphon.record.run_dir import RunDirectory
from antiphon.record.trackers import TrackedRun, TrackersConfig, open_trackers
run = TrackedRun(name="x", directory=RunDirectory.create({str(tmp_path)!r}, "run"))
run.directory.write_config("name: x")
open_trackers(TrackersConfig.model_validate(["tensorboard"]), run, float, print).close()
print(*({{"torch", "tensorflow"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []

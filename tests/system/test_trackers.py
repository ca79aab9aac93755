"""A run with five trackers at once is killed and resumed; each library then has one history of it."""

import json
import signal

import psutil
import pytest
import yaml

from tests.tracker_readers import READERS, mlflow_client, trackio_environment, trackio_run

pytestmark = pytest.mark.system
METRIC = "reward/mean"
TRACKERS = {
    "tensorboard": {},
    "wandb": {"mode": "offline"},
    "mlflow": {},
    "trackio": {},
    "swanlab": {"mode": "offline"},
}


KEEPING = """
import json
from antiphon.record.trackers import RunTracker

class Keeping(RunTracker):
    def start(self, run):
        self.directory.mkdir()
        (self.directory / "config.json").write_text(json.dumps(run.config))
        return {}

    def log(self, phase, step, metrics, samples): ...

    def finish(self, run, model): ...
"""


def test_a_tracker_receives_what_a_run_chose_for_auto(project):
    (project.folder / "own_tracker.py").write_text(KEEPING)
    path = project.config(steps=1, learner={"dtype": "auto"}, engine={"dtype": "auto"})
    done = project.run("train", path, "record.trackers=[own_tracker:Keeping]")
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr
    run = project.folder / "runs" / "run"
    found = json.loads((run / "own_tracker.Keeping" / "config.json").read_text())
    assert found == yaml.safe_load((run / "config.yaml").read_text())
    assert {found["learner"]["dtype"], found["engine"]["dtype"]} <= {"float32", "bfloat16"}
    assert found["learner"]["tokens_per_pack"] == 1024  # which it chose, too: that of CPUs


def kill(run):
    own = psutil.Process(run.pid)
    own.suspend()  # else it would tidy up after its workers
    for process in [*own.children(recursive=True), own]:
        process.send_signal(signal.SIGKILL)
    run.communicate()


def all_have_seen(folder, step):
    states = [folder / name / "run.json" for name in TRACKERS]
    return all(state.exists() and json.loads(state.read_bytes()).get("train", 0) >= step for state in states)


def test_killed_run_has_one_history_in_five_trackers(project, monkeypatch):
    folder = project.folder / "runs" / "run"
    monkeypatch.setenv("TRACKIO_DIR", trackio_environment(folder)["TRACKIO_DIR"])
    record = {"trackers": TRACKERS, "samples": {"count": 3, "every": 4}, "directory": str(project.folder / "runs")}
    path = project.config(record=record, checkpoint={"every": 7})
    run = project.start("train", path, "steps=100000")
    try:
        while not all_have_seen(folder, 9):
            line = run.stdout.readline()
            assert line, run.stderr.read()
            assert "failed" not in line
    finally:
        kill(run)
    killed_after = project.metrics()[-1]["step"]
    last = killed_after + 5
    resumed = project.run("train", path, f"steps={last}", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "failed" not in resumed.stdout

    lines = project.metrics()
    undone = [line["step"] for line in lines if line["lineage"] == 0 and line["step"] > _cut(lines)]
    assert undone or killed_after % 7 == 0
    valid = {line["step"]: line[METRIC] for line in lines}  # the last of a step
    for name, read in READERS.items():
        points = read(folder, METRIC)
        assert [step for step, _ in points] == list(range(1, last + 1)), name
        for step, value in points:
            # What a library cannot take back are the values of the steps that were undone.
            held = [line[METRIC] for line in lines if line["step"] == step]
            expected = held if name in ("mlflow", "trackio") and step in undone else [valid[step]]
            assert any(value == pytest.approx(each, rel=1e-6) for each in expected), (name, step)
    check_one_run_each(folder)
    check_samples(folder)


def _cut(lines):
    """The step after which the resumed lineage began."""
    return min(line["step"] for line in lines if line["lineage"] == 1) - 1


def check_one_run_each(folder):
    client = mlflow_client(folder)
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.status == "FINISHED" and run.data.params["rollout.group_size"] == "4"
    assert trackio_run(folder)["runs"] == 1
    assert len(list(folder.glob("wandb/offline-run-*"))) == len(list(folder.glob("swanlab/run-*"))) == 1


def check_samples(folder):
    """A table as the run wrote it is in mlflow, and its text is what the policy read and said."""
    tables = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [table["step"] for table in tables if table["lineage"] == 0][:3] == [1, 5, 9]
    (artifact,) = folder.rglob("artifacts/samples/step_000001.json")
    stored = json.loads(artifact.read_bytes())
    read = [dict(zip(stored["columns"], row, strict=True)) for row in stored["data"]]
    rounded = [row | {"advantage": pytest.approx(row["advantage"], rel=1e-6)} for row in tables[0]["rows"]]
    assert read == rounded  # by mlflow
    for row in tables[0]["rows"]:
        first, plus, second, equals = row["prompt"]
        assert first.isdigit() and plus == "+" and second.isdigit() and equals == "="
        said = row["completion"].removesuffix("<eos>")
        assert row["reward"] == pytest.approx(sum(character.isdigit() for character in said) / 8)
        assert row["outcome"] in ("trained", "masked") and row["advantage"] is not None

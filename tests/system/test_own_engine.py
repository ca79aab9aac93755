"""A run on an engine that a user wrote, named in the configuration by its import path."""

from antiphon.inspect.audit import audit


def test_engine_named_by_import_path_trains(project):
    kind = "tests.example_engine:ExampleEngine"
    ran = project.run("train", project.config(engine={"kind": kind}, rollout={"async_ratio": 1, "timeout": 120}))
    assert ran.returncode == 0, ran.stderr
    steps = project.metrics()
    assert len(steps) == 3 and project.summary()["versions"] == 3
    assert abs(steps[0]["learner/mismatch_kl"]) < 1e-6, "its log-probs are the learner's"
    found = audit(project.folder / "runs" / "run")
    assert found.violations == [] and found.balance[0]["trained"] == 3 * 2 * 4

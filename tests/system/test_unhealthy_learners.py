"""Learners whose gradients are not finite, and learners that hang."""

import pytest

SPOILT = """
from antiphon.learning.step import by_key


async def stage(step):
    if step.number == 2:
        spoilt = {key: {"advantages": each.advantages + float("nan")} for key, each in by_key(step.samples).items()}
        step.update_samples(spoilt)
"""
HANGING = """
import threading

from antiphon.learning.torch_learner import TorchLearner

class Learner(TorchLearner):
    def save(self, place):
        threading.Event().wait()
"""
STAGES = ["annotate", "rewards", "advantages", "spoilt:stage", "update_critics", "update_actor"]


@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_a_gradient_that_is_not_finite(project, policy):
    (project.folder / "spoilt.py").write_text(SPOILT)
    learner = {"stages": STAGES, "on_nonfinite": policy}
    ran = project.run("train", project.config(steps=3, learner=learner, checkpoint={"every": 1}))
    metrics = project.metrics()
    if policy == "skip":
        assert ran.returncode == 0, ran.stderr
        assert [line["learner/skipped_updates"] for line in metrics] == [0, 1, 0]
        assert project.summary()["versions"] == 3
        return
    assert ran.returncode == 2
    assert ran.stderr.startswith("antiphon: step 2: ") and ran.stderr.count("\n") == 1, ran.stderr
    assert "learner.on_nonfinite" in ran.stderr
    assert [line["step"] for line in metrics] == [1]
    assert "last checkpoint" not in ran.stdout, "what would be so again is not tried again"


def test_a_checkpoint_that_hangs_names_its_deadline(project):
    (project.folder / "hanging.py").write_text(HANGING)
    saving = {"every": 1, "timeout": 2}
    ran = project.run("train", project.config(learner={"kind": "hanging:Learner"}, checkpoint=saving))
    assert ran.returncode == 2 and "checkpoint.timeout" in ran.stderr, ran.stderr

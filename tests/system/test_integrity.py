"""A reward that pays everybody alike: refused before a run, and an alarm during it."""

import textwrap

import pytest

pytestmark = pytest.mark.system

PAYS_ALL = """
    def pays_all(prompt, transcript):
        return 1.0
"""


def test_reward_that_pays_everybody_is_refused_or_alarms(project):
    (project.folder / "generous.py").write_text(textwrap.dedent(PAYS_ALL))
    task = {
        "name": "t",
        "prompts": {"source": "mytask:problems"},
        "reward": "generous:pays_all",
        "reward_range": [0, 0.5],
    }
    path = project.config(tasks=[task], rollout={"groups_per_step": 8, "group_size": 4}, steps=3)

    checked = project.run("check", path)
    refused = project.run("train", path)
    assert (checked.returncode, refused.returncode) == (1, 2)
    assert "an answer that is empty scores 1, the right one 1" in checked.stdout
    assert "an answer that is garbage scores 1, the right one 1" in refused.stderr
    assert "outside of reward_range" in refused.stderr and "check.prompts=0" in refused.stderr

    done = project.run("train", path, "check.prompts=0", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert project.summary()["alarms"] == {"t: constant": 2, "t: out_of_range": 2}  # the second step has 64 answers
    assert (
        done.stdout.count(
            "alarm at step 2: task t, constant: share of groups whose scores are all equal is 1.00, beyond 0.95"
        )
        == 1
    )
    last = project.metrics()[-1]
    assert (last["watch/t/constant"], last["reward/alarms"], last["reward/ungraded"]) == (1.0, 2.0, 0.0)

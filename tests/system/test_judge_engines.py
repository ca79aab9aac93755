"""A reward that asks a model on engines of its own, in a real run."""

import textwrap

import psutil
import pytest

from tests.system.test_bad_input import is_worker, wait_for_line

pytestmark = pytest.mark.system

ASKER = """
    from antiphon.types import Message, Score

    class Asker:
        def __init__(self, generate):
            self.generate = generate

        async def __call__(self, prompt, transcript):
            question = [Message("user", prompt.payload["prompt"])]
            first, again = await self.generate(question), await self.generate(question)
            value = sum(map(str.isdigit, transcript.response)) / 8
            return Score.of(value, same=first == again, asked=len(first) > 0)
"""


def config(project, **sections):
    (project.folder / "asker.py").write_text(textwrap.dedent(ASKER))
    judge = {"path": str(project.model), "max_tokens": 4}
    task = {"name": "digits", "prompts": {"source": "mytask:problems"}, "reward": "asker:Asker", "judge": judge}
    return project.config(tasks=[task], grading={"deadline": 60}, **sections)


def test_a_reward_asks_a_model_of_its_own(project):
    done = project.run("train", config(project, steps=2))
    assert done.returncode == 0, done.stderr
    for line in project.metrics():
        assert line["reward/part/digits/same"] == line["reward/part/digits/asked"] == 1.0
    assert (project.folder / "runs" / "run" / "logs" / "judge-digits-0.log").exists()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_judge_that_is_killed_is_replaced_as_often_as_allowed(project, restarts):
    """Then the run ends, and says why: not that nothing is graded any more."""
    process = project.start("train", config(project, steps=60, rollout={"engine_restarts": restarts}))
    wait_for_line(process, "step ")
    children = psutil.Process(process.pid).children(recursive=True)
    next(child for child in children if is_worker(child, "judge-digits-0")).kill()
    out, err = process.communicate(timeout=300)
    assert process.returncode == (0 if restarts else 2), err
    assert "worker judge-digits-0 was killed by SIGKILL" in (out if restarts else err)
    assert "could be trained on" not in err
    assert (project.folder / "runs" / "run" / "logs" / "judge-digits-1.log").exists() == bool(restarts)


@pytest.mark.parametrize(
    "task, rollout, message",
    [
        ({"reward": "math"}, {}, "reward 'math' asks no model"),
        ({"reward": "asker:Asker"}, {"deterministic": True}, "not with rollout.deterministic"),
        ({"reward": "asker:Asker", "judge": {"path": "mytask:build"}}, {}, "must be a directory or a Hugging Face id"),
    ],
)
def test_a_judge_that_cannot_be_is_refused(project, task, rollout, message):
    task = {"name": "t", "prompts": {"source": "mytask:problems"}, "judge": {"path": "somewhere"}, **task}
    done = project.run("train", project.config(tasks=[task], rollout=rollout), "--dry-run")
    assert done.returncode == 2 and "tasks.0.judge" in done.stderr and message in done.stderr

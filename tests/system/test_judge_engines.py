"""A reward that asks a model on engines of its own, in a real run."""

import textwrap

import pytest

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


def test_a_reward_asks_a_model_of_its_own(project):
    (project.folder / "asker.py").write_text(textwrap.dedent(ASKER))
    judge = {"path": str(project.model), "max_tokens": 4}
    task = {"name": "digits", "prompts": {"source": "mytask:problems"}, "reward": "asker:Asker", "judge": judge}
    done = project.run("train", project.config(tasks=[task], steps=2, grading={"deadline": 60}))
    assert done.returncode == 0, done.stderr
    for line in project.metrics():
        assert line["reward/part/digits/same"] == line["reward/part/digits/asked"] == 1.0
    assert (project.folder / "runs" / "run" / "logs" / "judge-digits-0.log").exists()


@pytest.mark.parametrize(
    "task, rollout, message",
    [
        ({"reward": "math"}, {}, "reward 'math' asks no model"),
        ({"reward": "asker:Asker"}, {"deterministic": True}, "not with rollout.deterministic"),
    ],
)
def test_a_judge_that_cannot_be_is_refused(project, task, rollout, message):
    task = {"name": "t", "prompts": {"source": "mytask:problems"}, "judge": {"path": "somewhere"}, **task}
    done = project.run("train", project.config(tasks=[task], rollout=rollout), "--dry-run")
    assert done.returncode == 2 and "tasks.0.judge" in done.stderr and message in done.stderr

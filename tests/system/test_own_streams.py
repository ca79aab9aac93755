"""A stream that an engine of the user's computes, the one of the page on engines, and one that a stage makes of texts."""

import re
import textwrap
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
CODE = """
    import numpy as np

    from antiphon.algorithms.declarations import loss, stage
    from antiphon.core.types import StreamSpec
    from antiphon.learning.step import by_key

    from my_streams import ENTROPY

    LETTERS = StreamSpec("letters")


    @stage(needs=[ENTROPY], produces=[LETTERS])
    async def count_letters(step):
        arrays = {}
        for key, sample in by_key(step.samples).items():
            texts = step.renderer.split(sample.segment.tokens)
            letters = np.array([len(text.strip()) for text in texts], np.float32)
            arrays[key] = letters * (sample.streams[ENTROPY] > 0)
        step.add_stream(LETTERS, arrays)


    @loss(needs=[ENTROPY, LETTERS])
    def weighted(inputs, config):
        entropy, letters = inputs.streams[ENTROPY], inputs.streams[LETTERS]
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        return -letters * ratio * inputs.advantages, {"own_entropy": entropy, "letters": letters}
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_of_an_engine_and_of_texts_reach_the_loss(project, workers):
    for name in ("my_streams.py", "my_engine.py"):
        (code,) = re.findall(rf"```python\n# {name}\n(.*?)```", PAGE, re.DOTALL)
        (project.folder / name).write_text(code)
    (project.folder / "own_parts.py").write_text(textwrap.dedent(CODE))
    path = project.config(
        engine={"kind": "my_engine:open_entropy"},
        algorithm={"loss": "own_parts:weighted"},
        learner={
            "stages": ["annotate", "own_parts:count_letters", "rewards", "advantages", "update_critics", "update_actor"]
        },
        rollout={"groups_per_step": 2, "group_size": 4, "timeout": 120, "async_ratio": 0, "workers": workers}
        | {"sampling": {"max_tokens": 8, "temperature": 0.7}},
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    for step in project.metrics(own=("learner/own_entropy", "learner/letters")):
        assert step["learner/own_entropy"] == pytest.approx(step["learner/entropy"], rel=1e-3), "of the same weights"
        assert step["learner/letters"] > 0
    again = project.run("replay", project.folder / "runs" / "run", "--code", project.folder)
    assert again.returncode == 0, again.stdout + again.stderr

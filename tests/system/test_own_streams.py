"""A stream that an engine of the user's computes, and one that a stage makes of it and of the text of each token."""

import textwrap

import pytest

CODE = """
    import numpy as np

    from antiphon.algorithms.declarations import loss, stage
    from antiphon.core.types import StreamSpec
    from antiphon.engines.native.engine import NativeEngine
    from antiphon.engines.native.factory import open_engine
    from antiphon.learning.step import by_key

    ENTROPY = StreamSpec("entropy", producer="engine")
    LETTERS = StreamSpec("letters")


    class EntropyEngine(NativeEngine):
        def compute_streams(self, logits, slots):
            logprobs = logits.log_softmax(-1)
            return {ENTROPY: -(logprobs.exp() * logprobs).sum(-1).float().numpy()}


    def open_entropy(model, config, receive):
        return open_engine(model, config, receive, kind=EntropyEngine)


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
    (project.folder / "own_parts.py").write_text(textwrap.dedent(CODE))
    path = project.config(
        engine={"kind": "own_parts:open_entropy"},
        algorithm={"loss": "own_parts:weighted"},
        learner={
            "stages": ["annotate", "own_parts:count_letters", "rewards", "advantages", "update_critics", "update_actor"]
        },
        rollout={"groups_per_step": 2, "group_size": 4, "timeout": 120, "async_ratio": 0, "workers": workers},
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    for step in project.metrics(own=("learner/own_entropy", "learner/letters")):
        assert step["learner/own_entropy"] == pytest.approx(step["learner/entropy"], rel=1e-3), "of the same weights"
        assert step["learner/letters"] > 0
    again = project.run("replay", project.folder / "runs" / "run", "--code", project.folder)
    assert again.returncode == 0, again.stdout + again.stderr

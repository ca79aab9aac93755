"""Meshes that cannot be, or would mean nothing."""

import pytest
from pydantic import ValidationError

from antiphon.learning.config import LearnerConfig, MeshConfig
from antiphon.learning.pipeline import schedule

SHAPE = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_experts": 8,
}


@pytest.mark.parametrize(
    ("mesh", "key"),
    [
        ({"tensor": 4}, "tensor"),
        ({"shard": 3, "expert": 3}, "expert"),
        ({"context": 4}, "context"),
        ({"tensor": 2, "context": 2}, "context"),
        ({"pipeline": 4}, "pipeline"),
        ({"pipeline": 2, "pipeline_chunks": 2}, "pipeline"),
    ],
)
def test_what_a_model_cannot_be_divided_into_is_named(mesh, key):
    assert {found for found, _ in MeshConfig(**mesh).misfits(SHAPE)} == {key}


@pytest.mark.parametrize(
    "mesh",
    [
        {"tensor": 2},
        {"context": 6},
        {"context": 4, "context_attention": "keys"},
        {"pipeline": 3},
        {"shard": 4, "expert": 4},
    ],
)
def test_what_it_can_be_divided_into_is_not(mesh):
    assert not [*MeshConfig(**mesh).misfits(SHAPE)]


@pytest.mark.parametrize(
    ("learner", "key"),
    [
        ({"mesh": {"shard": 3, "expert": 2}}, "mesh.expert"),
        ({"mesh": {"pipeline_chunks": 2}}, "mesh.pipeline_chunks"),
        ({"mesh": {"context_attention": "keys"}}, "mesh.context_attention"),
        ({"cpu_offload": True}, "cpu_offload"),
    ],
)
def test_options_that_would_be_passed_over_are_named(learner, key):
    assert {found for found, _ in LearnerConfig(**learner).problems()} == {key}


def test_an_axis_has_at_least_one_rank():
    with pytest.raises(ValidationError):
        MeshConfig(tensor=0)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("packs", [1, 4, 12])
def test_a_schedule_never_waits_for_what_comes_later(ranks, chunks, packs):
    """All ranks are played at once: each action's turn comes, and every pack passes all stages forth and back."""
    packs = packs if chunks == 1 else -(-packs // ranks) * ranks
    left = [schedule(place, ranks, chunks, packs) for place in range(ranks)]
    done = set()
    last = ranks * chunks - 1
    while any(left):
        before = len(done)
        for place, actions in enumerate(left):
            while actions:
                backward, pack, chunk = actions[0]
                stage = chunk * ranks + place
                if backward:
                    needed = (False, pack, stage) if stage == last else (True, pack, stage + 1)
                else:
                    needed = (False, pack, stage - 1)
                if (stage or backward) and needed not in done:
                    break
                assert not backward or (False, pack, stage) in done
                done.add((backward, pack, stage))
                actions.pop(0)
        assert len(done) > before, "nobody can go on"
    assert len(done) == 2 * packs * (last + 1)

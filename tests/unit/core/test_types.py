"""The hard cases of what flows: each can be built, and none can be built wrong."""

import dataclasses

import numpy as np
import pytest

from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    Completion,
    FinishReason,
    Pack,
    PayloadReference,
    PolicyVersion,
    Sample,
    Sampling,
    Score,
    ScoreStatus,
    Segment,
    Streams,
    StreamSpec,
    TrainBatch,
    Trajectory,
    TrajectoryMeta,
    Turn,
    Update,
)

SAMPLING = Sampling(max_tokens=8)
VALUES = StreamSpec("values", shape=(2,))
TEACHER = StreamSpec("teacher_logits", "float16", (5,))
EXPERTS = StreamSpec("experts", "int32", (3, 2))


def segment(prompt, completion, *, parent=None, streams=None, turns=None, versions=0):
    length = prompt + completion
    mask = np.arange(length) >= prompt
    return Segment(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.full(length, versions, np.int32),
        turns=turns or (Turn(start=prompt, stop=length, sampling=SAMPLING),),
        streams=streams or Streams(),
        parent=parent,
    )


def meta(**changes):
    fields = {
        "id": AttemptId(3, 1, 0),
        "prompt_id": "p",
        "task": "t",
        "started": PolicyVersion(0, 4),
        "newest": PolicyVersion(0, 5),
        "status": AttemptStatus.FINISHED,
        "score": Score.of(1.0),
    }
    return TrajectoryMeta(**{**fields, **changes})


def sample(length, streams=None):
    ones = np.ones(length, np.float32)
    return Sample(
        meta=meta(), segment=segment(1, length - 1), streams=streams or Streams(), advantages=ones, weights=ones
    )


def pack(*lengths, streams=None, parents=None):
    total = sum(lengths)
    floats = np.zeros(total, np.float32)
    return Pack(
        tokens=np.zeros(total, np.int32),
        lengths=np.array(lengths, np.int32),
        parents=np.array(parents or [-1] * len(lengths), np.int32),
        owners=np.arange(len(lengths), dtype=np.int32),
        ends=np.arange(len(lengths), dtype=np.int32),
        loss_mask=np.ones(total, np.bool_),
        logprobs=floats,
        advantages=floats,
        coefficients=floats.astype(np.float64),
        temperatures=floats + 1,
        streams=streams or Streams(),
    )


# --- shapes of a conversation ------------------------------------------------------------------------------------------


def test_segments_of_a_fork_name_their_parent():
    trunk = segment(4, 3)
    forks = tuple(segment(7, n, parent=0) for n in (2, 5))
    compacted = segment(3, 2, parent=2)
    trajectory = Trajectory(meta=meta(turns=4), payload=(trunk, *forks, compacted))
    assert [s.parent for s in trajectory.segments] == [None, 0, 0, 2]
    assert sum(int(s.loss_mask.sum()) for s in trajectory.segments) == 3 + 2 + 5 + 2


def test_one_sample_a_turn_trains_each_token_once():
    turns = []
    context = 4
    for parent, sampled in enumerate((2, 3, 1)):
        turns.append(segment(context, sampled, parent=parent - 1 if parent else None))
        context += sampled + 2  # what was sampled, and what the environment said
    trajectory = Trajectory(meta=meta(turns=3), payload=tuple(turns))
    assert [int(s.loss_mask.sum()) for s in trajectory.segments] == [2, 3, 1]


def test_several_turns_of_several_versions_share_a_segment():
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], np.bool_)
    built = Segment(
        tokens=np.arange(8, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(8, np.float32),
        versions=np.array([0, 0, 4, 4, 0, 4, 5, 5], np.int32),
        turns=(
            Turn(start=2, stop=4, sampling=SAMPLING, reward=0.0, state_key="s0"),
            Turn(start=5, stop=8, sampling=SAMPLING, reward=1.0, finish=FinishReason.LENGTH),
        ),
    )
    assert sum(turn.stop - turn.start for turn in built.turns) == mask.sum()


def test_a_turn_outside_its_segment_is_refused():
    with pytest.raises(ValueError, match="turn 2:9 lies outside its segment of 5 tokens"):
        segment(2, 3, turns=(Turn(start=2, stop=9, sampling=SAMPLING),))


def test_a_payload_behind_a_reference_says_where_it_is():
    trajectory = Trajectory(
        meta=meta(), payload=PayloadReference("lineage-0-rollout-1-000002.parquet", AttemptId(1, 0, 0), 7)
    )
    assert trajectory.meta.score.value == 1.0  # the scheduler needs no payload
    with pytest.raises(ValueError, match=r"attempt 3\.1\.0 lies in lineage-0-rollout-1-000002.parquet"):
        _ = trajectory.segments


# --- streams -----------------------------------------------------------------------------------------------------------


def test_streams_carry_rows_of_any_declared_shape():
    streams = Streams(
        {
            VALUES: np.zeros((6, 2), np.float32),  # two critics
            TEACHER: np.zeros((6, 5), np.float16),  # top-5 logits of a teacher
            EXPERTS: np.zeros((6, 3, 2), np.int32),  # 3 layers, 2 experts each
        }
    )
    built = sample(6, streams)
    assert built.streams.length == 6 and len(built.streams) == 3
    assert built.streams[EXPERTS].shape == (6, 3, 2)


def test_streams_are_what_was_declared():
    with pytest.raises(ValueError, match="'values' has dtype float64"):
        Streams({VALUES: np.zeros((6, 2))})
    with pytest.raises(ValueError, match="'values'"):
        Streams({VALUES: np.zeros((6, 3), np.float32)})
    with pytest.raises(ValueError, match="differ in length"):
        Streams({VALUES: np.zeros((6, 2), np.float32), TEACHER: np.zeros((5, 5), np.float16)})


def test_adding_a_stream_leaves_the_original():
    one = Streams({VALUES: np.zeros((6, 2), np.float32)})
    two = one.with_stream(TEACHER, np.zeros((6, 5), np.float16))
    assert TEACHER in two and TEACHER not in one


def test_a_pack_is_a_forest_of_pieces():
    shared = pack(4, 2, 3, parents=[-1, 0, 0])
    assert shared.parents.tolist() == [-1, 0, 0]
    with pytest.raises(ValueError, match=r"parents \[-1, 2, 0\] are not a forest"):
        pack(4, 2, 3, parents=[-1, 2, 0])


# --- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["loss_mask", "logprobs", "versions"])
def test_a_segment_of_unequal_lengths_is_refused(field):
    good = segment(2, 3)
    with pytest.raises(ValueError, match=rf"Segment.{field} has shape \(4,\), expected \(5,\)"):
        dataclasses.replace(good, **{field: getattr(good, field)[:-1]})


@pytest.mark.parametrize("field", ["logprobs", "versions"])
def test_a_completion_of_unequal_lengths_is_refused(field):
    fields = {
        "tokens": np.zeros(3, np.int32),
        "logprobs": np.zeros(3, np.float32),
        "versions": np.zeros(3, np.int32),
        "finish": FinishReason.STOP,
    }
    Completion(**fields)
    with pytest.raises(ValueError, match=f"Completion.{field}"):
        Completion(**{**fields, field: fields[field][:-1]})


@pytest.mark.parametrize("field", ["advantages", "weights"])
def test_a_sample_of_unequal_lengths_is_refused(field):
    with pytest.raises(ValueError, match=f"Sample.{field}"):
        dataclasses.replace(sample(5), **{field: np.ones(6, np.float32)})


def test_streams_of_another_length_are_refused_everywhere():
    streams = Streams({VALUES: np.zeros((9, 2), np.float32)})
    for build in (
        lambda: segment(2, 3, streams=streams),
        lambda: sample(5, streams),
        lambda: pack(2, 3, streams=streams),
    ):
        with pytest.raises(ValueError, match="streams cover 9 tokens, expected 5"):
            build()


@pytest.mark.parametrize("field", ["loss_mask", "logprobs", "advantages", "coefficients", "temperatures"])
def test_a_pack_of_unequal_lengths_is_refused(field):
    good = pack(2, 3)
    with pytest.raises(ValueError, match=f"Pack.{field}"):
        dataclasses.replace(good, **{field: getattr(good, field)[1:]})


def test_the_lengths_of_a_pack_sum_to_its_tokens():
    with pytest.raises(ValueError, match="sum to 4, expected 5"):
        dataclasses.replace(pack(2, 3), lengths=np.array([2, 2], np.int32))


def test_a_train_batch_holds_several_updates_of_several_ranks():
    update = Update(packs=((pack(2, 3), pack(4)), (pack(5),)), loss_tokens=14, trajectories=4, groups=2, sequences=4)
    batch = TrainBatch(updates=(update, update, update))  # for example 3 epochs of one mini-batch
    assert sum(int(p.loss_mask.sum()) for u in batch.updates for rank in u.packs for p in rank) == 3 * 14


# --- verdicts and versions ---------------------------------------------------------------------------------------------


def test_a_verdict_is_never_invented():
    assert Score.of(0.5, style=0.1).parts == {"style": 0.1}
    assert Score.ungraded("no answer").value is None
    for status, value in [
        (ScoreStatus.SCORED, None),
        (ScoreStatus.SCORED, float("nan")),
        (ScoreStatus.UNGRADED, 0.0),
        (ScoreStatus.INFRASTRUCTURE, 0.0),
    ]:
        with pytest.raises(ValueError, match="cannot have the value"):
            Score(status=status, value=value)


def test_age_is_the_number_of_versions_since():
    assert PolicyVersion(0, 3).age(PolicyVersion(0, 5)) == 2
    assert PolicyVersion(0, 3).age(PolicyVersion(1, 3)) == 0  # a rollback to 3 opened lineage 1
    assert PolicyVersion(0, 3).next() == PolicyVersion(0, 4)
    for future in (PolicyVersion(0, 6), PolicyVersion(1, 2)):
        with pytest.raises(ValueError, match="in the future"):
            future.age(PolicyVersion(0, 5))


def test_truncated_sampling_is_told_apart():
    assert not SAMPLING.truncated
    assert all(Sampling(max_tokens=1, **cut).truncated for cut in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}))


def test_penalties_are_told_apart():
    """By which tokens they count, too."""
    penalties = {"repetition_penalty": 0.9, "presence_penalty": -0.1, "frequency_penalty": 0.1}
    found = {name: Sampling(max_tokens=1, **{name: value}) for name, value in penalties.items()}
    assert not SAMPLING.penalized and all(sampling.penalized for sampling in found.values())
    assert [name for name, sampling in found.items() if sampling.counts_output] == [*penalties][1:]

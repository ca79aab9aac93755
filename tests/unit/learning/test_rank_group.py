"""Ranks as one worker: who is sent which packs, and what comes back."""

import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import WorkerDiedError
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.mesh_config import MeshConfig
from antiphon.learning.packing import pack_samples
from antiphon.learning.parallel.rank_group import RankGroup

from .conftest import make_sample

SIZES = st.integers(1, 3)


class Member:
    """Answers with the first token of each pack that it was sent, if its layers are the last."""

    def __init__(self, rank, last):
        self.name = str(rank)
        self.last = last
        self.sent = []

    async def call(self, method, *args):
        self.sent.append(args)
        return [pack.tokens[0] for pack in args[0]] if method == "predict" and self.last else []


@st.composite
def meshes(draw):
    expert = draw(SIZES)
    return MeshConfig(
        replicate=draw(SIZES),
        shard=expert * draw(SIZES),
        context=draw(SIZES),
        tensor=draw(SIZES),
        pipeline=draw(SIZES),
        expert=expert,
    )


def placed(mesh):
    """By rank: its place on the pipeline, and whose packs it computes, from a grid with the axes of `learning.mesh`."""
    axes = (mesh.pipeline, mesh.replicate, mesh.shard // mesh.expert, mesh.context, mesh.expert, mesh.tensor)
    return [
        (stage, (copy * (mesh.shard // mesh.expert) + shard) * mesh.expert + expert)
        for stage, copy, shard, _, expert, _ in itertools.product(*map(range, axes))
    ]


@given(mesh=meshes(), count=st.integers(1, 9))
def test_each_is_asked_of_its_share_and_all_is_answered(mesh, count):
    rng = np.random.default_rng(count)
    packs = pack_samples([make_sample(rng, 5, number) for number in range(count)], 1)[1]
    members = [Member(rank, stage == mesh.pipeline - 1) for rank, (stage, _) in enumerate(placed(mesh))]
    said = asyncio.run(RankGroup(members, mesh).call("predict", packs))
    assert said == [pack.tokens[0] for pack in packs]
    assert len({len(member.sent[0][0]) for member in members}) == 1, "all compute at once"
    assert len(members[0].sent[0][0]) == -(-count // mesh.data)


class Fallible(Member):
    """Fails with an error once the member before it has, or never."""

    def __init__(self, rank, error, before=None):
        super().__init__(rank, True)
        self.error, self.before, self.failed = error, before, asyncio.Event()

    async def call(self, method, *args):
        if self.before is not None:
            await self.before.failed.wait()
        if self.error is None:
            await asyncio.Event().wait()
        self.failed.set()
        raise self.error


@pytest.mark.parametrize("hangs", [False, True])
def test_the_death_of_a_rank_is_told_before_what_it_does_to_others(hangs):
    lost = RuntimeError("connection closed by peer")
    first = Fallible(0, lost)
    members = [first, Fallible(1, WorkerDiedError("learner.1 was killed"), first), Fallible(2, None if hangs else lost)]
    with pytest.raises(WorkerDiedError, match=r"learner\.1"):
        asyncio.run(RankGroup(members, MeshConfig(replicate=3)).call("publish", 1))


def test_an_error_of_all_ranks_is_the_first():
    first = Fallible(0, ValueError("0"))
    with pytest.raises(ValueError, match="0"):
        asyncio.run(RankGroup([first, Fallible(1, ValueError("1"), first)], MeshConfig(replicate=2)).call("publish", 1))


@given(mesh=meshes())
def test_each_is_sent_its_own_packs_of_a_batch_and_no_others(mesh):
    rng = np.random.default_rng(0)
    groups = [[make_sample(rng, 6, number)] for number in range(7)]
    for sample in (sample for group in groups[::2] for sample in group):
        sample.advantages[:] = 0
    how = {"aggregation": "token_mean", "max_tokens": 1, "tokens_per_pack": 8, "skip_zero_advantage": True}
    batch = build_batch(groups, BatchOptions(ranks=mesh.data, **how))
    members = [Member(rank, True) for rank in range(mesh.world)]
    asyncio.run(RankGroup(members, mesh).call("step", batch))
    for member, (_, data) in zip(members, placed(mesh), strict=True):
        (update,) = member.sent[0][0].updates
        for sent, made in (
            (update.packs, batch.updates[0].packs),
            (update.forward_only, batch.updates[0].forward_only),
        ):
            assert sent[data] and sent[data] is made[data]
            assert not any(packs for number, packs in enumerate(sent) if number != data)
        assert update.loss_tokens == batch.updates[0].loss_tokens

"""Learners behind workers: what each is asked, when a checkpoint is there, and what all models of a run do together."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.errors import RecordError, WorkerDiedError
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.config import CriticConfig, LearnerConfig, MeshConfig, OptimizerConfig
from antiphon.learning.learner import SAVED, LoraBaseReference, ModelRoles, WorkerLearner
from antiphon.learning.packing import pack_samples
from antiphon.learning.parallel.rank_group import RankGroup
from antiphon.weights.base import TransferContext

from .conftest import make_sample


class Handle:
    """A worker that writes down what it is asked, and says what the test wants."""

    def __init__(self, name="learner", **answers):
        self.name = name
        self.asked = []
        self.answers = answers
        self.hear = self.bury = None
        self.ended = ""

    async def call(self, method, *args):
        self.asked.append((method, *args))
        return self.answers.get(method)

    def send(self, method, *args):
        self.asked.append(("sent", method, *args))

    def on_event(self, callback):
        self.hear = callback

    def on_death(self, callback):
        self.bury = callback

    async def died(self):
        await asyncio.sleep(0)
        self.ended += "died "

    async def close(self):
        self.ended += "closed "

    def kill(self):
        self.ended += "killed "


def packs(count=3):
    rng = np.random.default_rng(0)
    return pack_samples([make_sample(rng, 5, number) for number in range(count)], 1)[1]


def test_learner_passes_on_calls_and_replies(tmp_path):
    batch = build_batch(
        [[make_sample(np.random.default_rng(0), 5, 0)]],
        BatchOptions(aggregation="token_mean", max_tokens=9, tokens_per_pack=99),
    )
    optimizer, exchange, some = OptimizerConfig(), TransferContext(tmp_path), packs()
    answers = {
        "begin": 7,
        "step": {"loss": 2.0},
        "predict": ["s"],
        "attention_stats": ["a"],
        "predict_base": ["b"],
        "publish": "u",
    }
    handle = Handle(**answers)

    async def run():
        learner = WorkerLearner(handle)
        assert await learner.begin(AlgorithmConfig(), optimizer, 5) == 7
        assert await learner.step(batch) == {"loss": 2.0, "tokens": float(batch.tokens)}
        assert [await ask(some) for ask in (learner.predict, learner.attention_stats, learner.predict_base)] == [
            ["s"],
            ["a"],
            ["b"],
        ]
        assert await learner.publish(3, exchange) == "u"
        await learner.restore(tmp_path)
        await learner.offload()
        await learner.reload()
        base = LoraBaseReference(learner)
        assert await base.predict(some) == ["b"]
        await base.offload()
        await base.reload()

    asyncio.run(run())
    assert handle.asked == [
        ("begin", AlgorithmConfig(), optimizer, 5),
        ("step", batch),
        ("predict", some),
        ("attention_stats", some),
        ("predict_base", some),
        ("publish", 3, exchange),
        ("restore", tmp_path),
        ("offload",),
        ("reload",),
        ("predict_base", some),
    ]


def test_checkpoints_complete_in_the_order_they_began(tmp_path):
    async def run():
        handle = Handle()
        learner = WorkerLearner(handle)
        first, second, third = [await learner.save(tmp_path / str(number)) for number in range(3)]
        handle.hear(SAVED)
        assert first.done() and not second.done()
        handle.hear("the disk is full")
        assert not third.done()
        handle.bury(WorkerDiedError("killed"))
        await first
        with pytest.raises(RecordError, match="the disk is full"):
            await second
        with pytest.raises(WorkerDiedError, match="killed"):
            await third
        return [each[1] for each in handle.asked]

    assert asyncio.run(run()) == [tmp_path / str(number) for number in range(3)]


class Model:
    """Writes down, in the list of all, what it is asked."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __getattr__(self, method):
        async def note(*args):
            self.log.append((self.name, method, *args))
            return self.name

        return note


def models(log, **parts):
    critics = [Model("critic 0", log), Model("critic 1", log)]
    return ModelRoles(learner=Model("learner", log), critics=critics, teachers=[Model("teacher", log)], **parts)


def test_actor_learns_only_after_critic_warm_up():
    log = []
    critic = CriticConfig(warmup_steps=2, optimizer=OptimizerConfig(learning_rate=0.5))
    config, algorithm = LearnerConfig(minibatches=3, epochs=2), AlgorithmConfig()
    asyncio.run(models(log).begin(algorithm, config, critic, 10))
    assert log == [
        ("learner", "begin", algorithm, config.optimizer, 48),
        ("critic 0", "begin", algorithm, critic.optimizer, 60),
        ("critic 1", "begin", algorithm, critic.optimizer, 60),
    ]


def test_without_a_critic_the_actor_learns_in_every_step():
    log, config = [], LearnerConfig(minibatches=3, epochs=2)
    asyncio.run(ModelRoles(learner=Model("learner", log)).begin(AlgorithmConfig(), config, None, 10))
    assert log == [("learner", "begin", AlgorithmConfig(), config.optimizer, 60)]


def test_learners_are_checkpointed_and_all_models_offload():
    log = []
    all_ = models(log, reference=Model("reference", log))
    place = Path("checkpoint")
    assert asyncio.run(all_.save(place)) == ["learner", "critic 0", "critic 1"]
    saved = [(name, part) for name, _, part in log]
    assert saved[0] == ("learner", place) and len({part for _, part in saved}) == 3
    assert all(place in part.parents for _, part in saved[1:])
    log.clear()
    asyncio.run(all_.restore(place))
    assert [(name, part) for name, _, part in log] == saved, "each reads what it wrote"
    log.clear()
    asyncio.run(all_.offload())
    asyncio.run(all_.reload())
    names = ["learner", "critic 0", "critic 1", "reference", "teacher"]
    assert log == [(name, method) for method in ("offload", "reload") for name in names]
    log.clear()
    asyncio.run(models(log).offload())
    assert "reference" not in {name for name, _ in log}


def ranks(count):
    members = [Handle(str(number), host="here:1") for number in range(count)]
    return members, RankGroup(members, MeshConfig(shard=count))


def test_ranks_meet_where_the_first_listens():
    members, together = ranks(3)
    asyncio.run(together.rendezvous("127.0.0.1"))
    assert together.name == "0"
    assert members[0].asked == [("host", "127.0.0.1"), ("join", 0, "here:1")]
    assert [member.asked for member in members[1:]] == [[("join", 1, "here:1")], [("join", 2, "here:1")]]


def test_ranks_speak_when_all_have_spoken_and_die_once():
    members, together = ranks(3)
    heard, deaths = [], []
    together.on_event(heard.append)
    together.on_death(deaths.append)
    members[0].hear("")
    members[0].hear("of the next")
    members[2].hear("rank 2 failed")
    assert heard == []
    members[1].hear("")
    assert heard == ["rank 2 failed"]
    members[1].hear("")
    members[2].hear("")
    assert heard == ["rank 2 failed", "of the next"]
    for number, member in enumerate(members):
        member.bury(WorkerDiedError(str(number)))
    assert [str(error) for error in deaths] == ["0"]


def test_ranks_are_ended_and_told_together():
    members, together = ranks(2)
    together.send("publish", 1)
    together.kill()
    asyncio.run(together.close())
    asyncio.run(together.died())
    assert [(member.asked, member.ended) for member in members] == [
        ([("sent", "publish", 1)], "killed closed died ")
    ] * 2

"""A reward is never invented: whatever breaks while 10,000 trajectories are graded, none is trained on as worth 0.

Scheduler, episodes, ledger, graders and the processes they run in are the real ones; the engine is a function.
"""

import asyncio
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.types import (
    MIXED_CACHE,
    Completion,
    FinishReason,
    GenerateRequest,
    IntArray,
    Message,
    PolicyVersion,
    Prompt,
    Streams,
)
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger, run_synchronously
from antiphon.record.resume import open_first_lineage
from antiphon.record.store import LedgerStore
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.episode_loop import EpisodeContext
from antiphon.rollout.group_hooks import GroupHooks
from antiphon.rollout.prompt_encoding import PromptEncoder
from antiphon.rollout.scheduler import Scheduler
from antiphon.run.supervision import run_supervised
from antiphon.tasks.config import GradingConfig, PromptsConfig, TaskConfig
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.mixture import Mixture, MixtureTask

pytestmark = pytest.mark.system

SERVER = Path(__file__).parents[1] / "unit" / "tasks" / "judge_server.py"
STEPS, GROUPS, SIBLINGS = 52, 50, 4

# What an answer does to its grader, and to how many of so many it happens.
PROCESS = {"hang": 5, "crash": 5, "segfault": 5, "exception": 200, "thread": 20, "sandbox": 200, "right": 9565}
JUDGE = {"do:hang": 200, "do:status=500": 200, "do:garbage": 200, "do:say=10": 200, "do:say=MARK_10": 9200}
SAYS = [kind for kinds in (PROCESS, JUDGE) for kind in kinds]


class Tokenizer:
    """A token is an answer."""

    eos_ids: tuple[int, ...] = ()

    def encode_prompt(self, messages: Sequence[Message]) -> IntArray:
        return np.array([messages[0].content == "judge"], np.int32)

    def encode_observation(self, messages: Sequence[Message], observation: Message, *, closed: bool = True) -> IntArray:
        raise NotImplementedError

    def decode(self, tokens: IntArray) -> str:
        return SAYS[int(tokens[0])]


async def generate(request: GenerateRequest) -> Completion:
    await asyncio.sleep(0)
    kinds = JUDGE if request.tokens[0] else PROCESS
    drawn = np.random.default_rng(request.sampling.seed).integers(sum(kinds.values()))
    kind = list(kinds)[int(np.searchsorted(np.cumsum(list(kinds.values())), drawn, side="right"))]
    return Completion(
        tokens=np.array([SAYS.index(kind)], np.int32),
        logprobs=np.zeros(1, np.float32),
        versions=np.zeros(1, np.int32),
        finish=FinishReason.STOP,
        streams=Streams({MIXED_CACHE: np.zeros(1, np.bool_)}),
    )


def test_no_broken_grader_is_trained_on_as_zero(tmp_path):
    with subprocess.Popen([sys.executable, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        address = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        trained, failures, stats = asyncio.run(grade_and_train(tmp_path, address))
        server.kill()

    assert len(trained) == STEPS * GROUPS * SIBLINGS >= 10_000
    assert set(trained) == {1.0}
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        recorded = Counter(db.execute("SELECT score, status FROM attempts WHERE status IN ('trained', 'failed')"))
    assert recorded[1.0, "trained"] == len(trained)
    assert set(recorded) == {(1.0, "trained"), (None, "failed")}
    assert failures["reward"] == recorded[None, "failed"] > 200
    # Each fault happened, and was taken for what it is.
    assert stats.timed_out >= 1 and stats.died >= 2 and stats.raised >= 100 and stats.ungraded >= 100, stats
    assert stats.processes >= 10, stats  # graders in processes hung and died, and others came


async def grade_and_train(folder, address):
    tasks = [
        TaskConfig(
            name="process", prompts=PromptsConfig(source="jsonl"), reward="tests.system.broken_graders:grade", weight=9
        ),
        TaskConfig(
            name="judge",
            prompts=PromptsConfig(source="jsonl"),
            reward="judge",
            reward_options={"address": address, "model": "m", "attempts": 1, "timeout": 20},
            grading=GradingConfig(deadline=1.0),
        ),
    ]
    prompts = {
        task.name: [
            Prompt(id=f"{task.name}/{n}", task=task.name, messages=(Message("user", task.name),), seed=n)
            for n in range(500)
        ]
        for task in tasks
    }
    mixture = Mixture(
        [MixtureTask(name=task.name, prompts=prompts[task.name], weight=task.weight) for task in tasks], 0
    )
    config = RolloutConfig(
        groups_per_step=GROUPS,
        group_size=SIBLINGS,
        async_ratio=1.0,
        max_attempts=6,
        timeout=240,
        sampling={"max_tokens": 4},
    )
    deadlines, store = Deadlines(), LedgerStore(folder)
    open_first_lineage(store)
    ledger = Ledger(store, Events(), run=run_synchronously)
    async with RewardRouter(tasks, GradingConfig(workers=1, max_workers=2, deadline=0.5), deadlines) as graders:
        episodes = EpisodeRunner(
            EpisodeContext(encoder=PromptEncoder(Tokenizer()), generate=generate, config=config, max_length=64, seed=0),
            grade=graders.score,
            environments={},
        )
        scheduler = Scheduler(
            config=config,
            version=PolicyVersion(0, 0),
            next_prompt=mixture.next,
            episodes=episodes,
            hooks=GroupHooks(),
            deadlines=deadlines,
            ledger=ledger,
        )

        async def train(owner):
            scheduler.start(owner)
            trained = []
            for _ in range(STEPS):
                groups = await scheduler.next_step()
                await scheduler.wait_durable()
                trained += [trajectory.meta.score.value for group in groups for trajectory in group.trajectories]
                scheduler.publish(scheduler.admission.version.next())
                scheduler.admit()
            scheduler.stop()
            return trained

        trained = await run_supervised((ledger.commit_on_request(),), train)
        await ledger.close()
        store.close()
        return trained, scheduler.progress.failures, graders.stats
